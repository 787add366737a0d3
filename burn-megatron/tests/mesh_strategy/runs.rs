//! Trainings of small models on CPU ranks, without a terminal.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, LearnerModel, LearningResult, SupervisedTraining, TrainStep, TrainingStrategy};
use burn_megatron::prelude::*;

use crate::cpu;

/// A training with these data for training and validation. With `checkpoints` it keeps some, and resumes from that of an epoch.
pub fn training<M, I>(
    directory: &Path,
    [train, valid]: [Arc<dyn DataLoader<I>>; 2],
    epochs: usize,
    checkpoints: Option<Option<usize>>,
    strategy: TrainingStrategy<M>,
) -> SupervisedTraining<M>
where
    M: LearnerModel + TrainStep<Input = I> + InferenceStep<Input = I>,
{
    let training = SupervisedTraining::new(directory, train, valid)
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(epochs)
        .with_training_strategy(strategy);
    let Some(resume) = checkpoints else { return training };
    let training = training.with_default_checkpointers();
    if let Some(epoch) = resume { training.checkpoint(epoch) } else { training }
}

/// The model of a training that has ended as it should.
pub fn trained<M: LearnerModel>(result: LearningResult<M>) -> M {
    assert!(result.error.is_none(), "{}", result.error.unwrap());
    assert!(result.interrupted.is_none(), "{:?}", result.interrupted);
    result.model
}

/// ZeRO on CPU ranks; stage 3 shards small parameters too.
pub fn zero<M: LearnerModel>(stage: u8, ranks: usize) -> TrainingStrategy<M> {
    match stage {
        3 => MegatronStrategy::fully_shard(vec![cpu(); ranks], Units::auto().keep_below(2)),
        _ => MegatronStrategy::zero(stage, ranks),
    }
}

/// Makes a model whose `forward` takes a batch and returns a [`RegressionOutput`](burn::train::RegressionOutput) one of
/// burn-train.
macro_rules! regression_steps {
    ($model:ty, $batch:ty) => {
        impl burn::train::TrainStep for $model {
            type Input = $batch;
            type Output = burn::train::RegressionOutput;

            fn step(&self, batch: $batch) -> burn::train::TrainOutput<Self::Output> {
                let output = self.forward(batch);
                burn::train::TrainOutput::new(self, output.loss.backward(), output)
            }
        }

        impl burn::train::InferenceStep for $model {
            type Input = $batch;
            type Output = burn::train::RegressionOutput;

            fn step(&self, batch: $batch) -> Self::Output {
                self.forward(batch)
            }
        }
    };
}
pub(crate) use regression_steps;
