//! Backward passes that say how far they have come.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;

/// What backward passes have done, of all ranks.
#[derive(Clone, Debug, Default)]
pub struct Passes {
    pub begun: Arc<AtomicUsize>,
    /// They have the gradients of the last layer.
    pub past_head: Arc<AtomicUsize>,
    /// The pass that panics before it has a gradient.
    pub panic_at: usize,
}

impl Passes {
    /// The loss, whose step begins a pass.
    pub fn begin(&self, loss: Tensor<1>) -> Tensor<1> {
        self.step(loss, true)
    }

    /// The input of the last layer.
    pub fn past_head(&self, x: Tensor<2>) -> Tensor<2> {
        self.step(x, false)
    }

    fn step<const D: usize>(&self, x: Tensor<D>, begins: bool) -> Tensor<D> {
        let x = x.try_into_primitive::<Autodiff<Flex>>().unwrap();
        let prep = Passed.prepare::<NoCheckpointing>([x.node()]).compute_bound();
        let OpsKind::Tracked(prep) = prep.stateful() else { panic!("activations are tracked") };
        Tensor::from_primitive::<Autodiff<Flex>>(prep.finish((self.clone(), begins), x.into_primitive()))
    }
}

#[derive(Debug)]
struct Passed;

impl Backward<Flex, 1> for Passed {
    type State = (Passes, bool);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (passes, begins) = ops.state;
        if begins {
            let pass = passes.begun.fetch_add(1, SeqCst) + 1;
            assert!(pass != passes.panic_at, "the pass ran into a wall");
        } else {
            passes.past_head.fetch_add(1, SeqCst);
        }
        let gradient = grads.consume::<Flex>(&ops.node);
        let [parent] = ops.parents;
        grads.register::<Flex>(parent.expect("activations are tracked").id, gradient);
    }
}
