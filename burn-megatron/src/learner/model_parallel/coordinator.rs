//! What only rank 0 does: decisions for all ranks, events for burn-train, the log of the run.

use std::io;
use std::sync::Arc;

use backend_dist::launch::BoxError;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, Interrupter, Learner, LearnerEvent, LearningCheckpointer,
    SupervisedTrainingEventProcessor,
};

use super::burn_train_bridge::SaveRequest;
use super::exit::ExitOptions;
use super::logs::say;
use super::placeholder::Megatron;
use super::save_costs::SaveCosts;
use super::saving::Newest;
use crate::checkpoint::{Checkpoint, SaveReport};
use crate::learner::shared::flush;
use crate::metrics::{EvalStats, LoadStats, LogFiles, RunLog, SaveStats, Sinks, StepStats};

/// Everything that only rank 0 does.
pub(super) struct Coordinator {
    pub processor: SupervisedTrainingEventProcessor<Megatron>,
    /// Whether a metric has panicked, with which burn-train's thread of the metrics ended.
    pub metrics_ended: bool,
    pub interrupter: Interrupter,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub store: Arc<EventStoreClient>,
    pub log: Option<RunLog>,
    /// burn-train's checkpointing, which decides at the end of an epoch.
    pub checkpointer: Option<LearningCheckpointer<Megatron>>,
    /// What burn-train takes for the trained model.
    pub learner: Learner<Megatron>,
    /// Whether burn-train has asked for a save.
    pub request: SaveRequest,
    /// Finished optimizer steps.
    pub step: u64,
    /// Those that were finished when the run was started, and those of the whole run.
    pub bounds: (u64, u64),
    pub exit: ExitOptions,
    /// The newest checkpoint of the run: one that it has saved or went back to, or the one that it first began with.
    pub newest: Option<Newest>,
    /// What saves cost, and when the next one is due.
    pub costs: SaveCosts,
}

type Event<T> = LearnerEvent<T>;

impl Coordinator {
    pub fn train(&mut self, event: Event<StepStats>) {
        self.send(|processor, interrupter| interrupter.fail_on_error(processor.process_train(event)));
    }

    /// The run continues within `epoch`, from which the displays count steps. They know an epoch by the end of the one before.
    pub fn back_to(&mut self, epoch: usize) {
        self.train(LearnerEvent::EndEpoch(epoch - 1));
    }

    pub fn valid(&mut self, event: Event<EvalStats>) {
        self.send(|processor, interrupter| interrupter.fail_on_error(processor.process_valid(event)));
    }

    pub fn flush(&mut self) {
        self.send(|processor, interrupter| flush(processor, |error| interrupter.fail(error)));
    }

    /// To the thread of the metrics. One that fails stops the training through the interrupter, the panic of one is this rank's.
    fn send(&mut self, send: impl FnOnce(&mut SupervisedTrainingEventProcessor<Megatron>, &Interrupter)) {
        self.metrics_ended = true;
        send(&mut self.processor, &self.interrupter);
        self.metrics_ended = false;
    }

    /// Early stopping: whether this epoch is the last.
    pub fn should_stop(&mut self, epoch: usize) -> bool {
        self.interrupter.should_stop()
            || self.early_stopping.as_mut().is_some_and(|strategy| strategy.should_stop(epoch, &self.store))
    }

    /// Whether the run ends here as its configuration says, and says so.
    pub fn is_over(&self) -> bool {
        let exit = self.exit.due((self.bounds.0, self.step, self.bounds.1));
        exit.inspect(|exit| say(&format!("the run ends after step {}: {exit}", self.step))).is_some()
    }

    /// Whether burn-train's checkpointing strategy wants the state after this epoch.
    pub fn should_save(&mut self, epoch: usize) -> bool {
        if let Some(checkpointer) = &mut self.checkpointer {
            checkpointer.checkpoint(&self.learner, epoch, &self.store);
        }
        self.request.take()
    }

    /// Opens the log of a run whose last finished step is `step`; after a restart it is still open.
    pub fn open_log(&mut self, files: &LogFiles, sinks: &Sinks, step: u64) -> io::Result<()> {
        let log = if let Some(log) = self.log.take() { log.again(files, step)? } else { RunLog::open(files, step)? };
        self.log = Some(log.with(sinks.clone()));
        Ok(())
    }

    /// Notes which checkpoint the run resumes from. After a restart that was said.
    pub fn resumed(&mut self, checkpoint: &Checkpoint, stats: LoadStats, is_said: bool) -> Result<(), BoxError> {
        (self.step, self.bounds.0) = (stats.step, stats.step);
        if let Some(log) = &mut self.log {
            log.resumed(&stats)?;
        }
        if is_said {
            return Ok(());
        }
        let (path, layout) = (checkpoint.path().display(), &checkpoint.state().layout);
        let warning = checkpoint.warning().map(|warning| format!("; {warning}")).unwrap_or_default();
        say(&format!("resuming from {path} (saved with {layout}): {stats}{warning}"));
        Ok(())
    }

    /// Notes that saves have become complete. Returns the last one.
    pub fn saved(&mut self, reports: Vec<SaveReport>) -> Result<Option<SaveStats>, BoxError> {
        let mut last = None;
        for report in reports {
            let stats = self.costs.end(&report);
            if let Some(log) = &mut self.log {
                log.saved(&stats)?;
            }
            if let Some(error) = &report.not_deleted {
                log::warn!("{error}");
            }
            last = Some(stats);
            self.newest = Some((report.step, report.path));
        }
        Ok(last)
    }
}
