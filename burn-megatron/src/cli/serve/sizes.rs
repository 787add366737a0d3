//! How many sequences there may be, and how long.

use anyhow::{Result, bail};
use models::lora::Adapter;
use models::{FamilyConfig, ModelConfig};

use super::adapted::of_adapters;
use crate::cli::chat::positions;
use crate::cli::device::DeviceKind;
use crate::cli::forward::Precision;
use crate::cli::generate::{cache_bytes, memory};
use crate::config::decoder_of;
use crate::serve::SchedulerConfig;

/// Default length of a sequence where the model has no limit, as in vLLM.
const UNLIMITED: usize = 2048;

/// Sizes of the scheduler, by vLLM's names.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Scheduler")]
pub(super) struct SizeArgs {
    /// Most sequences that run at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_num_seqs: usize,
    /// Most tokens of a sequence, prompt and answer together. Default: the model's positions, as far as there is memory;
    /// 2048 for a model without a limit
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<usize>,
    /// Most tokens of a step; a longer prompt is read in several steps
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub max_num_batched_tokens: usize,
    /// Positions of a block of the KV cache
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub block_size: usize,
    /// Blocks of the KV cache. Default: as many as all sequences need, as far as there is memory
    #[arg(long, alias = "num-gpu-blocks-override", value_name = "N")]
    pub num_blocks: Option<usize>,
    /// Share of the memory that weights and KV cache may take. Default: 0.85 of a GPU, 0.5 of what the host has
    #[arg(long, value_name = "SHARE")]
    pub gpu_memory_utilization: Option<f64>,
    /// Read every prompt from its first token on. Else what begins with the same tokens as earlier sequences has their blocks
    #[arg(long, alias = "no-enable-prefix-caching")]
    pub no_prefix_caching: bool,
    /// GPUs: record no CUDA graphs. Else decode steps on one GPU are recorded, with kernels of their own
    #[arg(long)]
    pub enforce_eager: bool,
}

impl SizeArgs {
    /// The sizes for a model and its adapters. Fails if they cannot serve, or the model has not so many positions.
    pub fn resolve(
        &self,
        config: &FamilyConfig,
        adapters: &[Option<Adapter>],
        device: DeviceKind,
        dtype: Precision,
        tp: usize,
    ) -> Result<SchedulerConfig> {
        self.resolve_within(memory(device), config, adapters, device, dtype, tp)
    }

    /// The same where so many bytes of memory are known of.
    fn resolve_within(
        &self,
        memory: Option<u64>,
        config: &FamilyConfig,
        adapters: &[Option<Adapter>],
        device: DeviceKind,
        dtype: Precision,
        tp: usize,
    ) -> Result<SchedulerConfig> {
        let positions = positions(config);
        if let Some((len, positions)) = self.max_model_len.zip(positions).filter(|(len, most)| len > most) {
            bail!("--max-model-len {len}: the model is made for {positions} positions; nearest legal: {positions}");
        }
        let default = if device == DeviceKind::Cuda { 0.85 } else { 0.5 };
        let share = self.gpu_memory_utilization.unwrap_or(default);
        if !(share > 0.0 && share <= 1.0) {
            bail!(
                "--gpu-memory-utilization {share}: a share above 0 and at most 1 is needed; nearest legal: {default}"
            );
        }
        let (block_size, positions) = (self.block_size.max(1), positions.unwrap_or(UNLIMITED));
        let wanted =
            self.max_model_len.unwrap_or(positions).div_ceil(block_size).saturating_mul(self.max_num_seqs.max(1));
        let needs = Needs {
            weights: weights(config, device, dtype, tp) + of_adapters(adapters, device, dtype, tp),
            states: states(config, device, dtype, tp),
            // Where a block holds nothing, it is a number in the scheduler.
            block: cache_bytes(config, device, dtype, tp).saturating_mul(block_size as u64).max(4),
        };
        let fitting = memory.map_or(Ok(u64::MAX), |bytes| self.fitting_blocks(&needs, bytes, share))?;
        let num_blocks = self.num_blocks.unwrap_or(wanted.min(fitting.min(u32::MAX.into()) as usize));
        let room = num_blocks.saturating_mul(block_size);
        let sizes = SchedulerConfig {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_model_len: self.max_model_len.unwrap_or(positions.min(room)),
            block_size: self.block_size,
            num_blocks,
            enable_prefix_caching: !self.no_prefix_caching && config.unshared_prefixes().is_none(),
            enforce_eager: self.enforce_eager,
        };
        sizes.check()?;
        Ok(sizes)
    }

    /// Blocks that fit into a share of the bytes, next to the weights, the adapters and the states of all sequences.
    fn fitting_blocks(&self, needs: &Needs, bytes: u64, share: f64) -> Result<u64> {
        let Needs { weights, states, block } = *needs;
        let free = ((bytes as f64 * share) as u64).saturating_sub(weights);
        // Who gives --num-blocks knows better.
        let cache = |blocks: usize| if self.num_blocks.is_some() { 0 } else { block.saturating_mul(blocks as u64) };
        let one = states.saturating_add(cache(1));
        if free < one {
            let needed = ((weights.saturating_add(one)) as f64 / bytes as f64 * 100.0).ceil() / 100.0;
            let nearest = match needed <= 1.0 {
                true => format!("nearest legal: {needed}"),
                false => "no share is enough: --layout with more GPUs or --dtype bf16 takes less of each".to_string(),
            };
            bail!(
                "--gpu-memory-utilization {share}: {free} of {bytes} bytes are left after the weights, and one sequence takes {states} of \
                 recurrent states and {} of cache; {nearest}",
                cache(1)
            );
        }
        let fits = |blocks: usize| free.saturating_sub(cache(blocks)).checked_div(states).unwrap_or(u64::MAX);
        // One of them as long as asked for. If there is no memory for that, it is the length that will be refused.
        let most = match fits(self.max_model_len.unwrap_or(1).div_ceil(self.block_size.max(1))) {
            0 => fits(1),
            most => most,
        };
        if most < self.max_num_seqs as u64 {
            bail!(
                "--max-num-seqs {}: the states of recurrent layers take {states} bytes for each sequence, and {free} bytes are left after \
                 the weights; nearest legal: {most}",
                self.max_num_seqs
            );
        }
        Ok((free - states * self.max_num_seqs as u64) / block)
    }
}

/// Bytes of what is kept while a model serves.
struct Needs {
    /// With the adapters.
    weights: u64,
    /// The recurrent states of a sequence.
    states: u64,
    block: u64,
}

/// Bytes of the weights in the memory that one rank or, on the CPU, all ranks have.
fn weights(config: &FamilyConfig, device: DeviceKind, dtype: Precision, tp: usize) -> u64 {
    (config.parameter_count() / sharing(device, tp) * dtype.bytes()) as u64
}

/// Bytes of the states of a sequence there. A step holds those that it reads as one batch too.
fn states(config: &FamilyConfig, device: DeviceKind, dtype: Precision, tp: usize) -> u64 {
    2 * decoder_of(config).state_bytes(sharing(device, tp), dtype.bytes()) as u64
}

/// The ranks that share what is sharded and do not share a memory.
fn sharing(device: DeviceKind, tp: usize) -> usize {
    if device == DeviceKind::Cuda { tp.max(1) } else { 1 }
}

#[cfg(test)]
mod tests {
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
            let block = (cache_bytes(config, at.0, at.1, 1) * 16).max(4);
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
        assert!(
            refuse(SizeArgs { gpu_memory_utilization: Some(1.5), ..args() }).starts_with("--gpu-memory-utilization")
        );
        assert!(
            refuse(SizeArgs { num_blocks: Some(2), max_model_len: Some(50), ..args() }).contains("max-model-len 50")
        );
        assert!(refuse(SizeArgs { block_size: 0, ..args() }).starts_with("block-size 0"));
        assert!(refuse(SizeArgs { max_num_seqs: 0, ..args() }).starts_with("max-num-seqs 0"));
    }
}
