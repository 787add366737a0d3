//! What is saved, at the end of an epoch and of the run.

use backend_dist::launch::BoxError;
use burn::train::LearnerEvent;
use models::CausalLm;

use super::super::coordinator::Coordinator;
use super::super::logs::say;
use super::super::saving::without_host_memory;
use super::Worker;

impl<M: CausalLm> Worker<'_, M> {
    /// Early stopping and burn-train's checkpointing; the decisions of rank 0 are everyone's. True to stop.
    pub fn end_epoch(&mut self, epoch: usize, mut coordinator: Option<&mut Coordinator>) -> Result<bool, BoxError> {
        let decision = coordinator.as_deref_mut().map(|coordinator| {
            coordinator.train(LearnerEvent::EndEpoch(epoch));
            coordinator.flush();
            (coordinator.should_stop(epoch), coordinator.should_save(epoch))
        });
        let (stop, save) = self.world.broadcast_host(decision, 0);
        if save {
            self.save(coordinator)?;
        }
        Ok(stop)
    }

    /// Saves the current step, unless it is saved already. All ranks call it.
    pub(super) fn save(&mut self, coordinator: Option<&mut Coordinator>) -> Result<(), BoxError> {
        let step = self.engine.steps();
        let Some(saves) = self.saves.as_ref().filter(|_| step != self.saved) else { return Ok(()) };
        let stall = saves.submit(self.rank, &self.engine, self.config)?;
        self.tell_host_trouble();
        self.saved = step;
        // The slowest rank's: the others wait for it in the next step.
        let stall = self.world.all_gather_host(stall).into_iter().fold(0.0, f64::max);
        if let Some(coordinator) = coordinator {
            coordinator.costs.begin(step, stall);
        }
        Ok(())
    }

    /// Copies the current step to the memory of the host. A copy that fails does not end the run; all ranks call it.
    pub(super) fn copy_locally(&self) -> Result<(), BoxError> {
        let Some(local) = &self.local else { return Ok(()) };
        local.submit(self.rank, &self.engine, self.config)?;
        self.tell_host_trouble();
        if let Err(error) = local.finished().map(drop).map_err(|error| error.to_string())
            && self.rank.leads_process()
        {
            say(&format!("a copy in the host's memory was not made: {error}"));
        }
        Ok(())
    }

    pub(super) fn tell_host_trouble(&self) {
        if let Some(trouble) = self.engine.take_host_trouble() {
            say(&without_host_memory(&trouble));
        }
    }

    /// Saves the last step and waits until it is on disk. A process whose writers are still at work must not end.
    pub fn end(&mut self, mut coordinator: Option<&mut Coordinator>) -> Result<(), BoxError> {
        self.save(coordinator.as_deref_mut())?;
        // All ranks have handed over their slices.
        self.world.barrier();
        if let Some(saves) = self.saves.as_ref().filter(|_| self.rank.leads_process()) {
            let reports = saves.wait()?;
            if let Some(coordinator) = coordinator {
                coordinator.saved(reports)?;
                if !coordinator.costs.is_empty() {
                    say(&coordinator.costs.to_string());
                }
            }
        }
        Ok(())
    }
}
