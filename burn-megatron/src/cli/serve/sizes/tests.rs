//! Which sizes are taken, and what is named of those that are not.

use models::{DeepSeekV3Config, LlamaConfig, Mamba2Config, NemotronHConfig};

use super::super::adapted::tests::adapter;
use super::*;

fn args() -> SizeArgs {
    SizeArgs {
        max_num_seqs: 4,
        max_model_len: None,
        max_num_batched_tokens: 64,
        block_size: 16,
        num_blocks: None,
        gpu_memory_utilization: None,
        no_prefix_caching: false,
        enforce_eager: false,
    }
}

fn resolve(args: &SizeArgs) -> Result<SchedulerConfig> {
    let config = FamilyConfig::Llama(LlamaConfig { max_position_embeddings: 100, ..LlamaConfig::tiny() });
    args.resolve(&config, &[], DeviceKind::Cpu, Precision::F32, 1)
}

#[test]
fn sequences_have_all_positions_if_there_is_memory() {
    let sizes = resolve(&args()).unwrap();
    assert_eq!((sizes.max_model_len, sizes.num_blocks), (100, 4 * 7));
    let few = resolve(&SizeArgs { num_blocks: Some(3), ..args() }).unwrap();
    assert_eq!((few.max_model_len, few.num_blocks), (48, 3));
    let none = resolve(&SizeArgs { max_model_len: Some(0), ..args() }).unwrap_err().to_string();
    assert!(none.starts_with("max-model-len 0: "), "{none}");
    let large = resolve(&SizeArgs { block_size: 101, ..args() }).unwrap_err().to_string();
    assert_eq!(large, "--block-size 101: no sequence has more than 100 positions; nearest legal: 100");
    assert!(resolve(&SizeArgs { block_size: 64, max_model_len: Some(8), ..args() }).is_ok());
}

/// A state of each head, and three positions of what is convolved, next to a step's batch of both.
#[test]
fn states_have_memory_of_their_own() {
    let of = Mamba2Config::tiny();
    let (inner, grouped) = (of.num_heads * of.head_dim, of.n_groups * of.state_size);
    let kept = |element: usize| {
        let seen = (of.conv_kernel - 1) * (inner + 2 * grouped) * element;
        2 * (of.num_hidden_layers * (inner * of.state_size * element.max(4) + seen)) as u64
    };
    let config = FamilyConfig::Mamba2(of.clone());
    for (dtype, element) in [(Precision::F32, 4), (Precision::Bf16, 2)] {
        assert_eq!(states(&config, DeviceKind::Cpu, dtype, 1), kept(element));
    }
}

/// transformers' configuration of Mamba-2 has no `max_position_embeddings`.
#[test]
fn states_alone_have_no_positional_limit() {
    let config = FamilyConfig::Mamba2(Mamba2Config::tiny());
    let len = |max_model_len| {
        let args = SizeArgs { max_model_len, ..args() };
        args.resolve(&config, &[], DeviceKind::Cpu, Precision::F32, 1).unwrap().max_model_len
    };
    assert_eq!([len(None), len(Some(100_000))], [2048, 100_000]);
}

/// So many blocks less as they take bytes.
#[test]
fn adapters_take_memory_of_the_cache() {
    let config = FamilyConfig::Llama(LlamaConfig::tiny());
    let at = (DeviceKind::Cpu, Precision::F32);
    let block = cache_bytes(&config, at.0, at.1, 1) * 16;
    let memory = weights(&config, at.0, at.1, 1) + 40 * block;
    let blocks = |adapters: &[Option<Adapter>]| {
        let args = SizeArgs { gpu_memory_utilization: Some(1.0), max_num_seqs: 60, ..args() };
        args.resolve_within(Some(memory), &config, adapters, at.0, at.1, 1).unwrap().num_blocks as u64
    };
    let adapters = [1, 2].map(|elements| adapter(&config, elements * block as usize));
    let taken = of_adapters(&adapters, at.0, at.1, 1).div_ceil(block);
    assert_eq!((blocks(&[None]), blocks(&adapters)), (40, 40 - taken));
}

/// What an error names as the nearest legal value is legal, and one more or less is not.
#[test]
fn what_is_named_as_legal_is() {
    let mamba = FamilyConfig::Mamba2(Mamba2Config::tiny());
    let hybrid = FamilyConfig::NemotronH(NemotronHConfig::tiny());
    for config in [&mamba, &hybrid] {
        let at = (DeviceKind::Cpu, Precision::F32);
        let [weights, states] = [weights(config, at.0, at.1, 1), states(config, at.0, at.1, 1)];
        let block = (cache_bytes(config, at.0, at.1, 1) * 16).max(ENTRY);
        let resolve = |of: SizeArgs, memory: u64| {
            let sizes = of.resolve_within(Some(memory), config, &[], at.0, at.1, 1);
            sizes.map(|sizes| sizes.num_blocks).map_err(|error| error.to_string())
        };
        let whole = || SizeArgs { gpu_memory_utilization: Some(1.0), ..args() };
        let memory = weights + 3 * states + 2 * block;
        let refused = resolve(SizeArgs { max_model_len: Some(32), ..whole() }, memory).unwrap_err();
        assert!(refused.starts_with("--max-num-seqs 4: the states"), "{refused}");
        assert!(refused.ends_with("nearest legal: 3"), "{refused}");
        resolve(SizeArgs { max_num_seqs: 3, max_model_len: Some(32), ..whole() }, memory).unwrap();

        // Not one sequence fits.
        let half = |share| SizeArgs { max_num_seqs: 1, gpu_memory_utilization: Some(share), ..args() };
        let (memory, one) = (2 * (weights + states + block), SizeArgs { max_num_seqs: 1, ..whole() });
        let refused = resolve(half(0.4), memory).unwrap_err();
        assert!(refused.starts_with("--gpu-memory-utilization 0.4"), "{refused}");
        assert!(refused.ends_with("nearest legal: 0.5"), "{refused}");
        assert!(resolve(half(0.5), memory).is_ok());
        says!(resolve(one, memory / 2 - 1).unwrap_err(), "no share is enough");
    }
}

#[test]
fn blocks_that_there_is_no_memory_for_are_refused() {
    let config = FamilyConfig::Llama(LlamaConfig::tiny());
    let at = (DeviceKind::Cpu, Precision::F32);
    let (weights, block) = (weights(&config, at.0, at.1, 1), cache_bytes(&config, at.0, at.1, 1) * 16);
    let resolve = |num_blocks: usize, memory: u64| {
        let args = SizeArgs { num_blocks: Some(num_blocks), ..args() };
        let sizes = args.resolve_within(Some(memory), &config, &[], at.0, at.1, 1);
        sizes.map(|sizes| sizes.num_blocks).map_err(|error| error.to_string())
    };
    // All of the memory, not only the share that is taken by default.
    let memory = weights + 40 * block + 1;
    assert_eq!(resolve(40, memory), Ok(40));
    for blocks in [41, usize::MAX] {
        let refused = resolve(blocks, memory).unwrap_err();
        assert!(refused.starts_with(&format!("--num-blocks {blocks}: ")), "{refused}");
        assert!(refused.ends_with("nearest legal: 40"), "{refused}");
    }
    says!(resolve(1, weights).unwrap_err(), "no room for one");
    says!(resolve(1 << 33, u64::MAX).unwrap_err(), "nearest legal: 4294967295");
    let unknown = SizeArgs { num_blocks: Some(1 << 33), ..args() };
    let refused = unknown.resolve_within(None, &config, &[], at.0, at.1, 1).unwrap_err().to_string();
    assert!(
        refused.starts_with("num-blocks 8589934592: ") && refused.ends_with("nearest legal: 4294967295"),
        "{refused}"
    );
}

/// The latent and the rotated key of each layer, on every rank.
#[test]
fn latents_take_less_than_heads() {
    let of = DeepSeekV3Config::tiny();
    let (layers, width) = (of.num_hidden_layers, of.kv_lora_rank + of.qk_rope_head_dim);
    let config = FamilyConfig::DeepSeekV3(of);
    let bytes = |device, tp| cache_bytes(&config, device, Precision::F32, tp) as usize;
    assert_eq!([1, 2].map(|tp| bytes(DeviceKind::Cuda, tp)), [layers * width * 4; 2]);
    assert_eq!(bytes(DeviceKind::Cpu, 2), 2 * layers * width * 4);
}

#[test]
fn sizes_that_do_not_fit_are_named() {
    let refuse = |args: SizeArgs| resolve(&args).unwrap_err().to_string();
    let long = refuse(SizeArgs { max_model_len: Some(101), ..args() });
    assert!(long.starts_with("--max-model-len 101") && long.ends_with("nearest legal: 100"), "{long}");
    assert!(refuse(SizeArgs { gpu_memory_utilization: Some(1.5), ..args() }).starts_with("--gpu-memory-utilization"));
    assert!(refuse(SizeArgs { num_blocks: Some(2), max_model_len: Some(50), ..args() }).contains("max-model-len 50"));
    assert!(refuse(SizeArgs { block_size: 0, ..args() }).starts_with("block-size 0"));
    assert!(refuse(SizeArgs { max_num_seqs: 0, ..args() }).starts_with("max-num-seqs 0"));
}
