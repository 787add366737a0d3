//! What every operation is written as: its forward pass, what it saves, and its backward pass, each once for all
//! backends. Inference, autodiff and the choice of the backend are here.
//!
//! An operation is one node of the graph. Every node is compute-bound: its inputs are saved and nothing is replayed, so
//! a checkpointing strategy never repeats a forward pass, or a collective without the other ranks.

use std::fmt::Debug;
use std::marker::PhantomData;

use burn::backend::{
    Autodiff, Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    ExtensionType,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::Tensor;

use super::Kernels;
use super::main_grads::deliver;

/// An operation of `N` tensors, its parents in the graph.
pub(crate) trait Operation<const N: usize>: Debug + Send + Sized + 'static {
    /// What the backward pass needs.
    type Saved<B: Kernels>: Clone + Debug + Send + 'static;

    /// The output, and what the backward pass needs, unless no input is tracked. No gradient flows into `constants`.
    fn forward<B: Kernels>(
        self,
        inputs: [FloatTensor<B>; N],
        constants: Tensors<B>,
        tracked: Tracked<N>,
    ) -> (FloatTensor<B>, Option<Self::Saved<B>>);

    /// Hands the gradients of the inputs to `parents`, given that of the output.
    fn backward<B: Kernels>(saved: Self::Saved<B>, grad: FloatTensor<B>, parents: Parents<'_, N>);
}

/// An [`Operation`]: its name and fields, the number of its inputs (`N` if it is `for N`), what it saves, the forward pass from the inputs, the
/// constants and what is tracked, and the backward pass from what was saved, the gradient of the output and the parents.
macro_rules! operation {
    (
        $(#[$doc:meta])*
        $visibility:vis $name:ident { $($field:ident: $type:ty),* $(,)? } $(for $n:ident)?, $count:tt, $saved:ty,
        |$inputs:pat_param, $constants:pat_param, $tracked:pat_param| $forward:expr,
        |$state:pat_param, $grad:pat_param, $parents:pat_param| $backward:expr $(,)?
    ) => {
        $(#[$doc])*
        #[derive(Debug)]
        $visibility struct $name {
            $(pub $field: $type),*
        }

        impl$(<const $n: usize>)? $crate::operation::Operation<$count> for $name {
            type Saved<B: $crate::Kernels> = $saved;

            fn forward<B: $crate::Kernels>(
                self,
                $inputs: [burn::backend::tensor::FloatTensor<B>; $count],
                $constants: $crate::operation::Tensors<B>,
                $tracked: $crate::operation::Tracked<$count>,
            ) -> (burn::backend::tensor::FloatTensor<B>, Option<$saved>) {
                let Self { $($field),* } = self;
                $forward
            }

            fn backward<B: $crate::Kernels>(
                $state: $saved,
                $grad: burn::backend::tensor::FloatTensor<B>,
                $parents: $crate::operation::Parents<'_, $count>,
            ) {
                $backward
            }
        }
    };
}

/// The functions of an extension trait on every concrete backend: Flex, and Cube on GPUs.
macro_rules! on_backends {
    (impl $operations:ident { $($functions:tt)* }) => {
        impl $operations for burn::backend::Flex { $($functions)* }

        #[cfg(feature = "cuda")]
        impl $operations for burn::backend::Cube { $($functions)* }
    };
}

pub(crate) use {on_backends, operation};

/// Which inputs are tracked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tracked<const N: usize>(pub [bool; N]);

impl<const N: usize> Tracked<N> {
    /// Whether there will be a backward pass.
    pub fn any(self) -> bool {
        self.0.contains(&true)
    }

    /// What to save, if there will be a backward pass.
    pub fn then<T>(self, saved: impl FnOnce() -> T) -> Option<T> {
        self.any().then(saved)
    }
}

/// The inputs' nodes in the backward pass, those that need a gradient, and where gradients go.
pub(crate) struct Parents<'a, const N: usize> {
    pub ops: Ops<(), N>,
    pub grads: &'a mut Gradients,
}

impl<const N: usize> Parents<'_, N> {
    /// Which inputs need a gradient.
    pub fn needed(&self) -> [bool; N] {
        self.ops.parents.each_ref().map(Option::is_some)
    }

    /// Registers the gradients of the inputs that need one.
    pub fn register<B: Backend>(self, values: [impl Into<Option<FloatTensor<B>>>; N]) {
        self.each(values.map(Into::<Option<FloatTensor<B>>>::into), |grads, id, value| grads.register::<B>(id, value));
    }

    /// As [`register`](Self::register), but into the main gradients of inputs that have one.
    pub fn deliver<B: Kernels>(self, values: [impl Into<Option<FloatTensor<B>>>; N]) {
        self.each(values.map(Into::<Option<FloatTensor<B>>>::into), deliver::<B>);
    }

    fn each<T>(self, values: [Option<T>; N], register: impl Fn(&mut Gradients, NodeId, T)) {
        for (node, value) in self.ops.parents.into_iter().zip(values) {
            if let (Some(node), Some(value)) = (node, value) {
                register(self.grads, node.id, value);
            }
        }
    }
}

/// Tensors of an operation, in their order.
pub(crate) struct Tensors<B: Backend> {
    pub floats: Vec<FloatTensor<B>>,
    pub ints: Vec<IntTensor<B>>,
}

impl<B: Backend> Tensors<B> {
    pub fn none() -> Self {
        Self::floats([])
    }

    pub fn floats(floats: impl IntoIterator<Item = FloatTensor<B>>) -> Self {
        Self { floats: floats.into_iter().collect(), ints: Vec::new() }
    }

    pub fn ints(ints: impl IntoIterator<Item = IntTensor<B>>) -> Self {
        Self { floats: Vec::new(), ints: ints.into_iter().collect() }
    }

    /// The first `N` float tensors, and the rest.
    fn split<const N: usize>(mut self) -> ([FloatTensor<B>; N], Self) {
        let floats = self.floats.split_off(N);
        (self.floats.try_into().expect("an operation gets all its inputs"), Self { floats, ints: self.ints })
    }
}

// Burn derives this for structs with a fixed number of tensors only.
impl<B: Backend> ExtensionType<B> for Tensors<B> {
    type Target = Tensors<Dispatch>;

    fn map_to_dispatch<F>(self, map_kind: F, autodiff: DispatchAutodiffContext) -> Tensors<Dispatch>
    where
        F: Fn(BackendTensor<B>) -> DispatchTensorKind,
    {
        let wrap = |x| DispatchTensor { kind: map_kind(x), autodiff };
        Tensors {
            floats: self.floats.into_iter().map(|x| wrap(BackendTensor::Float(x))).collect(),
            ints: self.ints.into_iter().map(|x| wrap(BackendTensor::Int(x))).collect(),
        }
    }

    fn map_from_dispatch<F>(target: Tensors<Dispatch>, unwrap_kind: F) -> Self
    where
        F: Fn(DispatchTensor) -> BackendTensor<B>,
    {
        Self {
            floats: target.floats.into_iter().map(|x| unwrap_kind(x).float()).collect(),
            ints: target.ints.into_iter().map(|x| unwrap_kind(x).int()).collect(),
        }
    }

    fn routing_tensor(target: &Tensors<Dispatch>) -> Option<&DispatchTensor> {
        target.floats.first().or(target.ints.first())
    }

    fn routing_float_tensor(target: &Tensors<Dispatch>) -> Option<&DispatchTensor> {
        target.floats.first()
    }

    fn autodiff_routing(target: &Tensors<Dispatch>) -> (DispatchAutodiffContext, bool) {
        let contexts = target.floats.iter().chain(&target.ints).map(|x| x.autodiff);
        let context = contexts.fold(DispatchAutodiffContext::Disabled, DispatchAutodiffContext::merge);
        (context, target.floats.iter().any(|x| matches!(x.autodiff, DispatchAutodiffContext::Enabled(_))))
    }

    fn autodiff_context(target: &Tensors<Dispatch>) -> DispatchAutodiffContext {
        Self::autodiff_routing(target).0
    }
}

/// The output of an operation of these inputs.
pub(crate) fn apply<const N: usize, const D: usize>(
    operation: impl Operation<N>,
    inputs: [FloatTensor<Dispatch>; N],
) -> Tensor<D> {
    apply_with(operation, inputs, Tensors::none())
}

/// [`apply`], with inputs into which no gradient flows.
pub(crate) fn apply_with<const N: usize, const D: usize>(
    operation: impl Operation<N>,
    inputs: [FloatTensor<Dispatch>; N],
    constants: Tensors<Dispatch>,
) -> Tensor<D> {
    let tensors = Tensors { floats: inputs.into_iter().chain(constants.floats).collect(), ints: constants.ints };
    Tensor::from_dispatch(<Dispatch as Operations>::run::<_, N>(operation, tensors))
}

/// [`apply_with`], of one to five inputs.
pub(crate) fn apply_to_all<const D: usize, O>(
    operation: O,
    inputs: impl IntoIterator<Item = FloatTensor<Dispatch>>,
    constants: Tensors<Dispatch>,
) -> Tensor<D>
where
    O: Operation<1> + Operation<2> + Operation<3> + Operation<4> + Operation<5>,
{
    let mut tensors = Tensors::<Dispatch>::floats(inputs);
    let count = tensors.floats.len();
    tensors.floats.extend(constants.floats);
    tensors.ints = constants.ints;
    Tensor::from_dispatch(match count {
        1 => <Dispatch as Operations>::run::<O, 1>(operation, tensors),
        2 => <Dispatch as Operations>::run::<O, 2>(operation, tensors),
        3 => <Dispatch as Operations>::run::<O, 3>(operation, tensors),
        4 => <Dispatch as Operations>::run::<O, 4>(operation, tensors),
        5 => <Dispatch as Operations>::run::<O, 5>(operation, tensors),
        count => unreachable!("{operation:?} of {count} inputs"),
    })
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait Operations: Backend {
    /// The inputs are in front of the constants.
    fn run<O: Operation<N>, const N: usize>(
        operation: O,
        #[extension_type] tensors: Tensors<Self>,
    ) -> FloatTensor<Self>;
}

on_backends! {
    impl Operations {
        fn run<O: Operation<N>, const N: usize>(operation: O, tensors: Tensors<Self>) -> FloatTensor<Self> {
            let (inputs, constants) = tensors.split::<N>();
            operation.forward::<Self>(inputs, constants, Tracked([false; N])).0
        }
    }
}

impl<B: Kernels, C: CheckpointStrategy> Operations for Autodiff<B, C> {
    fn run<O: Operation<N>, const N: usize>(operation: O, tensors: Tensors<Self>) -> FloatTensor<Self> {
        let (inputs, constants) = tensors.split::<N>();
        let floats = constants.floats.into_iter().map(|x| x.into_primitive()).collect();
        let constants = Tensors::<B> { floats, ints: constants.ints };
        let tracked = Tracked(inputs.each_ref().map(|input| input.is_tracked()));
        let nodes = inputs.each_ref().map(|input| input.node());
        let inputs = inputs.map(|input| input.into_primitive());
        let (output, saved) = operation.forward::<B>(inputs, constants, tracked);
        match Backward::<B, N>::prepare::<C>(Node::<O>(PhantomData), nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(saved.expect("what is tracked saves something"), output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}

#[derive(Debug)]
struct Node<O>(PhantomData<O>);

impl<B: Kernels, O: Operation<N>, const N: usize> Backward<B, N> for Node<O> {
    type State = O::Saved<B>;

    fn backward(self, Ops { parents, node, state }: Ops<O::Saved<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&node);
        O::backward::<B>(state, grad, Parents { ops: Ops { parents, node, state: () }, grads });
    }
}
