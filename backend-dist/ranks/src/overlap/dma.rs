//! Collectives of tensor-parallel activations by DMA copy engines, shard by shard, overlapped with the GEMMs that
//! compute or need them.
//!
//! Matrices are contiguous `[rows, columns]`; a whole one is the concatenation of all members' shards. Member `rank +
//! offset` is copied from at step `offset`, so that at any time each member is read by one other member.

use super::{InFlight, Pending};
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::nccl::copies::Pull;
use crate::nccl::{Communicator, connect, elements, gpu_of};
use burn_cubecl::tensor::CubeTensor;
use gpu::cuda::PinnedBuffer;
use gpu::profile::{self, Operation};
use std::ops::Range;

/// Whether DMA copy engines run the collectives of `group`. The first call is a collective.
pub fn are_available(link: &Communicator, group: &Group) -> bool {
    link.copies(group).is_some()
}

/// [`are_available`] on the device of `x`.
pub fn are_available_on(x: &CubeTensor, group: &Group) -> bool {
    connect(group, gpu_of(&x.device)).is_some_and(|link| are_available(&link, group))
}

/// Writes every member's `shard` to `whole`: those of offset 1, 2 and so on, and this member's own last. Each can be
/// waited for.
pub fn gather(shard: &CubeTensor, whole: &CubeTensor, group: &Group) -> Vec<Pending> {
    let (size, rank, bytes) = (group.size(), group.rank(), bytes(shard));
    assert_eq!(bytes * size, self::bytes(whole), "a gather over {group:?}");
    let pulls = (1..=size).map(|offset| (rank + offset) % size).map(|member| (member, 0, member * bytes));
    begin(DeviceOpKind::AllGather(0), [shard, whole], bytes, pulls.collect(), true, group)
}

/// Copies this member's shard of the `staged` matrices of the members at `-offset`, for these offsets, to shards
/// `offset - 1` of `arrived`.
pub fn collect(staged: &CubeTensor, arrived: &CubeTensor, offsets: Range<usize>, group: &Group) -> Option<Pending> {
    let (size, rank) = (group.size(), group.rank());
    let bytes = bytes(staged) / size;
    assert!(self::bytes(arrived) == bytes * (size - 1) && offsets.end <= size, "parts of a sum over {group:?}");
    let pulls = offsets.map(|offset| ((rank + size - offset) % size, rank, (offset - 1) * bytes));
    begin(DeviceOpKind::ReduceScatter(0), [staged, arrived], bytes, pulls.collect(), false, group).pop()
}

/// Queues copies of ranges of `bytes` bytes, which make up `source`, to `target`, after the queued work of the compute
/// stream. A copy is given by its member, the index of the range there, and the target's byte. With `each`, every copy
/// can be waited for, else all together.
fn begin(
    kind: DeviceOpKind,
    [source, target]: [&CubeTensor; 2],
    bytes: usize,
    pulls: Vec<(usize, usize, usize)>,
    each: bool,
    group: &Group,
) -> Vec<Pending> {
    let link = connect(group, gpu_of(&source.device)).expect("`are_available` was asked before");
    let slots: Vec<Option<usize>> =
        (1..=pulls.len()).map(|count| (each || count == pulls.len()).then(|| link.events.take())).collect();
    let op = DeviceOp::new(kind, source.dtype, &[pulls.len(), elements(source)]);
    let sent = elements(source) * source.dtype.size();
    let copied = pulls.iter().filter(|(member, ..)| *member != group.rank()).count() * bytes;
    let noted = profile::operation(source, || {
        let name = if each { "all-gather" } else { "reduce-scatter" };
        Operation::collective(format!("{name} over {}, overlapped, by DMA", group.size()), copied)
    });
    let sequence = group.issue(op.clone());
    let pending = |slot: &usize| {
        let buffers = vec![PinnedBuffer::new(target.clone())];
        Pending { in_flight: Some(InFlight { link: link.clone(), slot: *slot, buffers }) }
    };
    let waits = slots.iter().flatten().map(pending).collect();
    let lent = vec![PinnedBuffer::new(source.clone())];
    link.queue((sequence, op), [source, target], move |call, [source, target]| {
        let copies = call.copies().ok_or("its members do not reach each other's memory")?;
        let addresses = (0..sent / bytes).map(|run| source as usize + run * bytes).collect();
        let pulls = pulls.into_iter().zip(slots).map(|((member, from, to), slot)| {
            let to = target as usize + to;
            Pull { member, from, to, bytes, slot }
        });
        copies.queue(call, addresses, pulls, lent)
    });
    drop(noted);
    waits
}

/// Bytes of a matrix.
///
/// # Panics
/// If it is not contiguous.
fn bytes(x: &CubeTensor) -> usize {
    let bytes = elements(x) * x.dtype.size();
    assert!(
        x.is_contiguous() && x.handle.size_in_used() as usize >= bytes,
        "activations to be copied: shape {:?}, strides {:?}",
        x.meta.shape(),
        x.meta.strides()
    );
    bytes
}
