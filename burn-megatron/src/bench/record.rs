//! The record of a measurement.

use backend_dist::gpu::MemoryUse;
use backend_dist::startup::Startup;
use serde::{Deserialize, Serialize};

use super::profile::{Ceilings, ProfileReport};
use super::{DocumentReport, Measured, Origin, Timing};
use crate::config::RunConfig;
use crate::flops::AttentionCount;
use crate::metrics::{RankReading, mean};
use crate::plan::describe;
use models::ModelConfig;

/// The run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// Name of the recipe or path of the file.
    pub recipe: String,
    /// The model's family.
    pub model: String,
    /// Its parameters.
    pub parameters: usize,
    /// Parallel layout, ZeRO stage and recomputation.
    pub layout: String,
    /// Ranks.
    pub ranks: usize,
    /// Sequence length.
    pub seq_length: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Sequences of a step.
    pub global_batch: usize,
    /// Tokens of a step, divided by the ranks.
    #[serde(default)]
    pub tokens_per_rank: usize,
    /// Precision.
    pub dtype: String,
    /// Source of the tokens.
    pub data: String,
    /// Every key of the run, as a configuration file.
    pub config: String,
}

impl Setup {
    /// Of a run whose tokens come from `data`.
    pub fn of(recipe: &str, config: &RunConfig, data: &str) -> Self {
        let (training, sizes) = (&config.training, &config.model.config);
        Self {
            recipe: recipe.into(),
            model: sizes.family().into(),
            parameters: sizes.parameter_count(),
            layout: layout(config),
            ranks: config.parallel.world_size(),
            seq_length: training.seq_length,
            micro_batch: training.micro_batch,
            global_batch: training.global_batch,
            tokens_per_rank: config.tokens_per_step() / config.parallel.world_size().max(1),
            dtype: serde_json::to_value(training.dtype)
                .ok()
                .and_then(|v| v.as_str().map(String::from))
                .unwrap_or_default(),
            data: data.into(),
            config: config.to_toml(),
        }
    }
}

/// `DP8 ZeRO1, micro-batch 1, recompute none`.
fn layout(config: &RunConfig) -> String {
    let mut layout = config.job().map_or_else(|_| config.parallel.to_string(), |job| describe(&job));
    if config.performance.moe_router_force_load_balancing {
        layout += ", forced load balancing";
    }
    layout
}

/// The device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// `CPU ranks`, or the GPUs' name.
    pub name: String,
    /// Versions of driver, CUDA and libraries.
    pub versions: Vec<(String, String)>,
    /// Peak FLOP/s of dense GEMMs in the run's precision, by the data sheet.
    pub peak: Option<f64>,
    /// Which data sheet.
    pub source: Option<String>,
}

/// The spread of a number, by linear interpolation between sorted values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Smallest.
    pub min: f64,
    /// A tenth is below.
    pub p10: f64,
    /// Half is below.
    pub p50: f64,
    /// Nine tenths are below.
    pub p90: f64,
    /// Largest.
    pub max: f64,
}

impl Distribution {
    /// Of some values; zeros if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * sorted.len().saturating_sub(1) as f64;
            let value = |index: usize| sorted.get(index).copied().unwrap_or_default();
            let (below, rest) = (place as usize, place.fract());
            value(below) + if rest > 0.0 { rest * (value(below + 1) - value(below)) } else { 0.0 }
        };
        Self { min: at(0.0), p10: at(0.1), p50: at(0.5), p90: at(0.9), max: at(1.0) }
    }
}

/// One run of the clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Seconds from the first step's begin until all ranks and devices were done.
    pub seconds: f64,
    /// Tokens per second and rank over these seconds.
    pub tokens_per_second_per_rank: f64,
    /// Seconds of every step on rank 0's clock.
    pub steps: Vec<f64>,
}

/// Bytes of the fullest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// As [`plan`](crate::plan) says.
    pub planned: Option<u64>,
    /// As measured; see [`RankReading::memory`].
    pub used: Option<u64>,
    /// What the allocator had taken from the GPU.
    pub reserved: Option<u64>,
}

/// A measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// When, where and how.
    pub origin: Origin,
    /// The run.
    pub setup: Setup,
    /// The device.
    pub device: Device,
    /// How much was measured.
    pub timing: Timing,
    /// Tokens per second and rank: the median of the runs.
    pub tokens_per_second_per_rank: f64,
    /// Tokens per second and rank, step by step.
    pub steps_tokens_per_second_per_rank: Distribution,
    /// Seconds of all steps.
    pub step_seconds: Distribution,
    /// FLOPs of a token, causal attention counted once.
    pub flops_per_token: f64,
    /// FLOPs of a token, attention counted in full.
    pub flops_per_token_full_attention: f64,
    /// TFLOP/s of a rank, causal attention counted once, without recomputation.
    pub teraflops_per_rank: f64,
    /// The same, attention counted in full.
    pub teraflops_per_rank_full_attention: f64,
    /// Share of the device's peak that [`teraflops_per_rank`](Self::teraflops_per_rank) is.
    pub mfu: Option<f64>,
    /// The same, attention counted in full.
    pub mfu_full_attention: Option<f64>,
    /// Idle share of the GPUs in the measured time: mean over the ranks, of the last run.
    pub idle: Option<f64>,
    /// Clock of the GPUs' SMs in MHz: mean over ranks, of the last run.
    pub clock: Option<f64>,
    /// Watts of a GPU: the same mean.
    pub power: Option<f64>,
    /// Bytes of the fullest rank.
    pub memory: Memory,
    /// Memory of every rank's GPU after the last run, by use.
    #[serde(default)]
    pub memory_use: Vec<MemoryUse>,
    /// Loss of the first warm-up step.
    pub first_loss: f64,
    /// Loss of the last step.
    pub last_loss: f64,
    /// Seconds from the launch of the ranks to the end of the first step.
    pub first_step: f64,
    /// How rank 0 started, from the start of the program.
    #[serde(default)]
    pub startup: Startup,
    /// The documents, in sequences with several documents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<DocumentReport>,
    /// Every run.
    pub runs: Vec<Run>,
    /// Readings of every rank's device.
    pub ranks: Vec<RankReading>,
    /// The profile of a step, if one was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileReport>,
}

impl Record {
    /// The record of a measurement. `planned` are the bytes of the fullest rank by plan. Attention within
    /// `documents` counts by their lengths.
    pub fn new(
        config: &RunConfig,
        setup: Setup,
        device: Device,
        timing: Timing,
        planned: Option<u64>,
        documents: Option<DocumentReport>,
        seen: Measured,
    ) -> Self {
        let ranks = setup.ranks.max(1) as f64;
        let tokens = config.tokens_per_step() as f64;
        let seq = documents.as_ref().map_or(config.training.seq_length, |of| of.of_a_token.round() as usize);
        let shape = config.flop_shape(seq);
        let [causal, full] = [AttentionCount::Causal, AttentionCount::Full].map(|count| shape.per_token(count));
        let run = |(steps, seconds): (Vec<f64>, f64)| {
            let rate = tokens * steps.len() as f64 / seconds / ranks;
            Run { seconds, tokens_per_second_per_rank: rate, steps }
        };
        let runs: Vec<Run> = seen.steps.into_iter().zip(seen.runs).map(run).collect();
        let rate = Distribution::of(runs.iter().map(|run| run.tokens_per_second_per_rank)).p50;
        let steps = || runs.iter().flat_map(|run| run.steps.iter().copied());
        let most = |of: fn(&RankReading) -> Option<u64>| seen.ranks.iter().filter_map(of).max();
        let clock = mean(&seen.ranks, |rank| rank.clock);
        let report = |profile| ProfileReport::new(profile, timing.profile, Ceilings::of(&device.name), clock);
        Self {
            origin: Origin::here(),
            profile: seen.profile.as_ref().map(report),
            tokens_per_second_per_rank: rate,
            steps_tokens_per_second_per_rank: Distribution::of(steps().map(|seconds| tokens / seconds / ranks)),
            step_seconds: Distribution::of(steps()),
            flops_per_token: causal,
            flops_per_token_full_attention: full,
            teraflops_per_rank: rate * causal / 1e12,
            teraflops_per_rank_full_attention: rate * full / 1e12,
            mfu: device.peak.map(|peak| rate * causal / peak),
            mfu_full_attention: device.peak.map(|peak| rate * full / peak),
            idle: mean(&seen.ranks, |rank| rank.idle),
            clock,
            power: mean(&seen.ranks, |rank| rank.power),
            memory: Memory { planned, used: most(|rank| rank.memory), reserved: most(|rank| rank.reserved) },
            memory_use: seen.memory,
            first_loss: seen.losses.first().copied().unwrap_or(f64::NAN),
            last_loss: seen.losses.last().copied().unwrap_or(f64::NAN),
            first_step: seen.first_step,
            startup: seen.startup,
            documents,
            runs,
            ranks: seen.ranks,
            setup,
            device,
            timing,
        }
    }
}
