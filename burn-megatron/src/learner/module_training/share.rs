//! Steps of several micro-batches.

use burn::module::{Module, ModuleDisplay};
use burn::tensor::Tensor;
use burn::train::{InferenceStep, TrainOutput, TrainStep};

use crate::learner::stages::{Part, Stages, TrainBatch};

/// A model whose gradients are a share of those of its loss: burn-train adds up the gradients of micro-batches, and a step
/// takes their mean. Its output has the loss as it is.
#[derive(Module, Debug)]
pub struct Share<M> {
    pub model: M,
    #[module(skip)]
    pub share: f64,
}

impl<M: Stages + ModuleDisplay + 'static> TrainStep for Share<M> {
    type Input = TrainBatch<M>;
    type Output = <M as TrainStep>::Output;

    fn step(&self, batch: Self::Input) -> TrainOutput<Self::Output> {
        let (loss, output) = self.run(&batch);
        TrainOutput::new(self, loss.backward(), output)
    }
}

impl<M> InferenceStep for Share<M>
where
    M: InferenceStep + Module + ModuleDisplay + 'static,
{
    type Input = <M as InferenceStep>::Input;
    type Output = <M as InferenceStep>::Output;

    fn step(&self, batch: Self::Input) -> Self::Output {
        InferenceStep::step(&self.model, batch)
    }
}

impl<M: Stages + ModuleDisplay + 'static> Stages for Share<M> {
    type Activation = M::Activation;

    fn blocks(&self) -> usize {
        self.model.blocks()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        self.model.owner(path.strip_prefix("model.").unwrap_or(path))
    }

    fn first(&self, batch: &Self::Input) -> Self::Activation {
        self.model.first(batch)
    }

    fn block(&self, index: usize, x: Self::Activation, batch: &Self::Input) -> Self::Activation {
        self.model.block(index, x, batch)
    }

    fn last(&self, x: Self::Activation, batch: &Self::Input) -> (Tensor<1>, Self::Output) {
        let (loss, output) = self.model.last(x, batch);
        (loss * self.share, output)
    }
}
