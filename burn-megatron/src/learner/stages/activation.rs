//! What one part of a model hands to the next, within a rank and between ranks.

use backend_dist::collective::{recv, send};
use backend_dist::comm::Group;
use burn::tensor::{DType, Device, GradientCheckpointingStrategy, Gradients, Tensor};

use crate::engine::p2p_communicator::Link;
use crate::schedule::Transfer;

/// A tensor, or a pair or list of activations.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_megatron::prelude::*;
///
/// fn is_activation<A: Activation>() {}
/// is_activation::<Tensor<3>>();
/// // A decoder's blocks read the encoder's output too.
/// is_activation::<(Tensor<3>, Tensor<3>)>();
/// is_activation::<Vec<Tensor<4>>>();
/// ```
pub trait Activation: Clone + Send + 'static {
    /// With the autodiff of `device`, where it is, and no gradient.
    fn untracked(self, device: &Device) -> Self;

    /// The leaf of a new graph, with the gradient checkpointing of `device`, where it is.
    fn leaf(self, device: &Device) -> Self;

    /// Without autodiff.
    fn inner(self) -> Self;

    /// The gradient of this leaf; zeros if nothing depends on it.
    fn gradient(&self, gradients: &mut Gradients) -> Self;

    /// The dot product with `gradient`, from which the backward pass begins: `gradient`, which has no graph, is
    /// then the gradient of this. `None` if this has no gradient.
    fn root(self, gradient: Self) -> Option<Tensor<1>>;

    /// Sends it to member `to`, which must call [`receive`](Self::receive). Does not wait.
    fn send(self, to: usize, group: &Group);

    /// The oldest that member `from` has sent, on `device`; waits for it.
    fn receive(from: usize, device: &Device, group: &Group) -> Self;
}

impl<const D: usize> Activation for Tensor<D> {
    fn untracked(self, device: &Device) -> Self {
        with_autodiff(self.without_autodiff(), device.gradient_checkpointing_strategy())
    }

    fn leaf(self, device: &Device) -> Self {
        self.untracked(device).require_grad()
    }

    fn inner(self) -> Self {
        self.without_autodiff()
    }

    fn gradient(&self, gradients: &mut Gradients) -> Self {
        self.grad_remove(gradients).unwrap_or_else(|| self.clone().without_autodiff().zeros_like())
    }

    fn root(self, gradient: Self) -> Option<Tensor<1>> {
        let gradient = with_autodiff(gradient, self.gradient_checkpointing_strategy());
        self.is_tracked().then(|| (self * gradient).sum())
    }

    fn send(self, to: usize, group: &Group) {
        // Batches may differ in shape.
        group.send_host((self.dims().to_vec(), self.dtype()), to);
        send(self.without_autodiff(), to, group);
    }

    fn receive(from: usize, device: &Device, group: &Group) -> Self {
        let (shape, dtype): (Vec<usize>, DType) = group.receive_host(from);
        let shape = shape.try_into().unwrap_or_else(|shape| panic!("a stage got an activation of shape {shape:?}"));
        recv(shape, dtype, &device.clone().inner(), from, group)
    }
}

impl<A: Activation, B: Activation> Activation for (A, B) {
    fn untracked(self, device: &Device) -> Self {
        (self.0.untracked(device), self.1.untracked(device))
    }

    fn leaf(self, device: &Device) -> Self {
        (self.0.leaf(device), self.1.leaf(device))
    }

    fn inner(self) -> Self {
        (self.0.inner(), self.1.inner())
    }

    fn gradient(&self, gradients: &mut Gradients) -> Self {
        (self.0.gradient(gradients), self.1.gradient(gradients))
    }

    fn root(self, gradient: Self) -> Option<Tensor<1>> {
        sum([self.0.root(gradient.0), self.1.root(gradient.1)])
    }

    fn send(self, to: usize, group: &Group) {
        self.0.send(to, group);
        self.1.send(to, group);
    }

    fn receive(from: usize, device: &Device, group: &Group) -> Self {
        (A::receive(from, device, group), B::receive(from, device, group))
    }
}

impl<A: Activation> Activation for Vec<A> {
    fn untracked(self, device: &Device) -> Self {
        self.into_iter().map(|x| x.untracked(device)).collect()
    }

    fn leaf(self, device: &Device) -> Self {
        self.into_iter().map(|x| x.leaf(device)).collect()
    }

    fn inner(self) -> Self {
        self.into_iter().map(A::inner).collect()
    }

    fn gradient(&self, gradients: &mut Gradients) -> Self {
        self.iter().map(|x| x.gradient(gradients)).collect()
    }

    fn root(self, gradient: Self) -> Option<Tensor<1>> {
        sum(self.into_iter().zip(gradient).map(|(x, gradient)| x.root(gradient)))
    }

    fn send(self, to: usize, group: &Group) {
        group.send_host(self.len(), to);
        self.into_iter().for_each(|x| x.send(to, group));
    }

    fn receive(from: usize, device: &Device, group: &Group) -> Self {
        let length: usize = group.receive_host(from);
        (0..length).map(|_| A::receive(from, device, group)).collect()
    }
}

/// Between the ranks of a pipeline; what arrives is put on the device.
impl<A: Activation> Link<A> for (Group, Device) {
    type Incoming = ();

    fn send(&self, value: A, to: usize) {
        value.send(to, &self.0);
    }

    fn announce(&self, _: &Transfer) {}

    fn receive(&self, transfer: &Transfer, (): ()) -> A {
        A::receive(transfer.peer, &self.1, &self.0)
    }
}

/// `x` with autodiff, and this gradient checkpointing: Burn refuses an operation on tensors of which one alone has some.
fn with_autodiff<const D: usize>(x: Tensor<D>, strategy: Option<GradientCheckpointingStrategy>) -> Tensor<D> {
    let x = Tensor::from_inner(x);
    match strategy {
        Some(strategy) => x.with_gradient_checkpointing_strategy(strategy),
        None => x,
    }
}

fn sum(roots: impl IntoIterator<Item = Option<Tensor<1>>>) -> Option<Tensor<1>> {
    roots.into_iter().flatten().reduce(|sum, root| sum + root)
}
