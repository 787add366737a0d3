//! The losses of two runs of the same model, one on a CPU and one in some layout on some devices.

use super::run::initial;
use super::{Candidate, Settings, TraceError};
use crate::engine::{EngineError, RankEngine};
use crate::optim::AdamWConfig;
use backend_dist::mesh::Mesh;
use backend_dist::process::Cluster;
use burn::tensor::Device;
use models::{CausalLm, ModelConfig, ParamBuilder};
use std::fmt;

/// Largest relative difference of two losses of a curve that passes.
pub const CURVE_TOLERANCE: f64 = 1e-4;

/// Batches that a curve's steps take in turn, so that there is something to learn.
const BATCHES: usize = 4;

/// Learning rate before and after the warm-up and at the end: fast, so that a short curve falls.
const RATES: [f64; 3] = [2e-3, 4e-3, 4e-4];

/// Two loss curves.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Of the layout on its devices.
    pub losses: Vec<f64>,
    /// Of one CPU device.
    pub expected: Vec<f64>,
}

impl Curve {
    /// The step with the largest relative difference, counted from 0, and the difference; NaN is the largest.
    pub fn worst(&self) -> (usize, f64) {
        let gaps = self.losses.iter().zip(&self.expected).map(|(a, b)| (a - b).abs() / b.abs().max(f64::MIN_POSITIVE));
        gaps.enumerate().fold((0, 0.0), |worst, (step, gap)| {
            if !worst.1.is_nan() && (gap.is_nan() || gap > worst.1) { (step, gap) } else { worst }
        })
    }

    /// Whether the largest difference is at most 1e-4.
    pub fn passes(&self) -> bool {
        self.losses.len() == self.expected.len() && self.worst().1 <= CURVE_TOLERANCE
    }
}

impl fmt::Display for Curve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = |losses: &[f64]| losses.last().copied().unwrap_or(f64::NAN);
        let (step, gap) = self.worst();
        write!(
            f,
            "{} steps, loss {:.4} to {:.4} (one CPU: {:.4}); largest relative difference {gap:.1e} at step {step}, allowed \
             {CURVE_TOLERANCE:.0e}: {}",
            self.losses.len(),
            self.losses.first().copied().unwrap_or(f64::NAN),
            end(&self.losses),
            end(&self.expected),
            if self.passes() { "equal" } else { "DIFFERENT" }
        )
    }
}

/// Trains `settings.steps` steps on one CPU device and in the layout of `candidate` on `cluster`, both in the precision
/// of `settings` and from the same weights. Fails if the layout cannot be run.
pub fn curve<M: CausalLm>(
    config: &M::Config,
    settings: &Settings,
    cluster: &Cluster,
    candidate: &Candidate,
) -> Result<Curve, TraceError> {
    let mut job = settings.job(config.vocab_size());
    job.batches.truncate(BATCHES);
    let lr = &mut job.engine.lr;
    [lr.init, lr.max, lr.min] = RATES;
    job.engine.optimizer = AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() }.into();
    let (initial, dims) = (initial::<M>(config, settings)?, config.dims());
    let run = |candidate: &Candidate, cluster: &Cluster| -> Result<Vec<f64>, TraceError> {
        let engine = job.engine_in(candidate);
        let mut ranks = cluster.launch_all(&Mesh::new(candidate.layout.clone())?, |rank| {
            let build = |part| {
                let params = ParamBuilder::new(&rank, settings.dtype, settings.seed).with_source(&initial);
                let params = params.with_part(part).with_moe_comm_overlap(candidate.moe_overlap, Some(2));
                Ok(M::build(config, params.with_recompute(&candidate.recompute))?)
            };
            let mut engine = RankEngine::new(&rank, &dims, build, engine.clone())?;
            let batches = job.batches.iter().cycle().take(settings.steps);
            Ok(batches.map(|batch| Ok(engine.train_step(batch)?.loss)).collect::<Result<Vec<f64>, EngineError>>()?)
        })?;
        Ok(ranks.remove(0))
    };
    Ok(Curve { losses: run(candidate, cluster)?, expected: run(&Candidate::default(), &[Device::flex()].into())? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_as_good_as_its_worst_step() {
        let curve = Curve { losses: vec![4.0, 2.0, 1.0003], expected: vec![4.0, 2.0001, 1.0] };
        assert_eq!(curve.worst().0, 2);
        assert!(curve.to_string().starts_with("3 steps, loss 4.0000 to 1.0003 (one CPU: 1.0000); largest"), "{curve}");
        assert!(curve.to_string().ends_with("at step 2, allowed 1e-4: DIFFERENT") && !curve.passes(), "{curve}");
        let curve = Curve { losses: vec![4.0, f64::NAN, 1.0], expected: vec![4.0, 2.0, 1.0] };
        assert!(curve.worst().1.is_nan() && !curve.passes());
    }
}
