//! Rows to the ranks of their experts, through the experts and back, as one node of the graph. What makes rows of
//! tokens and tokens of rows are nodes in front and behind, so that the rows can be made before the host knows where
//! they go.
//!
//! The experts of every rank are cut into pieces. Forward the rows of the second piece come while the first piece's
//! experts compute, and the results of the first go back while the second's do. Backward it is the same, and gradients
//! of the experts' first matrices, for which nobody waits, follow when the last gradients of rows are under way:
//! Megatron-LM's `--overlap-moe-expert-parallel-comm` with `--delay-wgrad-compute`, within one micro-batch. Since an
//! expert is in one piece, its products and its gradients are those of one piece, and so are its scales in FP8.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::{
    Shape, TensorMetadata,
    autodiff::{
        NodeId,
        checkpoint::base::Checkpointer,
        grads::Gradients,
        ops::{Backward, Ops},
    },
    tensor::FloatTensor,
};

use super::kernels::MoeKernels;
use super::products::{Part, Products};
use super::rows::RowMap;
use super::travel::Splits;
use crate::comm::Group;
use crate::ops::fp8::{Fp8Experts, Purpose};
use crate::ops::main_grads::place;
use crate::ops::weight_grads::run_or_defer;

/// The way of rows through the experts of all members of a group.
#[derive(Clone, Debug)]
pub struct Journey {
    /// Who holds the experts.
    pub group: Group,
    /// The pieces of this rank's experts, in the order of the experts. Rows of the first are sent first.
    pub pieces: Vec<Piece>,
    /// Both layers of the rank's experts, if they multiply in FP8.
    pub fp8: Option<[Fp8Experts; 2]>,
}

/// Some of a rank's experts, and the rows for these experts of every rank.
#[derive(Clone, Debug)]
pub struct Piece {
    /// How rows change owner.
    pub splits: Splits,
    /// From what comes to the experts' rows.
    pub by_expert: RowMap,
    /// How many experts.
    pub experts: usize,
    /// Rows of each, in FP8 of each of its groups of rows, as many for each expert.
    pub counts: Arc<[usize]>,
}

impl Journey {
    /// Experts that this rank computes.
    pub(super) fn experts(&self) -> usize {
        self.pieces.iter().map(|piece| piece.experts).sum()
    }

    /// Rows that this rank sends, and gets back.
    pub(super) fn rows(&self) -> usize {
        self.pieces.iter().map(|piece| piece.splits.sent()).sum()
    }

    /// Each piece with its first row among those that are sent, and its experts.
    fn places(&self) -> impl Iterator<Item = (&Piece, usize, Part)> {
        let of = self.experts();
        self.pieces.iter().scan((0, 0), move |(row, expert), piece| {
            let part = Part { experts: *expert..*expert + piece.experts, of, counts: piece.counts.clone() };
            let place = (piece, *row, part);
            *row += piece.splits.sent();
            *expert += piece.experts;
            Some(place)
        })
    }
}

/// What a piece keeps for the backward pass.
#[derive(Clone, Debug)]
pub(super) struct Kept<B: MoeKernels, P: Products<B>> {
    /// Of the experts' rows.
    x: P::Input,
    /// The first layer's result.
    hidden: FloatTensor<B>,
    /// A probability for each row.
    p: FloatTensor<B>,
    /// Of the second layer's input.
    input: P::Input,
}

/// `x [rows, hidden]`, `p [rows, 1]`, and the matrices of both layers, to what its expert makes of each row.
pub(super) fn forward<B: MoeKernels, P: Products<B>>(
    x: FloatTensor<B>,
    p: FloatTensor<B>,
    layers: &[P; 2],
    weights: [&FloatTensor<B>; 2],
    journey: &Journey,
    purposes: [Purpose; 2],
) -> (FloatTensor<B>, Vec<Kept<B, P>>) {
    let ([first, second], group, sent) = (layers, &journey.group, [x, p]);
    let coming: Vec<_> = journey.places().map(|(piece, row, _)| B::start(&sent, row, &piece.splits, group)).collect();
    let mut results = B::none_of(journey.rows());
    let shared = journey.pieces.len() > 1 && B::takes_processors(&sent[0], group);
    drop(sent);
    let matrices = [first.matrices(weights[0]), second.matrices(weights[1])];
    let mut kept = Vec::new();
    for ((piece, _, part), coming) in journey.places().zip(coming) {
        let (to, back) = piece.by_expert.tables();
        let [x, p] = B::arrived(coming).try_into().expect("rows and probabilities");
        let (x, p) = (B::sum_rows(x, B::table(&to)), flat::<B>(B::sum_rows(p, B::table(&to))));
        let y = B::sharing(shared, || {
            let (hidden, x) = first.forward(&matrices[0], x, &part, purposes[0]);
            let input = B::weighted_swiglu(hidden.clone(), p.clone());
            let (y, input) = second.forward(&matrices[1], input, &part, purposes[1]);
            kept.push(Kept { x, hidden, p, input });
            y
        });
        B::join(vec![B::sum_rows(y, B::table(&back))], &piece.splits.reversed(), group, &mut results);
    }
    let [y] = B::joined(results).try_into().expect("results");
    (y, kept)
}

/// Gradients of `x` and `p`; those of the matrices, which are these nodes if they want one, go to their places.
fn backward<B: MoeKernels, P: Products<B>>(
    grad: FloatTensor<B>,
    kept: Vec<Kept<B, P>>,
    layers: &[P; 2],
    weights: [&FloatTensor<B>; 2],
    nodes: [Option<Matrices>; 2],
    journey: &Arc<Journey>,
    grads: &mut Gradients,
) -> [FloatTensor<B>; 2] {
    let ([first, second], Journey { group, pieces, .. }, sent) = (layers, &**journey, [grad]);
    let coming: Vec<_> = journey.places().map(|(piece, row, _)| B::start(&sent, row, &piece.splits, group)).collect();
    let mut results = B::none_of(journey.rows());
    let shared = B::takes_processors(&sent[0], group);
    drop(sent);
    let matrices = [first.transposed(weights[0], &kept[0].x), second.transposed(weights[1], &kept[0].input)];
    let [mut of_first, mut of_second] = [Vec::new(), Vec::new()];
    for (((piece, _, part), coming), kept) in journey.places().zip(coming).zip(kept) {
        let (to, back) = piece.by_expert.tables();
        let Kept { x, hidden, p, input } = kept;
        let [grad] = B::arrived(coming).try_into().expect("gradients of results");
        let grad = B::sum_rows(grad, B::table(&to));
        let again = || B::weighted_swiglu(hidden.clone(), p.clone());
        let (grad, pair) = second.gradient(grad, input, again, &part, nodes[1].is_some());
        of_second.push(pair);
        let is_last = of_second.len() == pieces.len();
        let [x_grad, p_grad] = B::sharing(shared && pieces.len() > 1, || {
            // In front of the last piece's other gradients: what it needs is then gone before the largest of these are
            // made.
            if is_last {
                weight_grads::<B, P>(nodes[1], std::mem::take(&mut of_second), journey, grads);
            }
            let [grad, p_grad] = B::weighted_swiglu_grads(hidden, p, second.input_grad(grad, &matrices[1], &part));
            let (grad, pair) =
                first.gradient(grad, x, || panic!("rows of experts are kept"), &part, nodes[0].is_some());
            of_first.push(pair);
            [first.input_grad(grad, &matrices[0], &part), column::<B>(p_grad)]
        });
        let back = [x_grad, p_grad].map(|grad| B::sum_rows(grad, B::table(&back)));
        B::join(back.into(), &piece.splits.reversed(), group, &mut results);
    }
    B::sharing(shared, || weight_grads::<B, P>(nodes[0], of_first, journey, grads));
    B::joined(results).try_into().expect("gradients of rows and probabilities")
}

/// What the way through the experts keeps.
#[derive(Clone, Debug)]
pub(super) struct JourneyKept<B: MoeKernels, P: Products<B>> {
    pub pieces: Vec<Kept<B, P>>,
    pub layers: [P; 2],
    pub weights: [FloatTensor<B>; 2],
    pub journey: Arc<Journey>,
}

#[derive(Debug)]
pub(super) struct ThroughExperts<P>(pub PhantomData<P>);

impl<B: MoeKernels, P: Products<B>> Backward<B, 4> for ThroughExperts<P> {
    type State = JourneyKept<B, P>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let ([x, p, gate_up, down], JourneyKept { pieces, layers, weights, journey }) = (ops.parents, ops.state);
        let matrices = [gate_up, down].map(|node| node.map(|node| Matrices { id: node.id, is_leaf: node.order == 0 }));
        let values = backward::<B, P>(grad, pieces, &layers, weights.each_ref(), matrices, &journey, grads);
        for (node, value) in [x, p].into_iter().zip(values) {
            if let Some(node) = node {
                grads.register::<B>(node.id, value);
            }
        }
    }
}

/// The node of the matrices of a layer.
#[derive(Clone, Copy, Debug)]
struct Matrices {
    id: NodeId,
    /// Nothing waits for their gradient: a zero-bubble schedule may put it off.
    is_leaf: bool,
}

/// Brings the gradients of a layer's matrices to their place, now or later: of each piece by its pair.
fn weight_grads<B: MoeKernels, P: Products<B>>(
    node: Option<Matrices>,
    of_pieces: Vec<Option<P::Pair>>,
    journey: &Arc<Journey>,
    grads: &mut Gradients,
) {
    let Some(Matrices { id, is_leaf }) = node else { return };
    let journey = journey.clone();
    let job = move |grads: &mut Gradients| {
        let of_pieces = journey.places().zip(of_pieces.into_iter().flatten());
        let Some((sum, add)) = place::<B>(id) else {
            let parts = of_pieces.map(|((_, _, part), pair)| P::weight_grad(pair, &part));
            return grads.register::<B>(id, B::float_cat(parts.collect(), 0));
        };
        let each = sum.shape().num_elements() / journey.experts();
        for ((_, _, part), pair) in of_pieces {
            let experts = B::rows_in_place(&sum, part.experts.clone(), each);
            P::accumulate_weight_grad(pair, &part, &experts, add);
        }
    };
    if is_leaf { run_or_defer(grads, job) } else { job(grads) }
}

/// A column as a list.
fn flat<B: MoeKernels>(x: FloatTensor<B>) -> FloatTensor<B> {
    let rows = x.shape()[0];
    B::float_reshape(x, Shape::from([rows]))
}

/// A list as a column.
fn column<B: MoeKernels>(x: FloatTensor<B>) -> FloatTensor<B> {
    let rows = x.shape()[0];
    B::float_reshape(x, Shape::from([rows, 1]))
}
