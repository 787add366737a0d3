//! The small module that burn-train holds instead of the model.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn::train::{InferenceStep, TrainOutput, TrainStep};

use super::batches::GlobalBatch;
use crate::metrics::{EvalStats, StepStats};

/// Stands for a model whose slices live on the ranks of a [`Pretraining`](super::Pretraining).
///
/// Its steps are taken by the strategy that comes with it, on all ranks at once.
#[derive(Module, Debug)]
pub struct Megatron {
    /// burn-train asks a model for the device of its first parameter.
    anchor: Param<Tensor<1>>,
}

impl Megatron {
    pub(super) fn new() -> Self {
        Self { anchor: Param::from_tensor(Tensor::zeros([1], &Device::flex().autodiff())) }
    }
}

const OTHER_STRATEGY: &str = "this model trains on its ranks only: keep the strategy that `Pretraining` sets";

impl TrainStep for Megatron {
    type Input = GlobalBatch;
    type Output = StepStats;

    fn step(&self, _: GlobalBatch) -> TrainOutput<StepStats> {
        panic!("{OTHER_STRATEGY}")
    }
}

impl InferenceStep for Megatron {
    type Input = GlobalBatch;
    type Output = EvalStats;

    fn step(&self, _: GlobalBatch) -> EvalStats {
        panic!("{OTHER_STRATEGY}")
    }
}
