//! Steps that are not finite.

use super::*;
use crate::engine::{Anomaly, AnomalyAction, AnomalyConfig};

/// The bits of the parameters after some batches, and which of their steps were skipped.
type After = (Vec<u64>, Vec<bool>);

fn after(dp: usize, anomaly: AnomalyConfig, batches: &[TokenBatch]) -> Result<Vec<After>, RunError> {
    let mesh = Mesh::new(ParallelLayout { dp, ..Default::default() }).unwrap();
    let config = EngineConfig { anomaly, ..config(1, LossMean::PerToken) };
    launch(&mesh, &[Device::flex()], |rank: Rank| {
        let mut engine = RankEngine::new(&rank, &NoConfig.dims(), |_| Ok(bigram(Some(4))), config.clone())?;
        let mut skipped = Vec::new();
        for batch in batches {
            let report = engine.train_step(batch)?;
            assert_eq!(report.skipped, matches!(report.anomaly, Some((Anomaly::NonFinite { .. }, _))));
            skipped.push(report.skipped);
        }
        Ok((engine.parameters().remove(0).1.into_iter().map(f64::to_bits).collect(), skipped))
    })
}

#[test]
fn a_skipped_step_leaves_the_bits_of_a_run_without_it() {
    // Only sequence 3 of `batch` has the token whose row is NaN.
    let clean = |first: i64| TokenBatch::from_sequences(&[first, 1, 2, 3].repeat(4), SEQ);
    let skip = AnomalyConfig { non_finite: AnomalyAction::Skip, ..AnomalyConfig::default() };
    for dp in [1, 2, 4] {
        let found = after(dp, skip, &[clean(0), batch(), batch(), clean(3), clean(2)]).unwrap();
        let expected = after(dp, skip, &[clean(0), clean(3), clean(2)]).unwrap();
        for ((found, skipped), (expected, _)) in found.iter().zip(&expected) {
            assert_eq!(skipped, &[false, true, true, false, false]);
            assert_eq!(found, expected);
        }
    }
}

#[test]
fn a_run_that_skips_step_after_step_ends() {
    let anomaly = AnomalyConfig { non_finite: AnomalyAction::Skip, max_consecutive: 2, ..AnomalyConfig::default() };
    let error = after(2, anomaly, &[batch(), batch(), batch()]).err().unwrap().to_string();
    assert!(error.contains("step 3: loss NaN, gradient norm NaN; parameters are those of the last"), "{error}");
}
