//! Trains one device and every candidate on the same random batches, and compares.

use super::{Candidate, Job, Reference, Row, TraceError, compare, trace};
use crate::engine::{EngineConfig, TokenBatch};
use crate::lr::{LrConfig, LrDecay, Span};
use crate::optim::AdamWConfig;
use backend_dist::launch::Rank;
use backend_dist::shard::Init;
use burn::tensor::{Device, FloatDType};
use models::param::ParamBuilder;
use models::{CausalLm, ModelConfig, Recompute};

/// Largest relative difference that rounding alone can explain in double precision on models of this size.
pub const TOLERANCE: f64 = 1e-10;

/// What to train in every layout.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Optimizer steps.
    pub steps: usize,
    /// Rows per step over all ranks.
    pub global_batch: usize,
    /// Tokens per row.
    pub seq: usize,
    /// Seed of weights, tokens and dropout.
    pub seed: u64,
    /// Largest relative difference that passes.
    pub tolerance: f64,
}

impl Settings {
    /// Random batches for a vocabulary; about one token in eight does not count in the loss, so that a wrong count
    /// shows.
    pub fn job(&self, vocab_size: usize) -> Job {
        let draw =
            |name: &str, index: usize| Init::Uniform { low: 0.0, high: 1.0 }.value(self.seed, name, index as u64);
        let batch = |step: usize| {
            let ids: Vec<i64> = (0..self.global_batch * (self.seq + 1))
                .map(|index| (draw(&format!("tokens {step}"), index) * vocab_size as f64) as i64)
                .collect();
            let mask = (0..self.global_batch * self.seq).map(|index| draw(&format!("mask {step}"), index) < 0.875);
            TokenBatch { mask: Some(mask.collect()), ..TokenBatch::from_sequences(&ids, self.seq) }
        };
        Job { engine: self.engine(), batches: (0..self.steps).map(batch).collect() }
    }

    /// Warm-up, decay and clipping are all in use.
    fn engine(&self) -> EngineConfig {
        let lr = LrConfig {
            max: 1e-3,
            min: 1e-4,
            init: 5e-4,
            warmup: Span::Steps(1),
            decay: Span::Steps(self.steps as u64 + 2),
            form: LrDecay::Cosine,
        };
        EngineConfig {
            optimizer: AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() }.into(),
            clip: Some(0.5),
            seed: self.seed,
            ..EngineConfig::new(self.global_batch, self.global_batch, lr)
        }
    }
}

/// Trains `config` in double precision on one CPU device and, on `devices`, in every candidate layout; `on_row` hears of
/// each as it is done. Rank `r` owns `devices[r % devices.len()]`.
///
/// # Errors
/// If a layout cannot be run; differences are in the rows.
pub fn verify<M: CausalLm>(
    config: &M::Config,
    settings: &Settings,
    devices: &[Device],
    candidates: &[Candidate],
    mut on_row: impl FnMut(&Row),
) -> Result<Vec<Row>, TraceError> {
    let job = settings.job(config.vocab_size());
    let dims = config.dims();
    let build = |recompute: &Recompute| {
        let recompute = recompute.clone();
        move |rank: &Rank, part| {
            let params = ParamBuilder::new(rank, FloatDType::F64, settings.seed);
            Ok(M::build(config, params.with_part(part).with_recompute(&recompute))?)
        }
    };
    let single = Candidate::default();
    let one = trace(&single, &job, &[Device::flex()], &dims, build(&single.recompute))?;
    let reference = Reference::new(&one[0])?;
    let mut rows = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        let differences = compare(&reference, &trace(candidate, &job, devices, &dims, build(&candidate.recompute))?);
        let row = Row { candidate: candidate.clone(), differences, tolerance: settings.tolerance };
        on_row(&row);
        rows.push(row);
    }
    Ok(rows)
}
