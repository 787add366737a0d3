//! Expert dispatch pipeline: tokens to the ranks of their experts, through the experts and back, as one autograd node.
//! Permuting tokens before and after it are separate nodes, so that the tokens can be permuted before the host knows
//! their destinations.
//!
//! The experts of every rank are split into chunks. Forward, the tokens of the second chunk are received while the
//! first chunk's experts compute, and the outputs of the first chunk are sent back while the second chunk's experts
//! compute. Backward is the same; the weight gradients of the first layer, which nothing waits for, follow when the
//! last input gradients are in transfer: Megatron-LM's `--overlap-moe-expert-parallel-comm` with
//! `--delay-wgrad-compute`, within one micro-batch. An expert is in one chunk, so its GEMMs, gradients and FP8 scales
//! do not depend on the chunks.

use crate::Kernels;
use std::sync::Arc;

use burn::backend::{
    Shape, TensorMetadata,
    autodiff::{NodeId, grads::Gradients, ops::Ops},
    tensor::FloatTensor,
};

use super::activation::ExpertActivation;
use super::expert_gemms::{ExpertGemms, ExpertRange, Plain};
use super::kernels::MoeKernels;
use super::row_map::RowMap;
use crate::fp8::{Fp8Experts, Purpose};
use crate::operation::{Parents, Tracked, operation};
use crate::{main_grads::main_grad, pass::PassContext, weight_grads::Deferral};
use ranks::comm::{Group, Splits};

/// The dispatch of tokens through the experts of all members of a group.
#[derive(Clone, Debug)]
pub struct ExpertPipeline {
    /// The ranks that hold the experts.
    pub group: Group,
    /// The chunks of this rank's experts, in the order of the experts. Tokens of the first are sent first.
    pub chunks: Vec<ExpertChunk>,
    /// What they compute between their layers.
    pub act: ExpertActivation,
    /// Both layers of the rank's experts, if their GEMMs run in FP8.
    pub fp8: Option<[Fp8Experts; 2]>,
    /// The pass that the tokens are of.
    pub pass: PassContext,
}

/// Some of a rank's experts, and the tokens of every rank for them.
#[derive(Clone, Debug)]
pub struct ExpertChunk {
    /// Token counts of the all-to-all.
    pub splits: Splits,
    /// From received tokens to tokens sorted by expert.
    pub by_expert: RowMap,
    /// Number of experts.
    pub experts: usize,
    /// Tokens of each; in FP8, tokens of each of its groups, as many groups for each expert.
    pub counts: Arc<[usize]>,
}

impl ExpertPipeline {
    /// Number of experts of this rank.
    pub(super) fn experts(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.experts).sum()
    }

    /// Tokens that this rank sends, and receives back.
    pub(super) fn rows(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.splits.sent()).sum()
    }

    /// Each chunk with the offset of its first token among those that are sent, and its experts, whose GEMMs share the SMs
    /// or not.
    fn chunks_with_ranges(&self, shares_sms: bool) -> impl Iterator<Item = (&ExpertChunk, usize, ExpertRange)> {
        let total = self.experts();
        self.chunks.iter().scan((0, 0), move |(row, expert), chunk| {
            let (experts, counts) = (*expert..*expert + chunk.experts, chunk.counts.clone());
            let range = ExpertRange { experts, total, counts, shares_sms };
            let item = (chunk, *row, range);
            *row += chunk.splits.sent();
            *expert += chunk.experts;
            Some(item)
        })
    }
}

/// Saved by a chunk for backward.
#[derive(Clone, Debug)]
pub(super) struct SavedChunk<B: MoeKernels, P: ExpertGemms<B>> {
    /// Of the tokens sorted by expert.
    x: P::Input,
    /// The first layer's output.
    hidden: FloatTensor<B>,
    /// The probability of each token.
    p: FloatTensor<B>,
    /// Of the second layer's input.
    input: P::Input,
}

/// The experts' outputs for `x [tokens, hidden]` with `p [tokens, 1]` and the weights of both layers.
fn forward<B: MoeKernels, P: ExpertGemms<B>>(
    x: FloatTensor<B>,
    p: FloatTensor<B>,
    layers: &[P; 2],
    weights: [&FloatTensor<B>; 2],
    pipeline: &ExpertPipeline,
    purposes: [Purpose; 2],
) -> (FloatTensor<B>, Vec<SavedChunk<B, P>>) {
    let ([first, second], group, sent) = (layers, &pipeline.group, [x, p]);
    let shared = pipeline.chunks.len() > 1 && B::uses_sms(&sent[0], group);
    let ranges = || pipeline.chunks_with_ranges(shared);
    let pending: Vec<_> = ranges().map(|(chunk, row, _)| B::start(&sent, row, &chunk.splits, group)).collect();
    let mut results = B::empty(pipeline.rows());
    drop(sent);
    let matrices = [first.matrices(weights[0]), second.matrices(weights[1])];
    let mut saved = Vec::new();
    for ((chunk, _, range), pending) in ranges().zip(pending) {
        let (to, back) = chunk.by_expert.tables();
        let [x, p] = B::received(pending).try_into().expect("tokens and probabilities");
        let (x, p) = (B::sum_rows(x, B::table(&to)), flat::<B>(B::sum_rows(p, B::table(&to))));
        let (hidden, x) = first.forward(&matrices[0], x, &range, purposes[0]);
        let input = pipeline.act.weighted::<B>(hidden.clone(), p.clone());
        let (y, input) = second.forward(&matrices[1], input, &range, purposes[1]);
        saved.push(SavedChunk { x, hidden, p, input });
        B::append(vec![B::sum_rows(y, B::table(&back))], &chunk.splits.reversed(), group, &mut results);
    }
    let [y] = B::concat(results).try_into().expect("outputs");
    (y, saved)
}

/// Gradients of `x` and `p`. Those of the weights, given by `nodes` if needed, are delivered.
fn backward<B: MoeKernels, P: ExpertGemms<B>>(
    grad: FloatTensor<B>,
    saved: Vec<SavedChunk<B, P>>,
    layers: &[P; 2],
    weights: [&FloatTensor<B>; 2],
    [first_node, mut second_node]: [Option<Matrices>; 2],
    pipeline: &Arc<ExpertPipeline>,
    grads: &mut Gradients,
) -> [FloatTensor<B>; 2] {
    let ([first, second], ExpertPipeline { group, chunks, act, .. }, sent) = (layers, &**pipeline, [grad]);
    let uses_sms = B::uses_sms(&sent[0], group);
    let shared = uses_sms && chunks.len() > 1;
    let ranges = || pipeline.chunks_with_ranges(shared);
    let pending: Vec<_> = ranges().map(|(chunk, row, _)| B::start(&sent, row, &chunk.splits, group)).collect();
    let mut results = B::empty(pipeline.rows());
    let wanted = [first_node.is_some(), second_node.is_some()];
    drop(sent);
    let matrices = [first.transposed(weights[0], &saved[0].x), second.transposed(weights[1], &saved[0].input)];
    let [mut of_first, mut of_second] = [Vec::new(), Vec::new()];
    for (((chunk, _, range), pending), saved) in ranges().zip(pending).zip(saved) {
        let (to, back) = chunk.by_expert.tables();
        let SavedChunk { x, hidden, p, input } = saved;
        let [grad] = B::received(pending).try_into().expect("output gradients");
        let grad = B::sum_rows(grad, B::table(&to));
        let recompute = || act.weighted::<B>(hidden.clone(), p.clone());
        let (grad, pair) = second.gradient(grad, input, recompute, &range, wanted[1]);
        of_second.push(pair);
        let is_last = of_second.len() == chunks.len();
        // Before the last chunk's other gradients: this frees its operands before the largest gradients are allocated.
        if is_last {
            weight_grads::<B, P>(second_node.take(), std::mem::take(&mut of_second), (pipeline, shared), grads);
        }
        let [grad, p_grad] = act.weighted_grads::<B>(hidden, p, second.input_grad(grad, &matrices[1], &range));
        let (grad, pair) = first.gradient(grad, x, || panic!("tokens of experts are saved"), &range, wanted[0]);
        of_first.push(pair);
        let back = [first.input_grad(grad, &matrices[0], &range), column::<B>(p_grad)]
            .map(|grad| B::sum_rows(grad, B::table(&back)));
        B::append(back.into(), &chunk.splits.reversed(), group, &mut results);
    }
    weight_grads::<B, P>(first_node, of_first, (pipeline, uses_sms), grads);
    B::concat(results).try_into().expect("gradients of tokens and probabilities")
}

/// Saved by the pipeline for backward.
#[derive(Clone, Debug)]
pub(super) struct SavedPipeline<B: MoeKernels, P: ExpertGemms<B>> {
    chunks: Vec<SavedChunk<B, P>>,
    layers: [P; 2],
    weights: [FloatTensor<B>; 2],
    pipeline: Arc<ExpertPipeline>,
}

/// With GEMMs in the type of the weights, or in FP8.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "one for each expert layer of a micro-batch, moved a few times")]
pub(super) enum Saved<B: Kernels> {
    Plain(SavedPipeline<B, Plain>),
    Fp8(SavedPipeline<B, Fp8Experts>),
}

operation! {
    /// Of tokens, probabilities, and the weights of both layers.
    pub(super) ThroughExperts { pipeline: Arc<ExpertPipeline>, recompute: bool }, 4, Saved<B>,
    |inputs, _, tracked| {
        match pipeline.fp8.clone() {
            None => {
                let (y, saved) = run::<B, _>(inputs, [Plain; 2], pipeline, recompute, tracked);
                (y, Some(Saved::Plain(saved)))
            }
            Some(layers) => {
                let (y, saved) = run::<B, Fp8Experts>(inputs, layers, pipeline, recompute, tracked);
                (y, Some(Saved::Fp8(saved)))
            }
        }
    },
    |saved, grad, parents| match saved {
        Saved::Plain(saved) => saved.backward(grad, parents),
        Saved::Fp8(saved) => saved.backward(grad, parents),
    },
}

fn run<B: MoeKernels, P: ExpertGemms<B>>(
    [x, p, gate_up, down]: [FloatTensor<B>; 4],
    layers: [P; 2],
    pipeline: Arc<ExpertPipeline>,
    recompute: bool,
    tracked: Tracked<4>,
) -> (FloatTensor<B>, SavedPipeline<B, P>) {
    let purpose = |keep| if tracked.any() { Purpose::Train { keep } } else { Purpose::Evaluate };
    let purposes = [purpose(tracked.0[2]), purpose(tracked.0[3] && !recompute)];
    let (y, chunks) = forward::<B, P>(x, p, &layers, [&gate_up, &down], &pipeline, purposes);
    (y, SavedPipeline { chunks, layers, weights: [gate_up, down], pipeline })
}

impl<B: MoeKernels, P: ExpertGemms<B>> SavedPipeline<B, P> {
    fn backward(self, grad: FloatTensor<B>, parents: Parents<'_, 4>) {
        let Parents { ops: Ops { parents: [x, p, gate_up, down], .. }, grads } = parents;
        let Self { chunks, layers, weights, pipeline } = self;
        let matrices = [gate_up, down]
            .map(|node| node.map(|node| Matrices { id: node.id, deferral: pipeline.pass.weight_grads.of(node.order) }));
        let values = backward::<B, P>(grad, chunks, &layers, weights.each_ref(), matrices, &pipeline, grads);
        for (node, value) in [x, p].into_iter().zip(values) {
            if let Some(node) = node {
                grads.register::<B>(node.id, value);
            }
        }
    }
}

/// The node of a layer's weights.
#[derive(Clone, Debug)]
struct Matrices {
    id: NodeId,
    /// As [`Weight::deferral`](crate::tensor_parallel::gemm::Weight::deferral).
    deferral: Deferral,
}

/// Delivers the gradients of a layer's weights, now, next to collectives that take SMs or not, or deferred, from the operands
/// of each chunk.
fn weight_grads<B: MoeKernels, P: ExpertGemms<B>>(
    node: Option<Matrices>,
    of_chunks: Vec<Option<P::Pair>>,
    (pipeline, uses_sms): (&Arc<ExpertPipeline>, bool),
    grads: &mut Gradients,
) {
    let Some(Matrices { id, deferral }) = node else { return };
    // Later the collectives have ended.
    let (pipeline, shared) = (pipeline.clone(), uses_sms && !deferral.is_deferring());
    deferral.run(grads, move |grads| {
        let of_chunks = pipeline.chunks_with_ranges(shared).zip(of_chunks.into_iter().flatten());
        let Some((sum, add)) = main_grad::<B>(id) else {
            let grads_of_chunks = of_chunks.map(|((_, _, range), pair)| P::weight_grad(pair, &range));
            return grads.register::<B>(id, B::float_cat(grads_of_chunks.collect(), 0));
        };
        let each = sum.shape().num_elements() / pipeline.experts();
        for ((_, _, range), pair) in of_chunks {
            let experts = B::rows_in_place(&sum, range.experts.clone(), each);
            P::accumulate_weight_grad(pair, &range, &experts, add);
        }
    });
}

/// `[n, 1]` as `[n]`.
fn flat<B: MoeKernels>(x: FloatTensor<B>) -> FloatTensor<B> {
    let rows = x.shape()[0];
    B::float_reshape(x, Shape::from([rows]))
}

/// `[n]` as `[n, 1]`.
fn column<B: MoeKernels>(x: FloatTensor<B>) -> FloatTensor<B> {
    let rows = x.shape()[0];
    B::float_reshape(x, Shape::from([rows, 1]))
}
