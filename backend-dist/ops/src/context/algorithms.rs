//! Forward and backward pass of the algorithms of context parallelism.
//!
//! Every algorithm has the same two steps. An all-to-all inside the `inner` group gives a rank some heads of all
//! positions of its block. Then the keys of the ranks of the `outer` group arrive in a ring or are gathered.

use burn::backend::{TensorMetadata, tensor::FloatTensor};

use super::heads::{by_rank, in_sequence, repeated, repeats, summed, to_heads, to_sequence};
use super::kernels::{ContextKernels, OutputLse, Qkv, SequenceOptions};
use super::online_softmax::{BackwardInputs, OnlineSoftmax, zero_sum};
use super::p2p::{PointToPoint, Ring, received};
use super::plan::{Chunk, Mask, ScoreBlock, blocks, chunks};
use super::sink_softmax::{grad_of_all_sinks, own_sinks, with_sinks};
use super::{ContextParallel, CpCommType, Documents, zigzag};
use crate::dtype::{cast, wide};
use crate::options::AttentionOptions;
use crate::saved_attention::CoreAttention;
use ranks::collective_ops::Collective;
use ranks::comm::Group;

/// Everything about a call but its tensors.
#[derive(Clone, Debug)]
pub(crate) struct ContextOptions {
    pub options: AttentionOptions,
    pub context: Option<ContextParallel>,
    pub documents: Option<Documents>,
}

/// Saved for the backward pass of a call: its tensors after the all-to-all of the inner group.
#[derive(Clone, Debug)]
pub(super) struct Saved<B: ContextKernels> {
    qkv: Qkv<B>,
    out_lse: OutputLse<B>,
}

/// The groups of the all-to-all (inner) and of the ring or all-gather (outer).
struct CommGroups {
    inner: Group,
    outer: Group,
    is_gathered: bool,
}

impl CommGroups {
    fn of(context: Option<&ContextParallel>) -> Self {
        let Some(ContextParallel { group, comm }) = context else {
            return Self { inner: Group::single(), outer: Group::single(), is_gathered: false };
        };
        let (group, inner) = (group.clone(), comm.ranks_of_block(group.size()));
        match *comm {
            CpCommType::P2p => Self { inner: Group::single(), outer: group, is_gathered: false },
            CpCommType::AllGather => Self { inner: Group::single(), outer: group, is_gathered: true },
            CpCommType::A2a => Self { inner: group, outer: Group::single(), is_gathered: false },
            CpCommType::A2aP2p { .. } => {
                let (block, place) = (group.rank() / inner, group.rank() % inner);
                let neighbours: Vec<usize> = (block * inner..(block + 1) * inner).collect();
                let alike: Vec<usize> = (place..group.size()).step_by(inner).collect();
                Self {
                    inner: group.members("block", &neighbours),
                    outer: group.members("blocks", &alike),
                    is_gathered: false,
                }
            }
        }
    }
}

/// A call on the rank's heads.
struct Call {
    sequence: SequenceOptions,
    documents: Option<Documents>,
    outer: Group,
    rows: usize,
    samples: usize,
}

impl Call {
    fn new(q: &impl TensorMetadata, context_options: &ContextOptions, groups: &CommGroups) -> Self {
        let shape = q.shape();
        let [rows, samples, heads] = [shape[0], shape[1], shape[2]];
        let mut options = context_options.options;
        if let Some(dropout) = &mut options.dropout {
            dropout.first_head += groups.inner.rank() * heads;
        }
        let sequence = SequenceOptions { options, positions: rows * groups.outer.size() };
        Self { sequence, documents: context_options.documents.clone(), outer: groups.outer.clone(), rows, samples }
    }

    /// The positions of a rank of the outer group.
    fn chunks(&self, rank: usize) -> Vec<Chunk> {
        chunks(zigzag(rank, self.outer.size(), self.rows))
    }

    fn blocks(&self, keys: &[Chunk]) -> Vec<ScoreBlock> {
        let (mask, joined) = (Mask::of(&self.sequence.options), self.sequence.options.dropout.is_none());
        let queries = self.chunks(self.outer.rank());
        blocks([&queries, keys], mask, self.samples, self.documents.as_ref(), joined)
    }

    fn all_keys(&self) -> Vec<Chunk> {
        chunks([0..self.sequence.positions])
    }
}

/// The output at the rank's positions, and the state saved for backward.
pub(super) fn forward<B: ContextKernels + PointToPoint>(
    qkv: Qkv<B>,
    context_options: &ContextOptions,
    attention: &CoreAttention,
) -> (FloatTensor<B>, Saved<B>) {
    forward_with::<B>(qkv, None, context_options, attention)
}

/// The same with the sinks of all query heads, if there are any.
pub(super) fn forward_with<B: ContextKernels + PointToPoint>(
    [q, k, v]: Qkv<B>,
    sinks: Option<&FloatTensor<B>>,
    context_options: &ContextOptions,
    attention: &CoreAttention,
) -> (FloatTensor<B>, Saved<B>) {
    let groups = CommGroups::of(context_options.context.as_ref());
    let qkv = match groups.inner.size() {
        1 => [q, k, v],
        ranks => {
            let times = repeats(k.shape()[2], ranks);
            [q, repeated::<B>(k, times), repeated::<B>(v, times)].map(|x| to_sequence::<B>(x, &groups.inner))
        }
    };
    let call = Call::new(&qkv[0], context_options, &groups);
    let out_lse = attention.run(|| {
        let of_keys = match (groups.outer.size(), groups.is_gathered) {
            (1, _) => local::<B>(&qkv, &call),
            (_, true) => gathered::<B>(&qkv, &call),
            (_, false) => ring::<B>(&qkv, &call),
        };
        match sinks {
            Some(sinks) => with_sinks::<B>(of_keys, own_sinks::<B>(sinks, &groups.inner)),
            None => of_keys,
        }
    });
    let out = match groups.inner.size() {
        1 => out_lse[0].clone(),
        _ => to_heads::<B>(out_lse[0].clone(), &groups.inner),
    };
    (out, Saved { qkv, out_lse })
}

/// Gradients of q, k and v; `kv_heads` are those of the rank's keys.
pub(super) fn backward<B: ContextKernels + PointToPoint>(
    saved: Saved<B>,
    grad: FloatTensor<B>,
    kv_heads: usize,
    context_options: &ContextOptions,
) -> Qkv<B> {
    backward_with::<B>(saved, grad, kv_heads, None, context_options).0
}

/// The same, and the gradient of the sinks if there are any.
pub(super) fn backward_with<B: ContextKernels + PointToPoint>(
    saved: Saved<B>,
    grad: FloatTensor<B>,
    kv_heads: usize,
    sinks: Option<FloatTensor<B>>,
    context_options: &ContextOptions,
) -> (Qkv<B>, Option<FloatTensor<B>>) {
    let (groups, dtype) = (CommGroups::of(context_options.context.as_ref()), saved.qkv[0].dtype());
    let grad = match groups.inner.size() {
        1 => grad,
        _ => to_sequence::<B>(grad, &groups.inner),
    };
    let of_sinks = sinks.map(|sinks| grad_of_all_sinks::<B>(&saved.out_lse, &grad, sinks, &groups.inner));
    let Saved { qkv, out_lse } = saved;
    let call = Call::new(&qkv[0], context_options, &groups);
    let inputs = BackwardInputs { out_lse: &out_lse, grad: &grad, sequence: &call.sequence };
    let sums = match (groups.outer.size(), groups.is_gathered) {
        (1, _) => inputs.add(qkv.each_ref().map(zero_sum::<B>), &qkv, &call.blocks(&call.all_keys())),
        (_, true) => gathered_grads::<B>(&qkv, &inputs, &call),
        (_, false) => ring_grads::<B>(&qkv, &inputs, &call),
    };
    let [dq, dk, dv] = match groups.inner.size() {
        1 => sums,
        ranks => {
            let times = repeats(kv_heads, ranks);
            // Repetitions of a head are summed before rounding; a single one may be rounded before it is sent.
            let on_wire = if times == 1 { dtype } else { wide(dtype) };
            let [dq, dk, dv] = sums;
            let back = |x, dtype| to_heads::<B>(cast::<B>(x, dtype), &groups.inner);
            [back(dq, dtype), summed::<B>(back(dk, on_wire), times), summed::<B>(back(dv, on_wire), times)]
        }
    };
    ([dq, dk, dv].map(|x| cast::<B>(x, dtype)), of_sinks)
}

fn local<B: ContextKernels>(qkv: &Qkv<B>, call: &Call) -> OutputLse<B> {
    let mut softmax = OnlineSoftmax::<B>::new(qkv);
    softmax.add(qkv, &call.blocks(&call.all_keys()), &call.sequence);
    softmax.finish(&qkv[0])
}

/// Keys and values of all ranks, in sequence order.
fn gather<B: ContextKernels>(kv: [FloatTensor<B>; 2], group: &Group) -> [FloatTensor<B>; 2] {
    kv.map(|x| in_sequence::<B>(B::collective(x, Collective::AllGather(0), None, group.clone()), group.size()))
}

fn gathered<B: ContextKernels>([q, k, v]: &Qkv<B>, call: &Call) -> OutputLse<B> {
    let [k, v] = gather::<B>([k.clone(), v.clone()], &call.outer);
    let qkv = [q.clone(), k, v];
    let mut softmax = OnlineSoftmax::<B>::new(&qkv);
    softmax.add(&qkv, &call.blocks(&call.all_keys()), &call.sequence);
    softmax.finish(q)
}

fn gathered_grads<B: ContextKernels>([q, k, v]: &Qkv<B>, inputs: &BackwardInputs<B>, call: &Call) -> Qkv<B> {
    let [k, v] = gather::<B>([k.clone(), v.clone()], &call.outer);
    let qkv = [q.clone(), k, v];
    let sums = qkv.each_ref().map(zero_sum::<B>);
    let [dq, dk, dv] = inputs.add(sums, &qkv, &call.blocks(&call.all_keys()));
    let home = |x| {
        let x = by_rank::<B>(x, call.outer.size());
        B::collective(x, Collective::ReduceScatter(0), None, call.outer.clone())
    };
    [dq, home(dk), home(dv)]
}

/// Ring attention: while the present keys and values are used, the next ones are received.
fn ring<B: ContextKernels + PointToPoint>(qkv: &Qkv<B>, call: &Call) -> OutputLse<B> {
    let [q, k, v] = qkv.clone();
    let (ring, dtype) = (Ring::new::<B>(&call.outer, &q), k.dtype());
    let mut softmax = OnlineSoftmax::<B>::new(qkv);
    let mut kv = [k, v];
    for step in 0..call.outer.size() {
        let next = (step + 1 < call.outer.size()).then(|| {
            ring.send::<B>(&kv);
            ring.receive::<B>(&kv, dtype)
        });
        let [k, v] = kv.clone();
        softmax.add(&[q.clone(), k, v], &call.blocks(&call.chunks(ring.holder(step))), &call.sequence);
        if let Some(next) = next {
            kv = received::<B>(next);
        }
    }
    softmax.finish(&q)
}

/// The same ring for the backward pass. The gradients of keys and values follow them; each rank adds its contribution,
/// and after the last step they are back at their rank. At step `i` a rank first sends keys and values, then the sums
/// of their gradients, and receives in the same order.
fn ring_grads<B: ContextKernels + PointToPoint>(qkv: &Qkv<B>, inputs: &BackwardInputs<B>, call: &Call) -> Qkv<B> {
    let [q, k, v] = qkv.clone();
    let (ring, dtype) = (Ring::new::<B>(&call.outer, &q), k.dtype());
    let mut kv = [k, v];
    let mut dq = zero_sum::<B>(&q);
    for step in 0..call.outer.size() {
        let sums = (step > 0).then(|| ring.receive::<B>(&kv, wide(dtype)));
        let next = (step + 1 < call.outer.size()).then(|| {
            ring.send::<B>(&kv);
            ring.receive::<B>(&kv, dtype)
        });
        let [k, v] = kv.clone();
        let local_sum = [dq, zero_sum::<B>(&k), zero_sum::<B>(&v)];
        let keys = call.chunks(ring.holder(step));
        let [dq_now, dk, dv] = inputs.add(local_sum, &[q.clone(), k, v], &call.blocks(&keys));
        dq = dq_now;
        let local_sum = match sums.map(received::<B>) {
            Some([sum_k, sum_v]) => [B::float_add(sum_k, dk), B::float_add(sum_v, dv)],
            None => [dk, dv],
        };
        ring.send::<B>(&local_sum);
        if let Some(next) = next {
            kv = received::<B>(next);
        }
    }
    let [dk, dv] = received::<B>(ring.receive::<B>(&kv, wide(dtype)));
    [dq, dk, dv]
}
