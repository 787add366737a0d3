//! Ends a training so that its user learns the truth: a failure is printed after the terminal is restored and is the
//! `error` of the result.
//!
//! burn-train's dashboard forgets the interrupter's state when training ends, before the result is made, so the reason
//! of the stop is noted here.

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use backend_dist::comm::{Group, RunError};
use burn::train::renderer::{CliMetricsRenderer, MetricsRenderer};
use burn::train::train::WorkerFailure;
use burn::train::{
    AsyncProcessorTraining, EventProcessorError, EventProcessorTraining, Interruption, Learner, LearnerEvent,
    LearnerModel, LearningResult, SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingError, ValidLoader,
};
use parking_lot::Mutex;

use super::signals::on_signals;

/// What burn-train hands to a strategy.
pub(super) struct Training<M: LearnerModel> {
    pub components: TrainingComponents<M>,
    pub learner: Learner<M>,
    pub train: TrainLoader<M>,
    pub valid: ValidLoader<M>,
    pub starting_epoch: usize,
    /// What of an output other ranks have to know.
    pub told: Option<Told<M>>,
}

/// Makes of a data-parallel rank's output of training what goes to the metrics, which are those of the first process: large outputs
/// stay in theirs, but their mean loss does not. All ranks of the group call it together.
pub(super) type Told<M> = fn(<M as TrainStep>::Output, &Group) -> <M as TrainStep>::Output;

impl<M: LearnerModel> Training<M> {
    /// Ends before it has started.
    pub fn fail(self, message: impl ToString) -> Fitted<M> {
        Fitted::failed(self.learner.model(), self.components, message)
    }
}

/// A strategy whose fit may fail.
pub(super) trait Fit<M: LearnerModel> {
    /// Trains the model; on failure it still returns the event processor and some model.
    fn fit(&self, training: Training<M>) -> Fitted<M>;
}

/// What a fit leaves behind.
pub(super) struct Fitted<M: LearnerModel> {
    pub model: M,
    pub processor: SupervisedTrainingEventProcessor<M>,
    pub failure: Option<Failure>,
}

impl<M: LearnerModel> Fitted<M> {
    /// Of a fit that has not started.
    pub fn failed(model: M, components: TrainingComponents<M>, message: impl ToString) -> Self {
        let failure = Some(Failure { rank: 0, message: message.to_string() });
        Self { model, processor: components.event_processor, failure }
    }
}

/// Why a fit failed.
pub(super) struct Failure {
    /// The rank that failed first.
    pub rank: usize,
    /// What to tell the user.
    pub message: String,
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        Self { rank: error.rank, message: advised(&error) }
    }
}

/// What to change where a message of Burn's does not say it.
const ADVICE: [(&str, &str); 4] = [
    ("cannot write to '", "make that folder writable, with room for the file, or choose another"),
    (
        "Gradient checkpointing strategy mismatch",
        "with ZeRO 3 tensors have gradient checkpointing, but not those of `Tensor::from_inner` and of fields with \
         #[module(skip)]; nearest legal: `detach` instead, a field that Burn moves, MeshStrategy::reshard_after_forward(false), \
         or ZeRO 2",
    ),
    ("The provided tensors are not on the same device", OWN_DEVICE),
    // Of an operation with floats and integers, as `select`.
    ("is on the wrong backend", OWN_DEVICE),
];

const OWN_DEVICE: &str = "a rank has a device of its own: make tensors on `x.device()`, and constants as fields without \
    #[module(skip)], which Burn moves with the module; metrics that add up outputs of several ranks, as precision, recall and AUROC, \
    need them in one memory: make outputs `OnHost`; `TrainStep::optimize` may use frozen parameters only without tensor parallelism, \
    and on GPUs without ZeRO, overlap and running statistics";

/// The message of an error that has ended a training, with advice if there is some.
pub(super) fn advised(error: &impl ToString) -> String {
    let message = error.to_string();
    match ADVICE.iter().find(|(words, _)| message.contains(words)) {
        Some((_, advice)) => format!("{message}\nadvice: {advice}"),
        None => message,
    }
}

/// Adds the report of how the training ended to a [`Fit`].
pub(super) struct Reported<S>(S);

impl<S> Reported<S> {
    pub fn new(strategy: S) -> Self {
        Self(strategy)
    }
}

impl<M: LearnerModel, S: Fit<M>> SupervisedLearningStrategy<M> for Reported<S> {
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        let _signals = on_signals(&components.interrupter);
        let run = Run { strategy: &self.0, ending: Mutex::new(Ending::default()) };
        let mut result = SupervisedLearningStrategy::train(&run, learner, train, valid, components);
        let ending = run.ending.into_inner();
        result.interrupted = result.interrupted.or(ending.interruption);
        result.error = result.error.or(ending.error);
        // burn-train keeps what its own threads met, such as a checkpoint that the disk refused, for the result.
        let message = ending.failure.as_ref().map(|failure| failure.message.clone());
        if let Some(message) = message.or_else(|| result.error.as_deref().map(words)) {
            // Dropping the dashboard restores the terminal; only then can a message be seen.
            drop(std::mem::replace(&mut result.renderer, Box::new(CliMetricsRenderer::new())));
            // A terminal that has gone takes no words.
            let _ = writeln!(io::stderr(), "error: training failed: {message}");
            result.interrupted = None;
        }
        if let Some(failure) = ending.failure {
            result.error = Some(Arc::new(training_error(&failure)));
        }
        result
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let fitted = self.0.fit(Training { components, learner, train, valid, starting_epoch, told: None });
        (fitted.model, fitted.processor)
    }
}

#[derive(Default)]
struct Ending {
    failure: Option<Failure>,
    interruption: Option<Interruption>,
    error: Option<Arc<TrainingError>>,
}

/// burn-train's own course of a training around a fit, with how it ended.
struct Run<'a, S> {
    strategy: &'a S,
    ending: Mutex<Ending>,
}

impl<M: LearnerModel, S: Fit<M>> SupervisedLearningStrategy<M> for Run<'_, S> {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let interrupter = components.interrupter.clone();
        let fitted = self.strategy.fit(Training { components, learner, train, valid, starting_epoch, told: None });
        let (interruption, error) = (interrupter.interruption(), interrupter.error());
        let processor = match &fitted.failure {
            None => fitted.processor,
            Some(failure) => {
                interrupter.fail(training_error(failure));
                AsyncProcessorTraining::new(WithoutSummary(Some(fitted.processor)))
            }
        };
        *self.ending.lock() = Ending { failure: fitted.failure, interruption, error };
        (fitted.model, processor)
    }
}

/// The events of a training that failed, without the summary at their end: if it failed before its first step, that would
/// be of the metrics that the training before it left in the folder. The thread of the metrics may have ended with the
/// ranks, whose tensors it reads; then nothing happens any more, and the user reads why the ranks ended.
struct WithoutSummary<P>(Option<P>);

impl<P> WithoutSummary<P> {
    fn process(
        &mut self,
        event: impl FnOnce(&mut P) -> Result<(), EventProcessorError>,
    ) -> Result<(), EventProcessorError> {
        let Some(mut processor) = self.0.take() else { return Ok(()) };
        let Ok(processed) = catch_unwind(AssertUnwindSafe(|| event(&mut processor))) else { return Ok(()) };
        self.0 = Some(processor);
        processed
    }
}

impl<T, V, P: EventProcessorTraining<LearnerEvent<T>, V>> EventProcessorTraining<LearnerEvent<T>, V>
    for WithoutSummary<P>
{
    fn process_train(&mut self, event: LearnerEvent<T>) -> Result<(), EventProcessorError> {
        let event = if let LearnerEvent::End(_) = event { LearnerEvent::End(None) } else { event };
        self.process(|processor| processor.process_train(event))
    }

    fn process_valid(&mut self, event: V) -> Result<(), EventProcessorError> {
        self.process(|processor| processor.process_valid(event))
    }

    fn flush(&mut self) -> Result<(), EventProcessorError> {
        self.process(P::flush)
    }

    fn renderer(self) -> Box<dyn MetricsRenderer> {
        self.0.map_or_else(|| Box::new(CliMetricsRenderer::new()) as _, P::renderer)
    }
}

/// What burn-train's error says to a user, to whom workers are nothing.
fn words(error: &TrainingError) -> String {
    match error {
        TrainingError::Workers(failures) => {
            failures.iter().map(|failure| failure.message.as_str()).collect::<Vec<_>>().join("\n")
        }
        other => advised(other),
    }
}

fn training_error(failure: &Failure) -> TrainingError {
    TrainingError::Workers(vec![WorkerFailure { device_id: failure.rank, message: failure.message.clone() }])
}

#[cfg(test)]
mod tests {
    use burn::train::LearnerSummary;

    use super::*;

    /// Whether each end had a summary.
    struct Ends(Arc<Mutex<Vec<bool>>>);

    impl EventProcessorTraining<LearnerEvent<()>, ()> for Ends {
        fn process_train(&mut self, event: LearnerEvent<()>) -> Result<(), EventProcessorError> {
            if let LearnerEvent::End(summary) = event {
                self.0.lock().push(summary.is_some());
            }
            Ok(())
        }

        fn process_valid(&mut self, (): ()) -> Result<(), EventProcessorError> {
            Ok(())
        }

        fn renderer(self) -> Box<dyn MetricsRenderer> {
            Box::new(CliMetricsRenderer::new())
        }
    }

    #[test]
    fn a_training_that_failed_has_no_summary_of_the_one_before_it() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("train")).unwrap();
        let summary = || Some(LearnerSummary::new(folder.path(), &[] as &[&str]).unwrap());
        let ends = Arc::new(Mutex::new(Vec::new()));
        Ends(ends.clone()).process_train(LearnerEvent::End(summary())).unwrap();
        WithoutSummary(Some(Ends(ends.clone()))).process_train(LearnerEvent::End(summary())).unwrap();
        assert_eq!(*ends.lock(), [true, false]);
    }
}
