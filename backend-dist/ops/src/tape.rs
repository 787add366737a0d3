//! Backward from an output whose gradient is received from elsewhere, as between pipeline stages.

use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata,
    autodiff::{NodeId, checkpoint::strategy::CheckpointStrategy, grads::Gradients as AutodiffGradients, ops::Ops},
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::{Gradients, Tensor};

use super::{
    operation::{Parents, apply, on_backends, operation},
    stash::Stash,
};

/// The recorded graph of an output, without the output's elements.
#[derive(Debug)]
pub struct Tape {
    root: Tensor<1>,
    seed: Seed,
    shape: Vec<usize>,
}

impl Tape {
    /// The tape of `y`. It holds none of `y`'s elements: they are freed when the caller drops its last copy.
    ///
    /// # Panics
    /// If `y` does not depend on anything that needs a gradient.
    pub fn of<const D: usize>(y: Tensor<D>) -> Self {
        assert!(y.is_tracked(), "a tape of a tensor which autodiff does not track");
        let (seed, shape) = (Seed::default(), y.dims().to_vec());
        Self { root: apply(Root { seed: seed.clone() }, [y.into_dispatch()]), seed, shape }
    }

    /// The gradients of everything that the output depends on, from the output's gradient.
    ///
    /// # Panics
    /// If `grad` does not have the shape of the output.
    pub fn pull_back<const D: usize>(self, grad: Tensor<D>) -> Gradients {
        assert_eq!(grad.dims().as_slice(), self.shape, "the gradient does not have the output's shape");
        self.seed.put::<Start>(<Dispatch as TapeOps>::op_start(grad.into_dispatch()));
        self.root.backward()
    }
}

/// [`Tape::pull_back`] from `y`, in one step.
///
/// # Panics
/// If `y` is not tracked, or `grad` has another shape.
pub fn pull_back<const D: usize>(y: Tensor<D>, grad: Tensor<D>) -> Gradients {
    Tape::of(y).pull_back(grad)
}

/// A container of the gradients that `fill` registers.
pub(super) fn collect(fill: impl FnOnce(&mut AutodiffGradients) + Send + 'static) -> Gradients {
    let device = burn::tensor::Device::flex().autodiff();
    let tape = Tape::of(Tensor::<1>::zeros([1], &device).require_grad());
    tape.seed.put::<Start>(Box::new(move |grads, _| fill(grads)));
    tape.root.backward()
}

type Start = Box<dyn FnOnce(&mut AutodiffGradients, NodeId) + Send>;

/// Starts backward; left here when the output's gradient is known.
type Seed = Stash;

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait TapeOps: Backend {
    /// Registers `grad`.
    fn op_start(grad: FloatTensor<Self>) -> Start;
}

on_backends! {
    impl TapeOps {
        fn op_start(grad: FloatTensor<Self>) -> Start {
            Box::new(move |grads, node| grads.register::<Self>(node, grad))
        }
    }
}

operation! {
    /// One element, whose backward pass runs the seed at the input.
    Root { seed: Seed }, 1, Seed,
    |[y], _, _| (B::float_zeros([1].into(), &y.device(), y.dtype().into()), Some(seed)),
    |seed, _grad, parents| {
        let Parents { ops: Ops { parents: [node], .. }, grads } = parents;
        let start = seed.take::<Start>().expect("the seed is set before backward");
        if let Some(node) = node {
            start(grads, node.id);
        }
    },
}

impl<B: Backend + TapeOps, C: CheckpointStrategy> TapeOps for Autodiff<B, C> {
    fn op_start(grad: FloatTensor<Self>) -> Start {
        B::op_start(grad.into_primitive())
    }
}
