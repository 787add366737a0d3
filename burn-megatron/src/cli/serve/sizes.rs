//! How many sequences there may be, and how long.

use anyhow::{Result, bail};
use models::{FamilyConfig, ModelConfig};

use crate::cli::chat::positions;
use crate::cli::device::DeviceKind;
use crate::cli::forward::Precision;
use crate::cli::generate::{cache_bytes, memory};
use crate::config::decoder_of;
use crate::serve::SchedulerConfig;

/// Sizes of the scheduler, by vLLM's names.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Scheduler")]
pub(super) struct SizeArgs {
    /// Most sequences that run at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_num_seqs: usize,
    /// Most tokens of a sequence, prompt and answer together. Default: the model's positions, as far as there is memory
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
    /// GPUs: record no CUDA graphs. Else decode steps on one GPU are recorded, with kernels of their own
    #[arg(long)]
    pub enforce_eager: bool,
}

impl SizeArgs {
    /// The sizes for a model.
    ///
    /// # Errors
    /// If they cannot serve, or the model has not so many positions.
    pub fn resolve(
        &self,
        config: &FamilyConfig,
        device: DeviceKind,
        dtype: Precision,
        tp: usize,
    ) -> Result<SchedulerConfig> {
        let positions = positions(config);
        if let Some(len) = self.max_model_len.filter(|len| *len > positions) {
            bail!("--max-model-len {len}: the model is made for {positions} positions; nearest legal: {positions}");
        }
        let default = if device == DeviceKind::Cuda { 0.85 } else { 0.5 };
        let share = self.gpu_memory_utilization.unwrap_or(default);
        if !(share > 0.0 && share <= 1.0) {
            bail!(
                "--gpu-memory-utilization {share}: a share above 0 and at most 1 is needed; nearest legal: {default}"
            );
        }
        let block_size = self.block_size.max(1);
        let wanted =
            self.max_model_len.unwrap_or(positions).div_ceil(block_size).saturating_mul(self.max_num_seqs.max(1));
        let each = cache_bytes(config, device, dtype, tp).saturating_mul(block_size as u64).max(1);
        let free = memory(device).map(|bytes| {
            let free = (bytes as f64 * share) as u64;
            free.saturating_sub(weights(config, device, dtype, tp))
        });
        let states = states(config, device, dtype, tp);
        let of_states = states.saturating_mul(self.max_num_seqs as u64);
        if let Some(free) = free.filter(|free| *free < of_states) {
            bail!(
                "--max-num-seqs {}: the states of recurrent layers take {states} bytes for each sequence, and {free} bytes are left after \
                 the weights; nearest legal: {}",
                self.max_num_seqs,
                (free / states).max(1)
            );
        }
        let fitting = free.map_or(usize::MAX, |free| ((free - of_states) / each) as usize);
        let num_blocks = self.num_blocks.unwrap_or(wanted.min(fitting));
        let room = num_blocks.saturating_mul(block_size);
        let sizes = SchedulerConfig {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_model_len: self.max_model_len.unwrap_or(positions.min(room)),
            block_size: self.block_size,
            num_blocks,
            enforce_eager: self.enforce_eager,
        };
        sizes.check()?;
        Ok(sizes)
    }
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
    use models::{LlamaConfig, Mamba2Config};

    use super::*;

    fn args() -> SizeArgs {
        SizeArgs {
            max_num_seqs: 4,
            max_model_len: None,
            max_num_batched_tokens: 64,
            block_size: 16,
            num_blocks: None,
            gpu_memory_utilization: None,
            enforce_eager: false,
        }
    }

    fn resolve(args: &SizeArgs) -> Result<SchedulerConfig> {
        let config = FamilyConfig::Llama(LlamaConfig { max_position_embeddings: 100, ..LlamaConfig::tiny() });
        args.resolve(&config, DeviceKind::Cpu, Precision::F32, 1)
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
        let none = SizeArgs { gpu_memory_utilization: Some(1e-12), ..args() };
        let refused = none.resolve(&config, DeviceKind::Cpu, Precision::F32, 1).unwrap_err().to_string();
        assert!(refused.starts_with("--max-num-seqs 4: the states of recurrent layers take"), "{refused}");
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
