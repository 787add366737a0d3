//! How a run in one process continues after a rank has failed: all ranks end and begin again, from the newest copy of their
//! state, or those whose devices are not lost.

use std::collections::BTreeSet;
use std::sync::Arc;

use backend_dist::comm::{FailureCause, RunError};
use backend_dist::mesh::ParallelLayout;
use models::CausalLm;

use super::coordinator::{Coordinator, say};
use super::fit::{ModelParallel, Start};
use super::placement::Placement;
use crate::checkpoint::Checkpoint;

/// What a run in one process does when a rank fails. Processes that fail are started again by their launcher.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// // A step costs a copy of the state every 50 steps; a failure at most the 50 steps since.
/// // With fewer than two data-parallel ranks it is not worth the time.
/// let restarts = RestartOptions { max_restarts: 3, copy_every: Some(50), min_data_parallel: Some(2) };
/// // For `Pretraining::restarts`.
/// assert_eq!(RestartOptions::default().max_restarts, 0, "the first failure ends the run");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartOptions {
    /// How often a run may begin again.
    pub max_restarts: usize,
    /// Steps between two copies in host memory. Without them, a run begins again from its last checkpoint, or from its
    /// start.
    pub copy_every: Option<u64>,
    /// The run continues without the devices that are lost for good, with at least so many data-parallel ranks. `None`: with
    /// all, or not at all.
    pub min_data_parallel: Option<usize>,
}

/// The restarts of a run.
pub(super) struct Restarts {
    most: usize,
    done: usize,
    /// Step, rank and cause of the last failure.
    last: Option<(u64, usize, FailureCause)>,
}

impl Restarts {
    pub fn new(most: usize) -> Self {
        Self { most, done: 0, last: None }
    }

    /// How many there were.
    pub fn done(&self) -> usize {
        self.done
    }

    /// After a failure in this step: how many are left after one more.
    ///
    /// # Errors
    /// Why there is none; without words where there never was to be one.
    fn next(&mut self, step: u64, failure: &RunError) -> Result<usize, String> {
        let failure = (step, failure.rank, failure.cause.clone());
        match self.most {
            0 => return Err(String::new()),
            most if most == self.done => return Err(format!("no restart is left of {most}")),
            _ if self.last.as_ref() == Some(&failure) => {
                return Err(format!("no restart: step {step} has failed in the same way before"));
            }
            _ => {}
        }
        self.done += 1;
        self.last = Some(failure);
        Ok(self.most - self.done)
    }
}

impl<M: CausalLm, R> ModelParallel<M, R> {
    /// After a failure: where the run begins again, which is where it first `begun` if there is nothing else.
    ///
    /// # Errors
    /// Why it does not, if there is anything to say.
    pub(super) fn restart(
        &self,
        (start, begun): (&Start, &Option<Arc<Checkpoint>>),
        failure: &RunError,
        (restarts, placement): (&mut Restarts, &mut Placement),
        coordinator: &mut Coordinator,
    ) -> Result<Option<Arc<Checkpoint>>, String> {
        if coordinator.interrupter.should_stop() {
            return Err(String::new());
        }
        let left = restarts.next(coordinator.step + 1, failure)?;
        let devices = placement.devices().to_vec();
        let who = self.leave_out_lost(failure, placement)?;
        if placement.devices() != devices {
            // The same rank may be on another device now.
            restarts.last = None;
        }
        if let Some(saves) = &start.saves {
            // A save that has failed, if only for lack of a rank's share, does not keep the run from beginning again.
            let (reports, errors) = saves.settled();
            errors.iter().for_each(|error| say(&format!("a checkpoint was not saved: {error}")));
            coordinator.saved(reports).map_err(|error| error.to_string())?;
            saves.skip_copies();
        }
        let copy = self.copies.as_ref().and_then(|copies| copies.newest());
        let of_disk = match &coordinator.newest {
            Some(path) => Some(Arc::new(Checkpoint::open(path).map_err(|error| error.to_string())?)),
            None => begun.clone(),
        };
        let step = |from: &Option<Arc<Checkpoint>>| from.as_ref().map(|checkpoint| checkpoint.state().step);
        let from = if step(&copy) >= step(&of_disk) { copy } else { of_disk };
        coordinator.step = step(&from).unwrap_or(0);
        coordinator.bounds.0 = coordinator.step;
        let of = from.as_ref().map_or("its start".into(), |from| from.path().display().to_string());
        let restarts = if left == 1 { "restart" } else { "restarts" };
        let on = coordinator.step + 1;
        say(&format!("{}; {who} with step {on}, from {of}; {left} {restarts} left", failure.summary()));
        log::info!("{failure}");
        Ok(from)
    }

    /// Places the ranks on the devices that are not lost, and says who continues.
    ///
    /// # Errors
    /// If they are too few.
    fn leave_out_lost(&self, failure: &RunError, placement: &mut Placement) -> Result<String, String> {
        let least = self.restarts.min_data_parallel;
        let mut lost = if least.is_some() { placement.dead() } else { BTreeSet::new() };
        lost.extend(self.faults.is_loss(&failure.cause).then_some(failure.rank));
        let of_ranks = || lost.iter().filter(|device| **device < placement.mesh.world_size());
        if of_ranks().next().is_none() {
            return Ok("all ranks begin again".into());
        }
        let ranks = of_ranks().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let what = match of_ranks().count() {
            1 => format!("the device of rank {ranks} is lost"),
            _ => format!("the devices of ranks {ranks} are lost"),
        };
        let least = least.ok_or_else(|| format!("{what}: no restart with training.min-data-parallel = none"))?;
        let before = placement.mesh.layout().to_string();
        let smaller = placement.without(&lost, least, |layout| self.runs_in(layout));
        *placement = smaller.map_err(|why| format!("{what}: no restart, because {why}"))?;
        Ok(format!("{what}: {} continues in place of {before}", placement.mesh.layout()))
    }

    /// Whether the run can continue in a layout with another data-parallel size.
    fn runs_in(&self, layout: &ParallelLayout) -> bool {
        let (engine, layers) = (&self.engine, self.dims.layers);
        let batch = engine.plan_at(0, layout.dp).and(engine.plan(layout.dp));
        let passes = batch.map(|batch| engine.pipeline.resolve(layout, layers, batch.accumulation).is_ok());
        layout.check().is_ok()
            && engine.context.check(layout, &self.dims).is_ok()
            && passes.unwrap_or(false)
            && engine.check_ramp(layout, layers).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(rank: usize, what: &str) -> RunError {
        let cause = FailureCause::Error(what.into());
        RunError { rank, coords: String::new(), cause, ranks: Vec::new() }
    }

    #[test]
    fn restarts_end_when_they_are_used_up_or_would_only_repeat() {
        assert_eq!(Restarts::new(0).next(3, &failure(0, "no data")), Err(String::new()));
        let mut restarts = Restarts::new(3);
        assert_eq!(restarts.next(3, &failure(0, "no data")), Ok(2));
        let again = Err("no restart: step 3 has failed in the same way before".to_string());
        assert_eq!(restarts.next(3, &failure(0, "no data")), again);
        assert_eq!(restarts.next(4, &failure(0, "no data")), Ok(1), "the run has gone further");
        assert_eq!(restarts.next(4, &failure(1, "no data")), Ok(0), "another rank");
        assert_eq!(restarts.next(9, &failure(0, "no data")), Err("no restart is left of 3".to_string()));
        assert_eq!(restarts.done(), 3);
    }
}
