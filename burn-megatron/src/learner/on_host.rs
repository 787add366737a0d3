//! Outputs in host memory, for metrics that add up those of several devices.

use burn::tensor::ExecutionError;
use burn::train::metric::{
    AccuracyInput, Adaptor, CerInput, ConfusionStatsInput, HammingScoreInput, ItemLazy, LossInput, PerplexityInput,
    TopKAccuracyInput, WerInput,
};

use super::devices::host;
use super::stages::Sendable;

/// An output whose tensors the thread of burn-train's metrics brings to host memory.
///
/// Metrics get the outputs of all data-parallel ranks, each on its rank's device. Some keep tensors from batch to batch
/// (precision, recall, F-beta, Matthews' correlation, AUROC, AUC-PR) and fail where these are on several devices. Outputs that are
/// burn-train's `ClassificationOutput` or `MultiLabelClassificationOutput` with at most 4,194,304 scores come to the host by
/// themselves. This is for other types, and for more scores.
///
/// ```
/// use burn::prelude::*;
/// use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
/// use burn_megatron::prelude::*;
///
/// #[derive(Module, Debug)]
/// struct Classifier {
///     head: burn::nn::Linear,
/// }
///
/// # impl Classifier {
/// #     fn classify(&self, (x, classes): (Tensor<2>, Tensor<1, Int>)) -> ClassificationOutput {
/// #         let y = self.head.forward(x);
/// #         let loss = burn::nn::loss::CrossEntropyLossConfig::new().init(&y.device());
/// #         ClassificationOutput::new(loss.forward(y.clone(), classes.clone()), y, classes)
/// #     }
/// # }
/// impl TrainStep for Classifier {
///     type Input = (Tensor<2>, Tensor<1, Int>);
///     type Output = OnHost<ClassificationOutput>; // <- the line that changes
///
///     fn step(&self, batch: Self::Input) -> TrainOutput<Self::Output> {
///         let output = self.classify(batch);
///         TrainOutput::new(self, output.loss.backward(), OnHost(output))
///     }
/// }
///
/// impl InferenceStep for Classifier {
///     type Input = (Tensor<2>, Tensor<1, Int>);
///     type Output = OnHost<ClassificationOutput>;
///
///     fn step(&self, batch: Self::Input) -> Self::Output {
///         OnHost(self.classify(batch))
///     }
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct OnHost<T>(pub T);

impl<T: Sendable + Send> ItemLazy for OnHost<T> {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(Self(T::from_host(self.0.to_host(), &host().inner())))
    }
}

macro_rules! adapt {
    ($($input:ty),*) => {
        $(impl<T: Adaptor<$input>> Adaptor<$input> for OnHost<T> {
            fn adapt(&self) -> $input {
                self.0.adapt()
            }
        })*
    };
}

adapt!(
    LossInput,
    AccuracyInput,
    TopKAccuracyInput,
    PerplexityInput,
    ConfusionStatsInput,
    HammingScoreInput,
    CerInput,
    WerInput
);
