//! How many sequences there may be, and how long.

#[cfg(test)]
mod tests;

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

/// Default positions of a block.
const BLOCK_SIZE: usize = 64;

/// Bytes that the scheduler has for a block, where models keep nothing in it.
const ENTRY: u64 = 64;

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
    #[arg(long, value_name = "N", default_value_t = BLOCK_SIZE)]
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
        // A short model's sequences have one block each.
        let (longest, block) = (self.max_model_len.unwrap_or(positions), self.block_size);
        if block > longest.max(BLOCK_SIZE) {
            let nearest = longest.max(BLOCK_SIZE);
            bail!("--block-size {block}: no sequence has more than {longest} positions; nearest legal: {nearest}");
        }
        let wanted = self
            .max_model_len
            .unwrap_or(positions)
            .max(1)
            .div_ceil(block_size)
            .saturating_mul(self.max_num_seqs.max(1));
        let needs = Needs {
            weights: weights(config, device, dtype, tp) + of_adapters(adapters, device, dtype, tp),
            states: states(config, device, dtype, tp),
            block: cache_bytes(config, device, dtype, tp).saturating_mul(block_size as u64).max(ENTRY),
        };
        let fitting = memory.map_or(Ok(u64::MAX), |bytes| self.fitting_blocks(&needs, bytes, share))?;
        if let Some((blocks, bytes)) = self.num_blocks.zip(memory) {
            self.check_blocks(&needs, blocks as u64, bytes)?;
        }
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
        // Who gives --num-blocks knows better: all of the memory may be theirs.
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

    /// Whether there is memory for the blocks that were asked for, next to all else that is kept.
    fn check_blocks(&self, needs: &Needs, blocks: u64, bytes: u64) -> Result<()> {
        let kept = needs.weights.saturating_add(needs.states.saturating_mul(self.max_num_seqs as u64));
        let most = (bytes.saturating_sub(kept) / needs.block).min(u32::MAX.into());
        if blocks <= most {
            return Ok(());
        }
        let nearest = match most {
            0 => "there is no room for one: --layout with more GPUs or --dtype bf16 takes less of each".to_string(),
            most => format!("nearest legal: {most}"),
        };
        bail!(
            "--num-blocks {blocks}: a block takes {} bytes, and of {bytes} bytes weights and recurrent states take {kept}; {nearest}",
            needs.block
        );
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
