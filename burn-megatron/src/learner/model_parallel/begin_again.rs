//! How a run in one process continues after a rank has failed: all ranks end and begin again, from the newest copy of their
//! state, or those whose devices are not lost.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use backend_dist::comm::RunError;
use backend_dist::gpu::settle;
use backend_dist::mesh::ParallelLayout;
use models::CausalLm;

use super::coordinator::Coordinator;
use super::fit::ModelParallel;
use super::local_copies;
use super::logs::say;
use super::placement::Placement;
use super::restarts::Restarts;
use super::shared::Start;
use crate::checkpoint::Checkpoint;

/// How long GPUs may take to end what failed ranks have queued, once their communicators are gone, and again to free memory.
const SETTLE: Duration = Duration::from_secs(30);

impl<M: CausalLm, R> ModelParallel<M, R> {
    /// After a failure: where the run begins again, which is where it first began if there is nothing else. The error says why
    /// it does not, if there is anything to say.
    pub(super) fn restart(
        &self,
        start: &Start,
        failure: &RunError,
        (restarts, placement): (&mut Restarts, &mut Placement),
        coordinator: &mut Coordinator,
    ) -> Result<Option<Arc<Checkpoint>>, String> {
        // A metric that has panicked has no thread to begin again on.
        if coordinator.interrupter.should_stop() || coordinator.metrics_ended {
            return Err(String::new());
        }
        let left = restarts.next(coordinator.step + 1, failure)?;
        let devices = placement.devices().to_vec();
        let who = self.leave_out_lost(failure, placement)?;
        if placement.devices() != devices {
            restarts.on_other_devices();
        }
        // The next ranks find GPUs and memory as those of a new process do. A lost GPU may never come to rest; while it works
        // it may still write to the others.
        let lost: Vec<_> = devices.into_iter().filter(|device| !placement.devices().contains(device)).collect();
        if let Err(why) = settle(&lost, SETTLE) {
            say(&format!("of what is lost: {why}"));
        }
        settle(placement.devices(), SETTLE).map_err(|why| format!("no restart: {why}"))?;
        if let Some(saves) = &start.saves {
            // A save that has failed, if only for lack of a rank's share, does not keep the run from beginning again.
            let (reports, errors) = saves.settled();
            errors.iter().for_each(|error| say(&format!("a checkpoint was not saved: {error}")));
            coordinator.saved(reports).map_err(|error| error.to_string())?;
            saves.skip_copies();
        }
        let local = start.local.as_deref().and_then(local_copies::newest).map(Arc::new);
        let copy = self.copies.as_ref().and_then(|copies| copies.newest()).or(local);
        let of_disk = match &coordinator.newest {
            Some((_, path)) => Some(Arc::new(Checkpoint::open(path).map_err(|error| error.to_string())?)),
            None => None,
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

    /// Places the ranks on the devices that are not lost, and says who continues. Fails if they are too few.
    fn leave_out_lost(&self, failure: &RunError, placement: &mut Placement) -> Result<String, String> {
        let least = self.settings.restarts.min_data_parallel;
        let mut lost = if least.is_some() { placement.dead() } else { BTreeSet::new() };
        lost.extend(self.settings.faults.is_loss(&failure.cause).then_some(failure.rank));
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
        let (engine, layers) = (&self.settings.engine, self.settings.dims.layers);
        let batch = engine.plan_at(0, layout.dp).and(engine.plan(layout.dp));
        let passes = batch.map(|batch| engine.pipeline.resolve(layout, layers, batch.accumulation).is_ok());
        layout.check().is_ok()
            && engine.context.check(layout, &self.settings.dims).is_ok()
            && passes.unwrap_or(false)
            && engine.check_ramp(layout, layers).is_ok()
    }
}
