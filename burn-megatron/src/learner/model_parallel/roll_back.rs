//! Back to a checkpoint, and on with the samples after a bad step.

use std::path::PathBuf;

use backend_dist::launch::BoxError;
use models::CausalLm;

use super::coordinator::Coordinator;
use super::fit::ModelParallel;
use super::logs::say;
use super::saving::{Newest, Saves};
use super::worker::Worker;
use crate::checkpoint::Checkpoint;
use crate::metrics::RunLog;

impl<M: CausalLm, R> ModelParallel<M, R> {
    /// Takes weights, optimizer and step from the newest checkpoint, or from the one that `anomaly.roll-back-steps` asks
    /// for; samples that were read since are not read again. All ranks call it. Fails if there is no such checkpoint, it
    /// cannot be read, or the run has gone back to it too often.
    pub(super) fn roll_back(
        &self,
        worker: &mut Worker<M>,
        mut coordinator: Option<&mut Coordinator>,
    ) -> Result<(), BoxError> {
        let (consumed, bad) = (worker.engine.position().consumed, worker.engine.steps());
        // Nothing is written while it is read.
        worker.world.barrier();
        if let Some(saves) = worker.saves.as_ref().filter(|_| worker.rank.leads_process()) {
            let reports = saves.wait()?;
            if let Some(coordinator) = coordinator.as_deref_mut() {
                coordinator.saved(reports)?;
            }
        }
        worker.world.barrier();
        let newest = coordinator.as_deref().and_then(|coordinator| coordinator.newest.clone());
        let target = || -> Result<PathBuf, String> {
            let none = || "a bad step is to be rolled back, and the run saves no checkpoints".to_string();
            let saves = worker.saves.as_ref().ok_or_else(none)?;
            checkpoint_before(saves, newest, bad, worker.config.anomaly.roll_back_steps)
                .map_err(|error| format!("nothing to roll back to: {error}"))
        };
        let path = worker.world.broadcast_host((worker.world.rank() == 0).then(target), 0)?;
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.verify(worker.world.rank(), worker.world.size())?;
        if let Some(copies) = worker.copies {
            copies.clear();
        }
        // Copies of the steps that are done again are those of a run that was given up.
        worker.local.iter().for_each(|local| local.begin_from(None));
        worker.world.barrier();
        worker.engine.restore(&checkpoint)?;
        worker.engine.skip_to(consumed);
        worker.drawn = None;
        let step = worker.engine.steps();
        worker.saved = step;
        let (last, times) = worker.rolled_back;
        worker.rolled_back = (step, if step == last { times + 1 } else { 1 });
        let most = worker.config.anomaly.max_consecutive;
        if worker.rolled_back.1 > most {
            let text = format!(
                "no batch after step {step} was good: anomaly.max-consecutive = {most} roll-backs to it are done"
            );
            return Err(text.into());
        }
        if let Some(coordinator) = coordinator {
            worker.saves.iter().try_for_each(|saves| saves.go_back_to(step))?;
            self.train.resume_at(step as usize, consumed as usize);
            coordinator.newest = Some((step, checkpoint.path().to_path_buf()));
            coordinator.step = step;
            coordinator.back_to(step as usize / self.settings.epoch + 1);
            // What the steps that are done again have in W&B's run would be that of other samples: it gets a new one.
            coordinator.log = None;
            coordinator.log = Some(RunLog::open(&self.files, step)?.with(self.settings.sinks.clone()));
            say(&format!("back to step {step}, and on with sample {consumed}"));
        }
        Ok(())
    }
}

/// The newest checkpoint of the run that is at least `back` steps before step `bad`, of which `newest` is the last. Not one
/// that a run left in the same folder which was given up when this one began at an older checkpoint.
fn checkpoint_before(saves: &Saves, newest: Option<Newest>, bad: u64, back: u64) -> Result<PathBuf, String> {
    let Some((latest, path)) = newest else {
        return Err(format!("step {bad} is bad before the run has saved for the first time; see checkpoint.every"));
    };
    if back == 0 {
        return Ok(path);
    }
    let mut there = saves.of_run().map_err(|error| error.to_string())?;
    there.insert(latest, path);
    if let Some((_, path)) = there.iter().rfind(|(step, _)| *step + back <= bad) {
        return Ok(path.clone());
    }
    let steps: Vec<String> = there.keys().map(u64::to_string).collect();
    let nearest = there.keys().next().map_or(0, |oldest| bad.saturating_sub(*oldest));
    Err(format!(
        "step {bad} is bad, anomaly.roll-back-steps = {back}, and {} has checkpoints of steps {}; nearest legal: {nearest}, or a larger \
         checkpoint.keep-last",
        saves.root().display(),
        steps.join(", ")
    ))
}
