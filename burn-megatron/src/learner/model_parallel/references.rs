//! Reference models, of GRPO and of preference tuning.

use std::sync::Arc;
use std::time::Instant;

use backend_dist::launch::{BoxError, Rank};
use models::CausalLm;

use super::evaluate::log_probabilities;
use super::fit::ModelParallel;
use super::logs::say;
use crate::engine::{RankEngine, Reference};

impl<M: CausalLm, R> ModelParallel<M, R> {
    /// The reference model of GRPO.
    pub(super) fn reference(&self, rank: &Rank, engine: &RankEngine<M>) -> Result<Reference<M>, BoxError> {
        let Some(build) = &self.reference else { return Ok(Reference::WithoutAdapters) };
        let stages = engine.stages().map(|stage| build(rank, stage.part().clone()));
        Ok(Reference::Stages(stages.collect::<Result<_, _>>()?))
    }

    /// What the reference model of preference tuning says of all answers: it is the model that the run starts from, so
    /// that it need not be kept.
    pub(super) fn references(&self, engine: &mut RankEngine<M>, tells: bool) -> Result<(), BoxError> {
        if !self.settings.engine.preference.is_some_and(|preference| preference.loss.has_reference()) {
            return Ok(());
        }
        let (train, valid) = (&self.settings.data.train, &self.settings.data.valid);
        let other = Some(valid).filter(|valid| !Arc::ptr_eq(train, valid));
        for data in [Some(train), other].into_iter().flatten() {
            let Some(distinct) = data.distinct() else { continue };
            let start = Instant::now();
            data.set_references(log_probabilities(engine, &distinct)?);
            if tells {
                let seconds = start.elapsed().as_secs_f64();
                say(&format!("reference    log-probabilities of {} sequences in {seconds:.1} s", distinct.len()));
            }
        }
        Ok(())
    }
}
