//! The data-parallel size that follows from the number of ranks.

use backend_dist::mesh::{Nearest, ParallelLayout};

use super::limits::RANKS;
use super::problem::Problem;
use super::run::RunConfig;
use crate::batch::BatchPlan;

/// The number of ranks of a run of which one copy of the model takes so many; or why it is not known.
pub type WorldSize<'a> = &'a dyn Fn(usize) -> Result<usize, String>;

/// The number of ranks where nobody knows it.
pub(super) fn unknown(_: usize) -> Result<usize, String> {
    Err("only train, bench of a file and plan --gpus know the number of ranks; nearest legal: 1".into())
}

impl RunConfig {
    /// Takes the data-parallel size that fills all ranks, as Megatron-LM does (`initialize_model_parallel`). The global
    /// batch stays as it is, so that the run is the same with any number of them. Fails if there are no whole copies of
    /// the model, or they cannot share the global batch: with the nearest numbers of ranks that can. What is wrong with
    /// any number of ranks is left for [`RunConfig::check`].
    pub(super) fn fill_world(&mut self, world: WorldSize<'_>) -> Result<(), Problem> {
        let refused = |what: String| Problem::new(format!("parallel.data-parallel = auto: {what}"));
        let copy = ParallelLayout { dp: 1, ..self.parallel.clone() }.world_size();
        let ranks = world(copy).map_err(refused)?;
        let trouble = match (ranks / copy, ranks % copy) {
            (dp @ 1.., 0) => self.trouble_with(dp),
            _ => Some(format!("they are no whole copies of a model on {copy}")),
        };
        if let Some(trouble) = trouble {
            let most = copy.saturating_mul(self.training.global_batch / self.training.micro_batch);
            let legal = |ranks: usize| ranks.is_multiple_of(copy) && self.trouble_with(ranks / copy).is_none();
            let nearest = Nearest::where_legal(ranks, most, legal);
            if !nearest.0.is_empty() {
                return Err(refused(format!("of {ranks} ranks, {trouble}; nearest legal numbers of ranks: {nearest}")));
            }
        }
        self.parallel.dp = (ranks / copy).max(1);
        Ok(())
    }

    /// The run with as many ranks as its global batch is good for: what is too much for them is too much for fewer.
    pub(super) fn at_most_ranks(&self) -> Self {
        let dp = (self.training.global_batch / self.training.micro_batch.max(1)).max(1);
        let copy = ParallelLayout { dp: 1, ..self.parallel.clone() }.world_size().max(1);
        let parallel = ParallelLayout { dp: dp.min(RANKS as usize / copy).max(1), ..self.parallel.clone() };
        Self { parallel, ..self.clone() }
    }

    /// The first problem of a layout with this data-parallel size.
    fn trouble_with(&self, dp: usize) -> Option<String> {
        let batch = BatchPlan::at(&self.batch_sizes(), 0, self.training.micro_batch, dp);
        if let Err(error) = batch {
            return Some(error.to_string());
        }
        let config = Self { parallel: ParallelLayout { dp, ..self.parallel.clone() }, ..self.clone() };
        config.layout_problems().first().map(ToString::to_string)
    }
}
