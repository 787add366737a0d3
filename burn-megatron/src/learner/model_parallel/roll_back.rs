//! Back to the newest checkpoint, and on with the samples after a bad step.

use std::path::PathBuf;

use backend_dist::launch::BoxError;
use models::CausalLm;

use super::coordinator::Coordinator;
use super::fit::ModelParallel;
use super::logs::say;
use super::worker::Worker;
use crate::checkpoint::Checkpoint;
use crate::metrics::RunLog;

impl<M: CausalLm, R> ModelParallel<M, R> {
    /// Takes weights, optimizer and step from the newest checkpoint; samples that were read since are not read again.
    /// All ranks call it. Fails if there is no checkpoint, it cannot be read, or the run has gone back to it too often.
    pub(super) fn roll_back(
        &self,
        worker: &mut Worker<M>,
        mut coordinator: Option<&mut Coordinator>,
    ) -> Result<(), BoxError> {
        let consumed = worker.engine.position().consumed;
        // Nothing is written while it is read.
        worker.world.barrier();
        if let Some(saves) = worker.saves.as_ref().filter(|_| worker.rank.leads_process()) {
            let reports = saves.wait()?;
            if let Some(coordinator) = coordinator.as_deref_mut() {
                coordinator.saved(reports)?;
            }
        }
        worker.world.barrier();
        let newest = || -> Result<PathBuf, String> {
            let none = || "a bad step is to be rolled back, and the run saves no checkpoints".to_string();
            let options = self.settings.checkpoints.as_ref().ok_or_else(none)?;
            let newest =
                Checkpoint::open(&options.root).map_err(|error| format!("nothing to roll back to: {error}"))?;
            Ok(newest.path().to_path_buf())
        };
        let path = worker.world.broadcast_host((worker.world.rank() == 0).then(newest), 0)?;
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.verify(worker.world.rank(), worker.world.size())?;
        if let Some(copies) = worker.copies {
            copies.clear();
        }
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
            self.train.resume_at(step as usize, consumed as usize);
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
