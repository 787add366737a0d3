//! A user's own Burn model as a chain of blocks: pipelines and activation recomputation.
//!
//! [`Stages`] says what the blocks are and which parameters they use. [`Division`] divides them over the ranks of a
//! pipeline and refuses what does not fit; [`StageRank`] runs one rank's list of a schedule; [`Pipeline`] is that under
//! burn-train, where the first rank of a pipeline reads the batches and leads the others.

mod activation;
mod chunk;
mod division;
mod error;
mod groups;
mod layers;
mod lead;
mod lines;
mod orders;
mod overlap;
mod part;
mod pipeline;
mod stage_model;
mod stage_rank;
mod stage_zero;
mod strategy;
mod tied;
mod values;
mod wire;

use burn::module::{Module, ModuleDisplay};
use burn::tensor::Tensor;
use burn::train::{InferenceStep, LearnerModel, TrainStep};

pub use activation::Activation;
pub(super) use division::{Division, Wanted};
pub use error::StagesError;
pub use part::Part;
pub(super) use pipeline::OnRank;
pub(super) use stage_rank::StageRank;
pub use strategy::{ProcessesStrategy, StagesStrategy};
pub use wire::Sendable;

/// A batch of a model's training.
pub type TrainBatch<M> = <M as TrainStep>::Input;

/// A model that is a chain: a first part, blocks, and a last part with the loss. What a pipeline divides over ranks,
/// and what activation recomputation drops and recomputes.
///
/// A training or validation batch must be a [`Module`], so that it can go to the devices of all stages: `Module` in its
/// `derive` list is enough. All ranks of a pipeline see the same batches.
///
/// ```
/// use burn::nn::loss::{MseLoss, Reduction};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn::tensor::activation::relu;
/// use burn::train::RegressionOutput;
/// use burn_megatron::prelude::*;
///
/// #[derive(Module, Debug)]
/// struct Mlp {
///     input: Linear,
///     hidden: Vec<Linear>,
///     output: Linear,
/// }
///
/// #[derive(Module, Debug)]
/// struct Batch {
///     x: Tensor<2>,
///     y: Tensor<2>,
/// }
///
/// impl Stages for Mlp {
///     type Activation = Tensor<2>;
///
///     fn blocks(&self) -> usize {
///         self.hidden.len()
///     }
///
///     fn owner(&self, path: &str) -> Option<Part> {
///         Part::by_path(path, "input", "hidden", "output")
///     }
///
///     fn first(&self, batch: &Batch) -> Tensor<2> {
///         relu(self.input.forward(batch.x.clone()))
///     }
///
///     fn block(&self, index: usize, x: Tensor<2>, _: &Batch) -> Tensor<2> {
///         relu(self.hidden[index].forward(x))
///     }
///
///     fn last(&self, x: Tensor<2>, batch: &Batch) -> (Tensor<1>, RegressionOutput) {
///         let y = self.output.forward(x);
///         let loss = MseLoss::new().forward(y.clone(), batch.y.clone(), Reduction::Mean);
///         (loss.clone(), RegressionOutput::new(loss, y, batch.y.clone()))
///     }
/// }
///
/// // One device runs the same chain.
/// burn_megatron::steps_of_stages!(Mlp, Batch, RegressionOutput);
///
/// let strategy: burn::train::TrainingStrategy<Mlp> =
///     MegatronStrategy::mesh("PP2 DP2".parse()?).micro_batches(4).recompute(Recompute::full()).stages().into();
/// # Ok::<(), BoxError>(())
/// ```
pub trait Stages: TrainStep<Input: Module> + Module {
    /// What one part hands to the next: a tensor, or several.
    type Activation: Activation;

    /// Number of blocks, at least as many as the pipeline has stages.
    fn blocks(&self) -> usize;

    /// Which part uses the parameter with this path, such as `encoder.layers.3.norm_1.gamma`. A parameter that both
    /// [`first`](Self::first) and [`last`](Self::last) use is [`Part::Tied`], one that others use together [`Part::Shared`].
    fn owner(&self, path: &str) -> Option<Part>;

    /// From a batch to what goes into the first block.
    fn first(&self, batch: &Self::Input) -> Self::Activation;

    /// Block `index`, counted over the whole model.
    fn block(&self, index: usize, x: Self::Activation, batch: &Self::Input) -> Self::Activation;

    /// From what comes out of the last block to the loss, one number, and the output for burn-train's metrics.
    fn last(&self, x: Self::Activation, batch: &Self::Input) -> (Tensor<1>, Self::Output);

    /// The whole model on one device.
    fn run(&self, batch: &Self::Input) -> (Tensor<1>, Self::Output) {
        let x = (0..self.blocks()).fold(self.first(batch), |x, index| self.block(index, x, batch));
        self.last(x, batch)
    }
}

/// Makes a chain of [`Stages`] a model of burn-train: training and validation steps run all of it on a batch. The model, its
/// batches, its output.
#[macro_export]
macro_rules! steps_of_stages {
    ($model:ty, $batch:ty, $output:ty) => {
        impl ::burn::train::TrainStep for $model {
            type Input = $batch;
            type Output = $output;

            fn step(&self, batch: $batch) -> ::burn::train::TrainOutput<$output> {
                let (loss, output) = $crate::prelude::Stages::run(self, &batch);
                ::burn::train::TrainOutput::new(self, loss.backward(), output)
            }
        }

        impl ::burn::train::InferenceStep for $model {
            type Input = $batch;
            type Output = $output;

            fn step(&self, batch: $batch) -> $output {
                $crate::prelude::Stages::run(self, &batch).1
            }
        }
    };
}

/// A model whose validation is that of its training: the same batches and outputs.
pub(in crate::learner) trait StagesModel:
    LearnerModel
    + Stages
    + ModuleDisplay
    + InferenceStep<Input = <Self as TrainStep>::Input, Output = <Self as TrainStep>::Output>
{
}

impl<M> StagesModel for M where
    M: LearnerModel
        + Stages
        + ModuleDisplay
        + InferenceStep<Input = <M as TrainStep>::Input, Output = <M as TrainStep>::Output>
{
}
