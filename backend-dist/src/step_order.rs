//! When a backward pass comes to an operation on a parameter.
//!
//! Burn's autodiff runs the steps of a backward pass by the order of their nodes, the highest first, and the order of a node
//! is one more than the highest of its parents'. An operation on nothing but a parameter has order 1: its step comes after
//! those of all activations. [`after_earlier_uses`] is a second parent, which is not tracked and has an order above those
//! of the operations before. Who uses the parameter then comes right after it in the graph, and its step right before.
//!
//! The order grows with each use, not with time, so that all ranks of one program have the same steps in the same order.

use std::cell::Cell;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::NoCheckpointing};
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops};
use burn::backend::{Autodiff, Flex, autodiff::grads::Gradients, ops::FloatTensorOps, tensor::FloatTensor};
use burn::tensor::{FloatDType, Shape};
use parking_lot::Mutex;

/// Orders from one use of a parameter to the next. A longer chain of operations between two uses makes the steps of
/// parameters before it come later, until shorter ones have made up for it.
const BETWEEN_USES: usize = 32;

/// Uses after which the order stays: of forward passes without a backward pass.
const MOST_USES: usize = 1 << 14;

thread_local! {
    /// Of parameters since the last step of a backward pass on this thread.
    static USES: Cell<usize> = const { Cell::new(0) };
}

/// Nodes of the orders that uses have, the same for all graphs: they have no parents that are tracked.
static NODES: Mutex<Vec<FloatTensor<Autodiff<Flex>>>> = Mutex::new(Vec::new());

/// A parent for an operation on a tracked parameter that this thread uses now.
pub(crate) fn after_earlier_uses() -> NodeGuard {
    let at = count_use();
    let mut nodes = NODES.lock();
    while nodes.len() <= at {
        let mut node = match nodes.last() {
            Some(last) => last.clone(),
            None => Autodiff::<Flex>::float_zeros(Shape::new([1]), &Default::default(), FloatDType::F32),
        };
        for _ in 0..BETWEEN_USES {
            node = Above.prepare::<NoCheckpointing>([node.node()]).compute_bound().stateless(node.into_primitive());
        }
        nodes.push(node);
    }
    nodes[at].node()
}

/// To call in the step of such an operation: the uses after it belong to another graph.
pub(crate) fn begin_anew() {
    USES.set(0);
}

/// Counts one more use. Returns how many there were.
fn count_use() -> usize {
    let uses = USES.get();
    USES.set((uses + 1).min(MOST_USES - 1));
    uses
}

#[derive(Debug)]
struct Above;

impl Backward<Flex, 1> for Above {
    type State = ();

    /// No pass comes here, because no parent is tracked; and there would be no gradient to give.
    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {}
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::sync::Arc;

    use super::*;
    use crate::fully_shard::{self, FullyShard, Units};
    use crate::gradients::overlapped::{self, Reducer};
    use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
    use burn::backend::autodiff::ops::OpsKind;
    use burn::backend::{DispatchKindConversion, DispatchTensor};
    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::GradientsParams;
    use burn::tensor::{Device, Tensor, activation};
    use ranks::launch::{Rank, launch};
    use ranks::mesh::{Axis, Mesh};

    /// Called in the backward step of an operation that does nothing.
    #[derive(Clone)]
    struct Call(Arc<dyn Fn() + Send + Sync>);

    impl fmt::Debug for Call {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Call")
        }
    }

    #[derive(Debug)]
    struct Here;

    impl Backward<Flex, 1> for Here {
        type State = Call;

        fn backward(self, ops: Ops<Call, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            (ops.state.0)();
            let [parent] = ops.parents;
            let gradient = grads.consume::<Flex>(&ops.node);
            grads.register::<Flex>(parent.expect("the input is tracked").id, gradient);
        }
    }

    fn here<C: CheckpointStrategy>(x: Tensor<2>, call: &Call) -> Tensor<2>
    where
        DispatchTensor: DispatchKindConversion<Autodiff<Flex, C>>,
    {
        let x = x.try_into_primitive::<Autodiff<Flex, C>>().unwrap();
        let OpsKind::Tracked(prep) = Here.prepare::<C>([x.node()]).compute_bound().stateful() else {
            panic!("the input is not tracked");
        };
        Tensor::from_primitive::<Autodiff<Flex, C>>(prep.finish(call.clone(), x.into_primitive()))
    }

    /// How a forward pass takes the values of its parameters.
    #[derive(Clone, Copy, Debug)]
    enum Takes {
        EachAtItsUse,
        AllAtTheStart,
    }

    /// A backward pass through two layers, between which it calls `between`. Each pass has as many operations after the
    /// second layer as many models have in one.
    fn pass<C: CheckpointStrategy>(pair: &(Linear, Linear), takes: Takes, between: &Call) -> GradientsParams
    where
        DispatchTensor: DispatchKindConversion<Autodiff<Flex, C>>,
    {
        let x = Tensor::<2>::ones([1, 4], &pair.0.weight.base().device());
        let mut y = match takes {
            Takes::EachAtItsUse => pair.1.forward(here::<C>(pair.0.forward(x), between)),
            Takes::AllAtTheStart => {
                let layer =
                    |linear: &Linear| (linear.weight.val(), linear.bias.as_ref().unwrap().val().unsqueeze::<2>());
                let ((w, b), (v, c)) = (layer(&pair.0), layer(&pair.1));
                here::<C>(x.matmul(w) + b, between).matmul(v) + c
            }
        };
        for _ in 0..100 {
            y = activation::tanh(y);
        }
        GradientsParams::from_grads(y.sum().backward(), pair)
    }

    fn on_two_ranks<T: Send>(run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
        launch(&Mesh::new("DP2".parse().unwrap()).unwrap(), &[Device::flex()], |rank| Ok(run(rank))).unwrap()
    }

    fn pair(device: &Device) -> (Linear, Linear) {
        let linear = || LinearConfig::new(4, 4).init(device);
        (linear(), linear())
    }

    #[test]
    fn gradients_of_the_second_layer_leave_before_the_step_of_the_first() {
        let device = Device::flex().autodiff();
        let pair = pair(&device);
        for takes in [Takes::EachAtItsUse, Takes::AllAtTheStart] {
            let found = on_two_ranks(|rank| {
                let reducer = Reducer::with_buckets(&pair, &rank.group(Axis::Dp), |_| None, 1);
                let pair = reducer.attach(pair.clone().fork(&device));
                let counts = Arc::new(Mutex::new(Vec::new()));
                let (there, of_call) = (counts.clone(), reducer.clone());
                let call = Call(Arc::new(move || there.lock().push(of_call.take_counts())));
                for _ in 0..3 {
                    reducer.begin_pass(&pair, GradientsParams::new());
                    let grads = pass::<NoCheckpointing>(&pair, takes, &call);
                    reducer.end_pass(&pair, grads);
                    counts.lock().push(reducer.take_counts());
                }
                counts.lock().clone()
            });
            // The weight and the bias of each layer.
            let each = overlapped::Counts { during: 2, after: 0 };
            assert_eq!(found, vec![vec![each; 6]; 2], "{takes:?}");
        }
    }

    #[test]
    fn sharded_parameters_reduce_gradients_of_the_second_layer_before_the_step_of_the_first() {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let pair = pair(&device);
        for (takes, has_passes) in
            [(Takes::EachAtItsUse, false), (Takes::EachAtItsUse, true), (Takes::AllAtTheStart, true)]
        {
            let found = on_two_ranks(|rank| {
                let shards = FullyShard::new(&pair, &rank.group(Axis::Dp), &Units::auto().keep_below(0));
                let pair = shards.shard(pair.clone().fork(&device));
                let reduced = Arc::new(Mutex::new(Vec::new()));
                let (there, of_call) = (reduced.clone(), shards.clone());
                let call = Call(Arc::new(move || there.lock().push(of_call.take_counts().reduced)));
                for _ in 0..3 {
                    if has_passes {
                        shards.begin_pass(&pair);
                    }
                    let grads = pass::<BalancedCheckpointing>(&pair, takes, &call);
                    if has_passes {
                        let _ = shards.end_pass(&pair, grads);
                    }
                    let fully_shard::Counts { reduced: rest, .. } = shards.take_counts();
                    reduced.lock().push(rest);
                }
                reduced.lock().clone()
            });
            assert_eq!(found, vec![vec![2; 6]; 2], "{takes:?}, passes {has_passes}");
        }
    }

    #[test]
    fn uses_are_counted_from_a_backward_step_on_and_not_without_end() {
        begin_anew();
        assert_eq!([(); 3].map(|()| count_use()), [0, 1, 2]);
        begin_anew();
        assert_eq!(count_use(), 0);
        USES.set(MOST_USES - 2);
        assert_eq!([(); 3].map(|()| count_use()), [MOST_USES - 2, MOST_USES - 1, MOST_USES - 1]);
        begin_anew();
    }
}
