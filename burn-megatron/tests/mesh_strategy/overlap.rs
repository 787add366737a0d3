//! Gradients leave while the backward pass goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;
use burn_megatron::prelude::*;

use crate::classifier::{Setup, Trap};

/// What backward passes have done, of all ranks.
#[derive(Clone, Debug, Default)]
pub struct Passes {
    begun: Arc<AtomicUsize>,
    /// They have the gradients of the last layer.
    past_head: Arc<AtomicUsize>,
    /// The pass that panics before it has a gradient.
    panic_at: usize,
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

/// A CPU rank waits in a reduction for its peer. Where that has failed, a rank comes past the last layer only if gradients
/// of that layer have not left yet.
#[test]
fn gradients_of_the_last_layer_leave_before_the_step_of_the_layer_below() {
    for layout in ["DP2", "DP2 ZeRO1", "DP2 ZeRO2"] {
        let usual = || MegatronStrategy::mesh(layout.parse().unwrap());
        // Of the second step one rank begins its pass, and the other does not.
        let past_head = |strategy: MeshStrategy| {
            let passes = Passes { panic_at: 4, ..Passes::default() };
            let trap = Trap { passes: Some(passes.clone()), ..Trap::default() };
            let result = Setup { trap, ..Setup::default() }.run(tempfile::tempdir().unwrap().path(), strategy.into());
            let text = result.error.expect("a rank fails").to_string();
            assert!(text.contains("the pass ran into a wall"), "{text}");
            passes.past_head.load(SeqCst)
        };
        assert_eq!(past_head(usual().overlap_grad_reduce().bucket_size(1)), 2, "{layout}");
        // After the pass, and in one bucket of all parameters.
        assert_eq!(past_head(usual()), 3, "{layout}");
        assert_eq!(past_head(usual().overlap_grad_reduce()), 3, "{layout}");
    }
}
