//! FP8 layers cast with the same scales whether one rank has a sequence or several share it, which may be others in
//! every micro-batch: in f64 everything equals one device, as it does without FP8.
//!
//! A GEMM whose tokens on a rank are no multiple of 16 is not in FP8, so all lengths here are such on all ranks.

use backend_dist::launch::Rank;
use backend_dist::ops::fp8::{AmaxAlgorithm, Fp8Format, Fp8Scaling};
use burn::tensor::{Device, FloatDType};
use burn_megatron::verify::{Candidate, Job, RankTrace, Settings, trace};
use models::{
    CausalLm, DeepSeekV3, DeepSeekV3Config, Fp8Config, Llama, LlamaConfig, Mixtral, MixtralConfig, ModelConfig,
    ParamBuilder,
};
use tests::{SETTINGS, assert_equals_one_device, layouts, llama, moe};

/// All parts of four ranks are multiples of 16, and no two of them hold the same key-value head.
fn wide_llama() -> LlamaConfig {
    let llama = LlamaConfig { hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, ..llama() };
    LlamaConfig { num_attention_heads: 8, num_key_value_heads: 4, head_dim: 8, ..llama }
}

fn mixtral() -> MixtralConfig {
    models::sized! { moe();
        hidden_size: 64, moe_intermediate_size: Some(32), num_hidden_layers: 2, num_attention_heads: 8,
        num_key_value_heads: 4, head_dim: 8, num_experts: 4, mlp_only_layers: vec![]
    }
}

fn deepseek() -> DeepSeekV3Config {
    models::sized! { DeepSeekV3Config::tiny();
        vocab_size: 101, hidden_size: 64, intermediate_size: 64, moe_intermediate_size: 32, router_aux_loss_coef: 0.0
    }
}

fn current() -> Fp8Config {
    Fp8Config { format: Some(Fp8Format::Hybrid), ..Fp8Config::default() }
}

fn delayed() -> Fp8Config {
    let (recipe, amax_compute_algo) = (Fp8Scaling::Delayed, AmaxAlgorithm::Max);
    Fp8Config { recipe, amax_history_len: 2, amax_compute_algo, ..current() }
}

fn train<M: CausalLm>(config: &M::Config, layout: &str, fp8: &Fp8Config, job: &Job) -> Vec<RankTrace> {
    let candidate: Candidate = layout.parse().unwrap();
    let build = |rank: &Rank, part| {
        let params = ParamBuilder::new(rank, FloatDType::F64, SETTINGS.seed).with_fp8(fp8, config.dims().layers);
        let params = params.with_part(part).with_recompute(&candidate.recompute);
        Ok(M::build(config, params.with_moe_comm_overlap(candidate.moe_overlap, Some(3)))?)
    };
    trace(&candidate, job, &[Device::flex()].into(), &config.dims(), build).unwrap()
}

/// Three steps on two sequences of 64 tokens.
fn sequences(vocab: usize) -> Job {
    Settings { global_batch: 2, seq: 64, ..SETTINGS }.job(vocab)
}

/// Four sequences of documents of these lengths, of which no two fit into the sequence of the longest one.
fn documents(vocab: usize, [long, short]: [usize; 2]) -> Job {
    let mut job = Settings { global_batch: 4, seq: long + short, ..SETTINGS }.job(vocab);
    for batch in &mut job.batches {
        batch.documents = Some(vec![vec![0, long]; 4]);
    }
    job
}

fn assert_layouts_agree<M: CausalLm>(config: &M::Config, one: &str, layouts: &[&str], job: &Job) {
    let exact = train::<M>(config, one, &Fp8Config::default(), job);
    for fp8 in [current(), delayed()] {
        let expected = train::<M>(config, one, &fp8, job);
        let off = (expected[0].losses[2] - exact[0].losses[2]).abs();
        assert!(off > 1e-6, "{:?}: nothing was cast", fp8.recipe);
        for layout in layouts {
            let what = format!("{layout}, {:?}", fp8.recipe);
            assert_equals_one_device(&expected, &what, &train::<M>(config, layout, &fp8, job));
        }
    }
}

#[test]
fn sequences_that_ranks_share() {
    let layouts = layouts![
        "CP2" "CP4" "CP2 all_gather" "CP4 a2a" "CP4 a2a+p2p:2" "TP2 CP2" "TP2 SP CP2" "TP2 SP CP2 a2a selective"
        "PP2 CP2 ZeRO1 uniform1" "CP2 ZeRO3"
    ];
    assert_layouts_agree::<Llama>(&wide_llama(), "TP1", &layouts, &sequences(101));
    assert_layouts_agree::<Llama>(&wide_llama(), "TP1 x2", &["CP2 DP2", "PP2 CP2 x2 zb-h1"], &sequences(101));
}

#[test]
fn latent_attention_of_sequences_that_ranks_share() {
    assert_layouts_agree::<DeepSeekV3>(&deepseek(), "TP1", &["CP2", "CP2 EP2", "TP2 SP CP2 EP2 ETP1"], &sequences(101));
}

/// Their tokens are dispatched to one rank, to some of them, to each of them, or with those of others.
#[test]
fn experts_of_sequences_that_ranks_share() {
    let layouts = layouts![
        "CP2" "CP2 EP2" "CP4 EP2" "CP2 EP1 ETP2" "TP2 CP2 EP2 ETP1" "TP2 SP CP2 EP4 ETP1" "TP2 SP CP2 EP1 ETP1"
        "CP2 EP2 selective"
    ];
    assert_layouts_agree::<Mixtral>(&mixtral(), "TP1", &layouts, &sequences(101));
    assert_layouts_agree::<Mixtral>(
        &mixtral(),
        "TP1 x2",
        &["CP2 DP2 EP4", "CP2 DP2 EP2", "CP2 EP2 x2"],
        &sequences(101),
    );
}

/// Up to three chunks of every rank's experts, and tokens of an expert from one micro-batch and several, and from
/// several ranks.
#[test]
fn experts_overlapped_with_collectives() {
    let layouts = layouts![
        "CP2 EP2 moe-overlap" "CP4 EP2 moe-overlap" "CP2 EP1 ETP2 moe-overlap selective"
        "TP2 SP CP2 EP2 ETP1 ZeRO3 moe-overlap" "TP4 EP2 ETP1 moe-overlap" "PP2 CP2 EP2 zb-h1 moe-overlap"
    ];
    let config = MixtralConfig { num_experts: 8, ..mixtral() };
    assert_layouts_agree::<Mixtral>(&config, "TP1", &layouts, &sequences(101));
    let layouts = ["DP2 EP2 moe-overlap", "CP2 DP2 EP4 ZeRO1 moe-overlap"];
    assert_layouts_agree::<Mixtral>(&config, "TP1 x2", &layouts, &sequences(101));
}

/// Long documents are shared by more ranks than short ones.
#[test]
fn documents_that_are_assigned() {
    let job = documents(101, [96, 64]);
    assert_layouts_agree::<Llama>(&wide_llama(), "TP1 dynamic:96", &["DP2 dynamic:64", "TP2 SP CP2 dynamic:64"], &job);
    let job = documents(101, [192, 128]);
    assert_layouts_agree::<Llama>(
        &wide_llama(),
        "TP1 dynamic:192",
        &["DP4 dynamic:64", "DP2 CP2 a2a dynamic:128"],
        &job,
    );
}

#[test]
fn experts_of_documents_that_are_assigned() {
    let layouts = ["DP4 dynamic:64", "DP4 EP2 dynamic:128", "CP4 EP4 ZeRO3 dynamic:64", "TP2 DP2 EP2 ETP1 dynamic:128"];
    assert_layouts_agree::<Mixtral>(&mixtral(), "TP1 dynamic:192", &layouts, &documents(101, [192, 64]));
}

#[test]
fn experts_that_other_ranks_share_than_sequences_are_refused() {
    let candidate: Candidate = "CP3 DP2 EP2".parse().unwrap();
    let config = mixtral();
    let build = |rank: &Rank, _| {
        let params = ParamBuilder::new(rank, FloatDType::F64, 1).with_fp8(&current(), 2);
        Ok(Mixtral::build(&config, params)?)
    };
    let job = Settings { global_batch: 2, seq: 96, ..SETTINGS }.job(101);
    let refused = trace(&candidate, &job, &[Device::flex()].into(), &config.dims(), build).err().unwrap().to_string();
    assert!(
        refused.contains("context-parallel 3 and the 2 data-parallel ranks")
            && refused.contains("nearest legal context-parallel: 2, 4"),
        "{refused}"
    );
}
