//! Outputs of ranks on several devices in one memory, so that metrics can add up their tensors from batch to batch.
//!
//! burn-train hands outputs to metrics as they are, on the devices of their ranks. Of its own types of outputs we know the
//! tensors; one of a model's own is brought to the host by [`OnHost`](super::OnHost).

use std::any::Any;

use burn::train::renderer::MetricsRenderer;
use burn::train::{
    AsyncProcessorTraining, ClassificationOutput, EventProcessorError, EventProcessorTraining, LearnerEvent,
    LearnerModel, MultiLabelClassificationOutput, SupervisedTrainingEventProcessor,
};

use super::devices::host;
use super::gather_outputs::Scored;

/// Elements of scores above which an output stays on its device: metrics that read a loss alone would wait for copies of a
/// language model's logits.
const MOST: usize = 4 << 20;

/// `processor`, which gets outputs of the types of which metrics keep tensors in host memory, if ranks have `several` devices.
/// They are read on a thread of its own.
pub(super) fn in_one_memory<M: LearnerModel>(
    processor: SupervisedTrainingEventProcessor<M>,
    several: bool,
) -> SupervisedTrainingEventProcessor<M> {
    if several { AsyncProcessorTraining::new(OneMemory(processor)) } else { processor }
}

struct OneMemory<P>(P);

impl<T, V, P> EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>> for OneMemory<P>
where
    T: 'static,
    V: 'static,
    P: EventProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
{
    fn process_train(&mut self, event: LearnerEvent<T>) -> Result<(), EventProcessorError> {
        self.0.process_train(on_host(event))
    }

    fn process_valid(&mut self, event: LearnerEvent<V>) -> Result<(), EventProcessorError> {
        self.0.process_valid(on_host(event))
    }

    fn flush(&mut self) -> Result<(), EventProcessorError> {
        // The events that `shared::flush` sends ahead have come through here.
        self.0.flush()
    }

    fn renderer(self) -> Box<dyn MetricsRenderer> {
        self.0.renderer()
    }
}

fn on_host<T: 'static>(event: LearnerEvent<T>) -> LearnerEvent<T> {
    let LearnerEvent::ProcessedItem(mut item) = event else { return event };
    let output = &mut Some(item.item);
    moved::<_, ClassificationOutput>(output);
    moved::<_, MultiLabelClassificationOutput>(output);
    item.item = output.take().expect("it comes back");
    LearnerEvent::ProcessedItem(item)
}

/// Brings an output to the host if it is a `K` of so few scores.
fn moved<T: 'static, K: Scored>(output: &mut Option<T>) {
    let known = (output as &mut dyn Any).downcast_mut::<Option<K>>();
    if let Some(known) = known.filter(|known| known.as_ref().is_some_and(|output| output.scores() <= MOST)) {
        *known = known.take().map(|output| K::from_host(output.to_host(), &host().inner()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::thread;
    use std::time::Duration;

    use burn::data::dataloader::Progress;
    use burn::tensor::Tensor;
    use burn::train::TrainingItem;
    use burn::train::renderer::CliMetricsRenderer;

    use super::*;
    use crate::learner::shared::flush;

    /// Whether an output that was made with autodiff has come to the host's memory, which is without.
    fn comes<T: 'static>(item: T, has_autodiff: impl Fn(&T) -> bool) -> bool {
        assert!(has_autodiff(&item));
        let item = TrainingItem::new(item, Progress::new(0, None, None), None, None);
        let LearnerEvent::ProcessedItem(item) = on_host(LearnerEvent::ProcessedItem(item)) else { panic!("an item") };
        !has_autodiff(&item.item)
    }

    #[test]
    fn outputs_of_few_scores_come_to_the_host() {
        let device = host();
        for (scores, is_moved) in [(MOST, true), (MOST + 1, false)] {
            let (loss, output) = (Tensor::zeros([1], &device), Tensor::zeros([1, scores], &device));
            let one = ClassificationOutput::new(loss.clone(), output.clone(), Tensor::zeros([1], &device));
            assert_eq!(comes(one, |one| one.output.is_autodiff()), is_moved, "{scores}");
            let many = MultiLabelClassificationOutput::new(loss, output.clone(), Tensor::zeros([1, scores], &device));
            assert_eq!(comes(many, |many| many.output.is_autodiff()), is_moved, "{scores}");
            assert!(!comes(output, |output| output.is_autodiff()), "a type that is not known");
        }
    }

    /// A metric that panics, after a while, as one does that waits for a GPU.
    struct Slow;

    impl EventProcessorTraining<LearnerEvent<()>, LearnerEvent<()>> for Slow {
        fn process_train(&mut self, _: LearnerEvent<()>) -> Result<(), EventProcessorError> {
            thread::sleep(Duration::from_millis(300));
            panic!("a metric");
        }

        fn process_valid(&mut self, _: LearnerEvent<()>) -> Result<(), EventProcessorError> {
            Ok(())
        }

        fn renderer(self) -> Box<dyn MetricsRenderer> {
            Box::new(CliMetricsRenderer::new())
        }
    }

    #[test]
    fn who_waits_for_a_metric_that_panics_learns_it() {
        for several in [false, true] {
            let mut processor = AsyncProcessorTraining::new(Slow);
            if several {
                processor = AsyncProcessorTraining::new(OneMemory(processor));
            }
            let (ended, until) = channel();
            let waiting = thread::spawn(move || {
                let _ended = ended;
                let _ = processor.process_train(LearnerEvent::EndEpoch(0));
                flush(&mut processor, |_| {});
            });
            let hangs = until.recv_timeout(Duration::from_secs(20)) == Err::<(), _>(RecvTimeoutError::Timeout);
            assert!(!hangs, "on several devices: {several}");
            assert_eq!(*waiting.join().unwrap_err().downcast::<&str>().unwrap(), "a metric");
        }
    }
}
