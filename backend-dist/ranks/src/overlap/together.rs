//! Several collectives as one NCCL operation, so that small tensors share the latency of one kernel.

use super::{InFlight, Pending};
use crate::comm::{Collective, DeviceOp, DeviceOpKind, Group, ReduceOp};
use crate::in_place::is_in_place_or_apart;
use crate::nccl::{
    Communicator, collective_operation, connect, data_type, elements, finished, gpu_of, grouped, reduction, scaled,
};
use burn::backend::{Cube, ops::FloatTensorOps};
use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys::ncclRedOp_t;
use gpu::cuda::{PinnedBuffer, dense, empty};
use gpu::profile;

/// Whether the GPUs of the members of `group` are connected.
pub fn is_connected(group: &Group) -> bool {
    group.existing_link::<Communicator>().is_some()
}

struct Part {
    kind: DeviceOpKind,
    source: CubeTensor,
    /// The source where this member receives in place, or nothing.
    target: CubeTensor,
    /// The dimension that is first in both.
    first: usize,
}

impl Part {
    fn new(source: CubeTensor, what: Collective, group: &Group) -> Self {
        let first = match what {
            Collective::AllGather(dim) | Collective::ReduceScatter(dim) => dim,
            _ => 0,
        };
        let source = dense(swapped(source, first));
        let (kind, shape) = match what {
            Collective::AllReduce(op) => (DeviceOpKind::AllReduce(op), Some(source.meta.shape().clone())),
            Collective::AllGather(dim) => (DeviceOpKind::AllGather(dim), Some(scaled(&source, |n| n * group.size()))),
            Collective::ReduceScatter(dim) => {
                let rows = source.meta.shape()[0];
                assert!(
                    rows.is_multiple_of(group.size()),
                    "reduce-scatter on {group:?}: {rows} elements along dimension {dim}; legal: a multiple of {}",
                    group.size()
                );
                (DeviceOpKind::ReduceScatter(dim), Some(scaled(&source, |n| n / group.size())))
            }
            Collective::Reduce(root) => {
                let shape = (root == group.rank()).then(|| source.meta.shape().clone());
                (DeviceOpKind::Reduce(root), shape)
            }
            Collective::Broadcast(root) => (DeviceOpKind::Broadcast(root), None),
            other => panic!(
                "{other:?} that is not waited for; legal: all-reduce, all-gather, reduce-scatter, reduce, broadcast"
            ),
        };
        let target = shape.map_or_else(|| source.clone(), |shape| empty(&source, shape, source.dtype));
        Self { kind, source, target, first }
    }

    fn op(&self) -> DeviceOp {
        DeviceOp::new(self.kind.clone(), self.source.dtype, self.source.meta.shape())
    }

    fn bytes(&self) -> [usize; 2] {
        self.buffers().map(|x| elements(x) * x.dtype.size())
    }

    fn buffers(&self) -> [&CubeTensor; 2] {
        [&self.source, &self.target]
    }
}

/// The tensor with another dimension first.
fn swapped(x: CubeTensor, first: usize) -> CubeTensor {
    if first == 0 { x } else { Cube::float_swap_dims(x, 0, first) }
}

/// Begins all-reduces, all-gathers, reduce-scatters, reductions and broadcasts; with `mean`, sums are divided by the number of members. Returns what the
/// members get: of a broadcast the tensor itself, which is written unless this member has it; of another member's
/// reduction the tensor as it is.
///
/// # Panics
/// If there is nothing, or another collective, or unless [`is_connected`].
pub fn begin(parts: Vec<(CubeTensor, Collective)>, mean: bool, group: &Group) -> (Vec<CubeTensor>, Pending) {
    let rank = group.rank();
    let parts: Vec<Part> = parts.into_iter().map(|(source, what)| Part::new(source, what, group)).collect();
    let near = parts[0].source.clone();
    let link = connect(group, gpu_of(&near.device))
        .unwrap_or_else(|| panic!("{group:?} has members that share a GPU or have none: ask `is_connected` first"));
    let noted = profile::operation(&near, || {
        let (bytes, suffix) =
            (parts.iter().map(|part| part.bytes()[0]).sum(), format!(", {} together, overlapped", parts.len()));
        collective_operation(&parts[0].op(), bytes, group.size(), &suffix)
    });
    let sequences: Vec<u64> = parts.iter().map(|part| group.issue(part.op())).collect();
    let last = parts.len() - 1;
    let (issued, slot) = ((sequences[last], parts[last].op()), link.events.take());
    let tensors: Vec<&CubeTensor> = parts.iter().flat_map(Part::buffers).collect();
    let held = tensors.iter().map(|&x| PinnedBuffer::new(x.clone())).collect();
    let call_of = |part: &Part| {
        // Of what one member sends, or of what it receives where it sends something to each.
        let count = part.buffers().map(elements).into_iter().min().unwrap_or_default();
        (part.kind.clone(), count, data_type(part.source.dtype), part.bytes())
    };
    let calls: Vec<_> = parts.iter().map(call_of).collect();
    link.queue_all(issued, &tensors, move |call, pointers| {
        let pairs: Vec<_> = pointers.chunks(2).map(|pair| (pair[0], pair[1])).zip(calls).collect();
        for &((from, to), (.., bytes)) in &pairs {
            let [source, target] = [(from as usize, bytes[0]), (to as usize, bytes[1])];
            if !is_in_place_or_apart(source, target, rank) {
                return Err(format!("source and target overlap: {source:?} and {target:?} bytes"));
            }
        }
        call.follow()?;
        let (comm, stream) = call.target();
        let reduction = |op| if mean && op == ReduceOp::Sum { ncclRedOp_t::ncclAvg } else { reduction(op) };
        finished(grouped(|| {
            pairs.into_iter().try_for_each(|((from, to), (kind, count, data_type, _))| {
                // SAFETY: the buffers hold `count` elements, or that for each member, and are one or apart, which NCCL
                // allows.
                unsafe {
                    match kind {
                        DeviceOpKind::AllReduce(op) => {
                            nccl::all_reduce(from, to, count, data_type, reduction(op), comm, stream)
                        }
                        DeviceOpKind::AllGather(_) => nccl::all_gather(from, to, count, data_type, comm, stream),
                        DeviceOpKind::ReduceScatter(_) => {
                            nccl::reduce_scatter(from, to, count, data_type, reduction(ReduceOp::Sum), comm, stream)
                        }
                        DeviceOpKind::Reduce(root) => {
                            let op = reduction(ReduceOp::Sum);
                            nccl::reduce(from, to, count, data_type, op, root as i32, comm, stream)
                        }
                        DeviceOpKind::Broadcast(root) => {
                            nccl::broadcast(from, to, count, data_type, root as i32, comm, stream)
                        }
                        other => unreachable!("{other:?} is no part"),
                    }
                }
                .map(|_| ())
            })
        }))?;
        call.record(slot)
    });
    drop(noted);
    let targets = parts.into_iter().map(|part| swapped(part.target, part.first)).collect();
    (targets, Pending { in_flight: Some(InFlight { link, slot, buffers: held }) })
}
