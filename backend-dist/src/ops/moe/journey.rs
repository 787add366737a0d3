//! Rows to the ranks of their experts, through the experts and back, as one node of the graph. What makes rows of tokens and
//! tokens of rows are nodes in front and behind, so that the rows can be made before the host knows where they go.
//!
//! The experts of every rank are cut into pieces. Forward the rows of the second piece come while the first piece's experts
//! compute, and the results of the first go back while the second's do. Backward it is the same, and gradients of the
//! experts' first matrices, for which nobody waits, follow when the last gradients of rows are under way: Megatron-LM's
//! `--overlap-moe-expert-parallel-comm` with `--delay-wgrad-compute`, within one micro-batch. Since an expert is in one
//! piece, its products and its gradients are those of one piece.

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
use super::rows::RowMap;
use super::travel::Splits;
use crate::comm::Group;
use crate::ops::main_grads::place;
use crate::ops::weight_grads::run_or_defer;

/// The way of rows through the experts of all members of a group.
#[derive(Clone, Debug)]
pub struct Journey {
    /// Who holds the experts.
    pub group: Group,
    /// The pieces of this rank's experts, in the order of the experts. Rows of the first are sent first.
    pub pieces: Vec<Piece>,
}

/// Some of a rank's experts, and the rows for these experts of every rank.
#[derive(Clone, Debug)]
pub struct Piece {
    /// How rows change owner.
    pub splits: Splits,
    /// From what comes to the experts' rows.
    pub by_expert: RowMap,
    /// Rows of each of these experts.
    pub counts: Arc<[usize]>,
}

impl Journey {
    /// Experts that this rank computes.
    pub(super) fn experts(&self) -> usize {
        self.pieces.iter().map(|piece| piece.counts.len()).sum()
    }

    /// Rows that this rank sends, and gets back.
    pub(super) fn rows(&self) -> usize {
        self.pieces.iter().map(|piece| piece.splits.sent()).sum()
    }

    /// Each piece with its first row among those that are sent and its first expert.
    fn places(&self) -> impl Iterator<Item = (&Piece, usize, usize)> {
        self.pieces.iter().scan((0, 0), |(row, expert), piece| {
            let place = (piece, *row, *expert);
            *row += piece.splits.sent();
            *expert += piece.counts.len();
            Some(place)
        })
    }
}

/// What a piece keeps for the backward pass.
#[derive(Clone, Debug)]
pub(super) struct Kept<B: MoeKernels> {
    /// The experts' rows.
    x: FloatTensor<B>,
    /// The first layer's result.
    hidden: FloatTensor<B>,
    /// A probability for each row.
    p: FloatTensor<B>,
    /// The second layer's input, unless it is made again.
    input: Option<FloatTensor<B>>,
}

/// `x [rows, hidden]`, `p [rows, 1]`, and the matrices of both layers, to what its expert makes of each row.
pub(super) fn forward<B: MoeKernels>(
    x: FloatTensor<B>,
    p: FloatTensor<B>,
    weights: [&FloatTensor<B>; 2],
    journey: &Journey,
    recompute: bool,
) -> (FloatTensor<B>, Vec<Kept<B>>) {
    let (group, sent) = (&journey.group, [x, p]);
    let coming: Vec<_> = journey.places().map(|(piece, row, _)| B::start(&sent, row, &piece.splits, group)).collect();
    let mut results = B::none_of(journey.rows());
    drop(sent);
    let mut kept = Vec::new();
    for ((piece, _, expert), coming) in journey.places().zip(coming) {
        let Piece { splits, by_expert, counts } = piece;
        let (to, back) = by_expert.tables();
        let [x, p] = B::arrived(coming).try_into().expect("rows and probabilities");
        let (x, p) = (B::sum_rows(x, B::table(&to)), flat::<B>(B::sum_rows(p, B::table(&to))));
        let [first, second] = weights.map(|w| matrices::<B>(w, journey, expert, counts.len()));
        let y = B::sharing(journey.pieces.len() > 1, || {
            let hidden = B::grouped_forward(x.clone(), first, counts);
            let input = B::weighted_swiglu(hidden.clone(), p.clone());
            let y = B::grouped_forward(input.clone(), second, counts);
            kept.push(Kept { x, hidden, p, input: (!recompute).then_some(input) });
            y
        });
        B::join(vec![B::sum_rows(y, B::table(&back))], &splits.reversed(), group, &mut results);
    }
    let [y] = B::joined(results).try_into().expect("results");
    (y, kept)
}

/// Gradients of `x` and `p`; those of the matrices, which are these nodes if they want one, go to their places.
fn backward<B: MoeKernels>(
    grad: FloatTensor<B>,
    kept: Vec<Kept<B>>,
    weights: [&FloatTensor<B>; 2],
    nodes: [Option<Matrices>; 2],
    journey: &Arc<Journey>,
    grads: &mut Gradients,
) -> [FloatTensor<B>; 2] {
    let Journey { group, pieces } = &**journey;
    let sent = [grad];
    let coming: Vec<_> = journey.places().map(|(piece, row, _)| B::start(&sent, row, &piece.splits, group)).collect();
    let mut results = B::none_of(journey.rows());
    drop(sent);
    let [mut of_first, mut of_second] = [Vec::new(), Vec::new()];
    for (((piece, _, expert), coming), kept) in journey.places().zip(coming).zip(kept) {
        let Piece { splits, by_expert, counts } = piece;
        let (to, back) = by_expert.tables();
        let [first, second] = weights.map(|w| matrices::<B>(w, journey, expert, counts.len()));
        let Kept { x, hidden, p, input } = kept;
        let [grad] = B::arrived(coming).try_into().expect("gradients of results");
        let grad = B::sum_rows(grad, B::table(&to));
        let input = input.unwrap_or_else(|| B::weighted_swiglu(hidden.clone(), p.clone()));
        of_second.push((grad.clone(), input));
        let is_last = of_second.len() == pieces.len();
        let [x_grad, p_grad] = B::sharing(pieces.len() > 1, || {
            // In front of the last piece's other gradients: what it needs is then gone before the largest of these are made.
            if is_last {
                weight_grads::<B>(nodes[1], std::mem::take(&mut of_second), journey, grads);
            }
            let grad = B::grouped_input_grad(grad, second, counts);
            let [grad, p_grad] = B::weighted_swiglu_grads(hidden, p, grad);
            of_first.push((grad.clone(), x));
            [B::grouped_input_grad(grad, first, counts), column::<B>(p_grad)]
        });
        let back = [x_grad, p_grad].map(|grad| B::sum_rows(grad, B::table(&back)));
        B::join(back.into(), &splits.reversed(), group, &mut results);
    }
    B::sharing(true, || weight_grads::<B>(nodes[0], of_first, journey, grads));
    B::joined(results).try_into().expect("gradients of rows and probabilities")
}

/// What the way through the experts keeps.
#[derive(Clone, Debug)]
pub(super) struct JourneyKept<B: MoeKernels> {
    pub pieces: Vec<Kept<B>>,
    pub weights: [FloatTensor<B>; 2],
    pub journey: Arc<Journey>,
}

#[derive(Debug)]
pub(super) struct ThroughExperts;

impl<B: MoeKernels> Backward<B, 4> for ThroughExperts {
    type State = JourneyKept<B>;

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let ([x, p, gate_up, down], JourneyKept { pieces, weights, journey }) = (ops.parents, ops.state);
        let matrices = [gate_up, down].map(|node| node.map(|node| Matrices { id: node.id, is_leaf: node.order == 0 }));
        let values = backward::<B>(grad, pieces, weights.each_ref(), matrices, &journey, grads);
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

/// Brings the gradients of a layer's matrices to their place, now or later: of each piece by gradient and input.
fn weight_grads<B: MoeKernels>(
    node: Option<Matrices>,
    of_pieces: Vec<(FloatTensor<B>, FloatTensor<B>)>,
    journey: &Arc<Journey>,
    grads: &mut Gradients,
) {
    let Some(Matrices { id, is_leaf }) = node else { return };
    let journey = journey.clone();
    let job = move |grads: &mut Gradients| {
        let of_pieces = journey.pieces.iter().zip(of_pieces);
        let Some((sum, add)) = place::<B>(id) else {
            let parts = of_pieces.map(|(piece, (grad, x))| B::grouped_weight_grad(grad, x, &piece.counts));
            return grads.register::<B>(id, B::float_cat(parts.collect(), 0));
        };
        let mut start = 0;
        for (Piece { counts, .. }, (grad, x)) in of_pieces {
            let [features, inner] = [grad.shape()[1], x.shape()[1]];
            let rows = start..start + counts.len() * features;
            start = rows.end;
            B::grouped_accumulate_weight_grad(grad, x, counts, &B::rows_in_place(&sum, rows, inner), add);
        }
    };
    if is_leaf { run_or_defer(grads, job) } else { job(grads) }
}

/// The matrices of `count` experts from expert `first` on.
fn matrices<B: MoeKernels>(w: &FloatTensor<B>, journey: &Journey, first: usize, count: usize) -> FloatTensor<B> {
    let [rows, columns] = [w.shape()[0], w.shape()[1]];
    let each = rows / journey.experts();
    B::rows_in_place(w, first * each..(first + count) * each, columns)
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
