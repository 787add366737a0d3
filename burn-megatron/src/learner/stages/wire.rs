//! Batches and outputs of a user's own types between processes.

use backend_dist::comm::Group;
use burn::prelude::{Bool, Int};
use burn::tensor::{Device, Tensor, TensorData};
use burn::train::{ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput, TrainStep};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::orders::{Order, Reply};
use crate::learner::devices::host;

/// A batch or an output that can be sent to another process. [`StagesStrategy::across_processes`] needs it: batches go from
/// the first rank of a pipeline to the others, outputs from the last stage to the first rank, whose process has the metrics.
///
/// Tensors, pairs and burn-train's own outputs can be sent. For a batch of one's own it is one line,
/// [`sendable!`](crate::sendable):
///
/// ```
/// use burn::prelude::*;
///
/// #[derive(Module, Debug)]
/// struct Batch {
///     x: Tensor<2>,
///     classes: Tensor<1, Int>,
/// }
///
/// burn_megatron::sendable!(Batch: x, classes);
/// ```
///
/// [`StagesStrategy::across_processes`]: super::StagesStrategy::across_processes
pub trait Sendable: Sized {
    /// What is sent.
    type Host: Clone + Send + Sync + Serialize + DeserializeOwned + 'static;

    /// Without its device.
    #[allow(clippy::wrong_self_convention, reason = "tensors are read without a copy")]
    fn to_host(self) -> Self::Host;

    /// On `device`.
    fn from_host(host: Self::Host, device: &Device) -> Self;
}

macro_rules! sendable_tensor {
    ($kind:ty, $at:ident, $data:ident => $options:expr) => {
        impl<const D: usize> Sendable for Tensor<D, $kind> {
            type Host = TensorData;

            fn to_host(self) -> TensorData {
                self.into_data()
            }

            fn from_host($data: TensorData, $at: &Device) -> Self {
                let options = $options;
                Self::from_data($data, options)
            }
        }
    };
}

sendable_tensor!(burn::tensor::Float, device, data => (device, data.dtype()));
sendable_tensor!(Int, device, data => (device, data.dtype()));
sendable_tensor!(Bool, device, data => device);

impl<A: Sendable, B: Sendable> Sendable for (A, B) {
    type Host = (A::Host, B::Host);

    fn to_host(self) -> Self::Host {
        (self.0.to_host(), self.1.to_host())
    }

    fn from_host((a, b): Self::Host, device: &Device) -> Self {
        (A::from_host(a, device), B::from_host(b, device))
    }
}

/// Makes a struct [`Sendable`] by the tensors that it consists of.
#[macro_export]
macro_rules! sendable {
    ($batch:ty: $($tensor:ident),+) => {
        impl $crate::prelude::Sendable for $batch {
            type Host = [::burn::tensor::TensorData; [$(stringify!($tensor)),+].len()];

            fn to_host(self) -> Self::Host {
                [$($crate::prelude::Sendable::to_host(self.$tensor)),+]
            }

            fn from_host([$($tensor),+]: Self::Host, device: &::burn::tensor::Device) -> Self {
                $(let $tensor = $crate::prelude::Sendable::from_host($tensor, device);)+
                Self { $($tensor),+ }
            }
        }
    };
}

sendable!(ClassificationOutput: loss, output, targets);
sendable!(MultiLabelClassificationOutput: loss, output, targets);
sendable!(RegressionOutput: loss, output, targets);

impl Sendable for SequenceOutput {
    /// Loss, logits and targets; predictions if there are any.
    type Host = ([TensorData; 3], Option<TensorData>);

    fn to_host(self) -> Self::Host {
        let predictions = self.predictions.map(Sendable::to_host);
        ([self.loss.to_host(), self.logits.to_host(), self.targets.to_host()], predictions)
    }

    fn from_host(([loss, logits, targets], predictions): Self::Host, device: &Device) -> Self {
        let (loss, logits) = (Tensor::from_host(loss, device), Tensor::from_host(logits, device));
        let predictions = predictions.map(|predictions| Tensor::from_host(predictions, device));
        Self { loss, logits, predictions, targets: Tensor::from_host(targets, device) }
    }
}

/// How orders and replies with a model's batches and outputs go between processes.
pub(super) struct Wire<M: TrainStep> {
    pub send_order: fn(Order<M::Input>, usize, &Group),
    /// With batches on this device, as data loaders make them: with its autodiff, but for evaluation.
    pub receive_order: fn(&Group, &Device) -> Order<M::Input>,
    pub send_reply: fn(Reply<M::Output>, &Group),
    pub receive_reply: fn(usize, &Group) -> Reply<M::Output>,
}

impl<M: TrainStep> Clone for Wire<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: TrainStep> Copy for Wire<M> {}

impl<M: TrainStep<Input: Sendable, Output: Sendable>> Wire<M> {
    pub fn new() -> Self {
        Self {
            send_order: |order, to, group| group.send_host(order.map(M::Input::to_host), to),
            receive_order: |group, at| match group.receive_host::<Order<<M::Input as Sendable>::Host>>(0) {
                Order::Evaluate(batch) => Order::Evaluate(Sendable::from_host(batch, &at.clone().inner())),
                order => order.map(|batch| Sendable::from_host(batch, at)),
            },
            send_reply: |reply, group| group.send_host(reply.map(M::Output::to_host), 0),
            receive_reply: |from, group| {
                let reply: Reply<<M::Output as Sendable>::Host> = group.receive_host(from);
                reply.map(|output| Sendable::from_host(output, &host().inner()))
            },
        }
    }
}
