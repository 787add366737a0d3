//! Forward and backward pass of each mechanism.
//!
//! Every mechanism is the same two steps: inside `inner` heads and sequence are exchanged, so that a rank has some
//! heads of all positions of its block; then the keys of the ranks of `outer` come round a ring or are gathered.

use burn::backend::{TensorMetadata, tensor::FloatTensor};

use super::heads::{by_rank, in_sequence, repeated, repeats, summed, to_heads, to_sequence};
use super::kernels::{ContextKernels, Qkv, Seen, Whole, cast, wide};
use super::neighbours::{Neighbours, Ring, arrived};
use super::partial::{Partial, Slope, empty_sum};
use super::plan::{Chunk, Piece, Sight, chunks, pieces};
use super::{ContextParallel, CpCommType, Documents, zigzag};
use crate::comm::Group;
use crate::exchange::Exchange;
use crate::ops::attended::attended;
use crate::ops::options::AttentionOptions;

/// Everything about a call that is no tensor.
#[derive(Clone, Debug)]
pub(in crate::ops) struct How {
    pub options: AttentionOptions,
    pub context: Option<ContextParallel>,
    pub documents: Option<Documents>,
}

/// What a call keeps for its backward pass: its tensors as the rank computes with them, heads exchanged.
#[derive(Clone, Debug)]
pub(super) struct Kept<B: ContextKernels> {
    qkv: Qkv<B>,
    seen: Seen<B>,
}

/// Who exchanges what.
struct Ways {
    inner: Group,
    outer: Group,
    is_gathered: bool,
}

impl Ways {
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
    whole: Whole,
    documents: Option<Documents>,
    outer: Group,
    rows: usize,
    samples: usize,
}

impl Call {
    fn new(q: &impl TensorMetadata, how: &How, ways: &Ways) -> Self {
        let shape = q.shape();
        let [rows, samples, heads] = [shape[0], shape[1], shape[2]];
        let mut options = how.options;
        if let Some(dropout) = &mut options.dropout {
            dropout.first_head += ways.inner.rank() * heads;
        }
        let whole = Whole { options, positions: rows * ways.outer.size() };
        Self { whole, documents: how.documents.clone(), outer: ways.outer.clone(), rows, samples }
    }

    /// What a rank of the outer group has.
    fn chunks(&self, rank: usize) -> Vec<Chunk> {
        chunks(zigzag(rank, self.outer.size(), self.rows))
    }

    fn pieces(&self, keys: &[Chunk]) -> Vec<Piece> {
        let (sight, joined) = (Sight::of(&self.whole.options), self.whole.options.dropout.is_none());
        let queries = self.chunks(self.outer.rank());
        pieces([&queries, keys], sight, self.samples, self.documents.as_ref(), joined)
    }

    fn all_keys(&self) -> Vec<Chunk> {
        chunks([0..self.whole.positions])
    }
}

/// Output of the rank's rows, and what the backward pass needs.
pub(super) fn forward<B: ContextKernels + Neighbours>([q, k, v]: Qkv<B>, how: &How) -> (FloatTensor<B>, Kept<B>) {
    let ways = Ways::of(how.context.as_ref());
    let qkv = match ways.inner.size() {
        1 => [q, k, v],
        ranks => {
            let times = repeats(k.shape()[2], ranks);
            [q, repeated::<B>(k, times), repeated::<B>(v, times)].map(|x| to_sequence::<B>(x, &ways.inner))
        }
    };
    let call = Call::new(&qkv[0], how, &ways);
    let seen = attended(|| match (ways.outer.size(), ways.is_gathered) {
        (1, _) => local::<B>(&qkv, &call),
        (_, true) => gathered::<B>(&qkv, &call),
        (_, false) => ring::<B>(&qkv, &call),
    });
    let out = match ways.inner.size() {
        1 => seen[0].clone(),
        _ => to_heads::<B>(seen[0].clone(), &ways.inner),
    };
    (out, Kept { qkv, seen })
}

/// Gradients of q, k and v; `kv_heads` are those of the rank's keys.
pub(super) fn backward<B: ContextKernels + Neighbours>(
    Kept { qkv, seen }: Kept<B>,
    grad: FloatTensor<B>,
    kv_heads: usize,
    how: &How,
) -> Qkv<B> {
    let (ways, dtype) = (Ways::of(how.context.as_ref()), qkv[0].dtype());
    let grad = match ways.inner.size() {
        1 => grad,
        _ => to_sequence::<B>(grad, &ways.inner),
    };
    let call = Call::new(&qkv[0], how, &ways);
    let slope = Slope { seen: &seen, grad: &grad, whole: &call.whole };
    let sums = match (ways.outer.size(), ways.is_gathered) {
        (1, _) => slope.add(qkv.each_ref().map(empty_sum::<B>), &qkv, &call.pieces(&call.all_keys())),
        (_, true) => gathered_grads::<B>(&qkv, &slope, &call),
        (_, false) => ring_grads::<B>(&qkv, &slope, &call),
    };
    let [dq, dk, dv] = match ways.inner.size() {
        1 => sums,
        ranks => {
            let times = repeats(kv_heads, ranks);
            // Copies of a head are summed as they are; a single one may be rounded before it is sent.
            let on_wire = if times == 1 { dtype } else { wide(dtype) };
            let [dq, dk, dv] = sums;
            let back = |x, dtype| to_heads::<B>(cast::<B>(x, dtype), &ways.inner);
            [back(dq, dtype), summed::<B>(back(dk, on_wire), times), summed::<B>(back(dv, on_wire), times)]
        }
    };
    [dq, dk, dv].map(|x| cast::<B>(x, dtype))
}

fn local<B: ContextKernels>(qkv: &Qkv<B>, call: &Call) -> Seen<B> {
    let mut partial = Partial::<B>::new(qkv);
    partial.add(qkv, &call.pieces(&call.all_keys()), &call.whole);
    partial.finish(&qkv[0])
}

/// Keys and values of all ranks, in the order of their positions.
fn gather<B: ContextKernels>(kv: [FloatTensor<B>; 2], group: &Group) -> [FloatTensor<B>; 2] {
    kv.map(|x| in_sequence::<B>(B::exchange(x, Exchange::AllGather(0), None, group.clone()), group.size()))
}

fn gathered<B: ContextKernels>([q, k, v]: &Qkv<B>, call: &Call) -> Seen<B> {
    let [k, v] = gather::<B>([k.clone(), v.clone()], &call.outer);
    let qkv = [q.clone(), k, v];
    let mut partial = Partial::<B>::new(&qkv);
    partial.add(&qkv, &call.pieces(&call.all_keys()), &call.whole);
    partial.finish(q)
}

fn gathered_grads<B: ContextKernels>([q, k, v]: &Qkv<B>, slope: &Slope<B>, call: &Call) -> Qkv<B> {
    let [k, v] = gather::<B>([k.clone(), v.clone()], &call.outer);
    let qkv = [q.clone(), k, v];
    let sums = qkv.each_ref().map(empty_sum::<B>);
    let [dq, dk, dv] = slope.add(sums, &qkv, &call.pieces(&call.all_keys()));
    let home = |x| {
        let x = by_rank::<B>(x, call.outer.size());
        B::exchange(x, Exchange::ReduceScatter(0), None, call.outer.clone())
    };
    [dq, home(dk), home(dv)]
}

/// Keys and values go round the ring: while those at hand are computed with, the next ones come.
fn ring<B: ContextKernels + Neighbours>(qkv: &Qkv<B>, call: &Call) -> Seen<B> {
    let [q, k, v] = qkv.clone();
    let (ring, dtype) = (Ring::new::<B>(&call.outer, &q), k.dtype());
    let mut partial = Partial::<B>::new(qkv);
    let mut kv = [k, v];
    for step in 0..call.outer.size() {
        let next = (step + 1 < call.outer.size()).then(|| {
            ring.send::<B>(&kv);
            ring.expect::<B>(&kv, dtype)
        });
        let [k, v] = kv.clone();
        partial.add(&[q.clone(), k, v], &call.pieces(&call.chunks(ring.holder(step))), &call.whole);
        if let Some(next) = next {
            kv = arrived::<B>(next);
        }
    }
    partial.finish(&q)
}

/// The same round again, and behind the keys and values their gradients, to which each rank adds its own; at last they
/// are at home. A rank sends at step `i` first keys and values, then the sums of their gradients, and receives in the
/// same order.
fn ring_grads<B: ContextKernels + Neighbours>(qkv: &Qkv<B>, slope: &Slope<B>, call: &Call) -> Qkv<B> {
    let [q, k, v] = qkv.clone();
    let (ring, dtype) = (Ring::new::<B>(&call.outer, &q), k.dtype());
    let mut kv = [k, v];
    let mut dq = empty_sum::<B>(&q);
    for step in 0..call.outer.size() {
        let sums = (step > 0).then(|| ring.expect::<B>(&kv, wide(dtype)));
        let next = (step + 1 < call.outer.size()).then(|| {
            ring.send::<B>(&kv);
            ring.expect::<B>(&kv, dtype)
        });
        let [k, v] = kv.clone();
        let own = [dq, empty_sum::<B>(&k), empty_sum::<B>(&v)];
        let keys = call.chunks(ring.holder(step));
        let [dq_now, dk, dv] = slope.add(own, &[q.clone(), k, v], &call.pieces(&keys));
        dq = dq_now;
        let own = match sums.map(arrived::<B>) {
            Some([sum_k, sum_v]) => [B::float_add(sum_k, dk), B::float_add(sum_v, dv)],
            None => [dk, dv],
        };
        ring.send::<B>(&own);
        if let Some(next) = next {
            kv = arrived::<B>(next);
        }
    }
    let [dk, dv] = arrived::<B>(ring.expect::<B>(&kv, wide(dtype)));
    [dq, dk, dv]
}
