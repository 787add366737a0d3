//! The epochs of one rank: their steps, the evaluation after them, and what is decided then.

use backend_dist::launch::BoxError;
use burn::data::dataloader::DataLoader;
use models::CausalLm;

use super::batches::GlobalBatch;
use super::coordinator::Coordinator;
use super::fit::ModelParallel;
use super::logs::say;
use super::worker::{End, Worker};
use crate::metrics::RunLog;

impl<M: CausalLm, R: Send> ModelParallel<M, R> {
    /// All `epochs` that are not done, and first the evaluation that the run has not come to before it ended. All ranks call
    /// it.
    pub(super) fn epochs(
        &self,
        worker: &mut Worker<M>,
        epochs: usize,
        (train, valid): (&dyn DataLoader<GlobalBatch>, &dyn DataLoader<GlobalBatch>),
        mut coordinator: Option<&mut Coordinator>,
    ) -> Result<(), BoxError> {
        let done = worker.engine.steps() as usize;
        let mut epoch = done / self.settings.epoch + 1;
        if let Some(coordinator) = coordinator.as_deref_mut().filter(|_| worker.restarts > 0) {
            coordinator.back_to(epoch);
        }
        if self.owes_evaluation(worker, valid, coordinator.is_some())?
            && self.end(worker, done.div_ceil(self.settings.epoch), valid, coordinator.as_deref_mut())?
        {
            return Ok(());
        }
        while epoch <= epochs && done < self.settings.steps {
            match worker.train(epoch, train, coordinator.as_deref_mut())? {
                End::RollBack => {
                    self.roll_back(worker, coordinator.as_deref_mut())?;
                    epoch = worker.engine.steps() as usize / self.settings.epoch + 1;
                }
                End::Epoch if !self.end(worker, epoch, valid, coordinator.as_deref_mut())? => epoch += 1,
                End::Epoch | End::Stop => break,
            }
        }
        Ok(())
    }

    /// What follows on the steps of an epoch; true to stop.
    fn end(
        &self,
        worker: &mut Worker<M>,
        epoch: usize,
        valid: &dyn DataLoader<GlobalBatch>,
        mut coordinator: Option<&mut Coordinator>,
    ) -> Result<bool, BoxError> {
        Ok(worker.validate(epoch, valid, coordinator.as_deref_mut())? || worker.end_epoch(epoch, coordinator)?)
    }

    /// Whether the run begins after the last step of an epoch whose evaluation it has not logged: an epoch's last step is
    /// saved before it is evaluated. A log that does not have the step is another run's. Rank 0 looks.
    fn owes_evaluation(
        &self,
        worker: &Worker<M>,
        valid: &dyn DataLoader<GlobalBatch>,
        looks: bool,
    ) -> Result<bool, BoxError> {
        let (step, settings) = (worker.engine.steps(), &self.settings);
        let is_last = step as usize == settings.steps || step.is_multiple_of(settings.epoch as u64);
        if step == 0 || !is_last || valid.num_items() == 0 && settings.data.tasks.is_none() {
            return Ok(false);
        }
        let lacks = looks.then(|| RunLog::lacks_evaluation(&self.files, step)).transpose()?;
        if lacks == Some(true) {
            say(&format!("step {step} was not evaluated, which comes first"));
        }
        Ok(worker.world.broadcast_host(lacks, 0))
    }
}
