//! What copy engines carry, and parts of the activations of tensor parallelism, exchanged by them beside the products
//! that make or need them.
//!
//! Matrices are `[rows, columns]` without gaps; a whole one is the parts of all members one after the other. Member
//! `rank + offset` is met at `offset`, so that at any time every member is copied from by one other.

use super::{InFlight, Pending};
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::nccl::copies::Pull;
use crate::nccl::{Communicator, Held, connect, elements, gpu_of};
use crate::profile::{self, Operation};
use burn_cubecl::tensor::CubeTensor;
use std::ops::Range;

/// Whether copy engines carry what `group` exchanges. The first call is collective.
pub(crate) fn carry(link: &Communicator, group: &Group) -> bool {
    link.copies(group).is_some()
}

/// [`carry`] where `x` lies.
pub(crate) fn carry_from(x: &CubeTensor, group: &Group) -> bool {
    connect(group, gpu_of(&x.device)).is_some_and(|link| carry(&link, group))
}

/// Writes every member's `part` to its place in `whole`: those of offset 1, 2 and so on, and last this member's own,
/// each with what tells that it is there.
pub(crate) fn gather(part: &CubeTensor, whole: &CubeTensor, group: &Group) -> Vec<Pending> {
    let (size, rank, bytes) = (group.size(), group.rank(), bytes(part));
    assert_eq!(bytes * size, self::bytes(whole), "a gather over {group:?}");
    let pulls = (1..=size).map(|offset| (rank + offset) % size).map(|member| (member, 0, member * bytes));
    begin(DeviceOpKind::AllGather(0), [part, whole], bytes, pulls.collect(), true, group)
}

/// Copies this member's part of the `staged` matrices of the members at `-offset`, for these offsets, to places
/// `offset - 1` of `arrived`.
pub(crate) fn collect(
    staged: &CubeTensor,
    arrived: &CubeTensor,
    offsets: Range<usize>,
    group: &Group,
) -> Option<Pending> {
    let (size, rank) = (group.size(), group.rank());
    let bytes = bytes(staged) / size;
    assert!(self::bytes(arrived) == bytes * (size - 1) && offsets.end <= size, "parts of a sum over {group:?}");
    let pulls = offsets.map(|offset| ((rank + size - offset) % size, rank, (offset - 1) * bytes));
    begin(DeviceOpKind::ReduceScatter(0), [staged, arrived], bytes, pulls.collect(), false, group).pop()
}

/// Queues copies of runs of so many `bytes`, of which `source` is made, to `target`, behind what the compute stream has
/// queued so far: from which member, which of its runs, to which byte. With `each` there is one to wait for behind
/// every copy, else one behind all.
fn begin(
    kind: DeviceOpKind,
    [source, target]: [&CubeTensor; 2],
    bytes: usize,
    pulls: Vec<(usize, usize, usize)>,
    each: bool,
    group: &Group,
) -> Vec<Pending> {
    let link = connect(group, gpu_of(&source.device)).expect("it was asked whether the members are within reach");
    let slots: Vec<Option<usize>> =
        (1..=pulls.len()).map(|count| (each || count == pulls.len()).then(|| link.events.take())).collect();
    let op = DeviceOp::new(kind, source.dtype, &[pulls.len(), elements(source)]);
    let sent = elements(source) * source.dtype.size();
    let copied = pulls.iter().filter(|(member, ..)| *member != group.rank()).count() * bytes;
    let noted = profile::operation(source, || {
        let name = if each { "all-gather" } else { "reduce-scatter" };
        Operation::exchange(format!("{name} over {}, copied beside", group.size()), copied)
    });
    let sequence = group.issue(op.clone());
    let pending = |slot: &usize| {
        let buffers = vec![Held::new(target.clone())];
        Pending { in_flight: Some(InFlight { link: link.clone(), slot: *slot, buffers }) }
    };
    let waits = slots.iter().flatten().map(pending).collect();
    let lent = vec![Held::new(source.clone())];
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
/// If it has gaps.
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
