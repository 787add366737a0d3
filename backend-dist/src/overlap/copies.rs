//! Parts of the activations of tensor parallelism, exchanged by copy engines beside the products that make or need them.
//!
//! Matrices are `[rows, columns]` without gaps; a whole one is the parts of all members one after the other. Member
//! `rank + offset` is met at `offset`, so that at any time every member is copied from by one other.

use super::{InFlight, Pending};
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::nccl::copies::Pull;
use crate::nccl::{Held, connect, elements, exchanged, gpu_of};
use crate::profile;
use burn_cubecl::tensor::CubeTensor;
use std::ops::Range;

/// Whether the members of `group` reach each other's memory; the first call is collective.
pub(crate) fn is_within_reach(x: &CubeTensor, group: &Group) -> bool {
    connect(group, gpu_of(&x.device)).is_some_and(|link| link.copies(group).is_some())
}

/// Writes every member's `part` to its place in `whole`: those of offset 1, 2 and so on, and last this member's own, each with
/// what tells that it is there.
pub(crate) fn gather(part: &CubeTensor, whole: &CubeTensor, group: &Group) -> Vec<Pending> {
    let (size, rank, bytes) = (group.size(), group.rank(), bytes(part));
    assert_eq!(bytes * size, self::bytes(whole), "a gather over {group:?}");
    let pull = |offset: usize| {
        let member = (rank + offset) % size;
        Pull { member, from: 0, to: member * bytes, bytes, slot: None }
    };
    begin(DeviceOpKind::AllGather(0), [part, whole], (1..=size).map(pull).collect(), true, group)
}

/// Copies this member's part of the `staged` matrices of the members at `-offset`, for these offsets, to places `offset - 1` of
/// `arrived`.
pub(crate) fn collect(
    staged: &CubeTensor,
    arrived: &CubeTensor,
    offsets: Range<usize>,
    group: &Group,
) -> Option<Pending> {
    let (size, rank) = (group.size(), group.rank());
    let bytes = bytes(staged) / size;
    assert!(self::bytes(arrived) == bytes * (size - 1) && offsets.end <= size, "parts of a sum over {group:?}");
    let pull = |offset: usize| {
        let member = (rank + size - offset) % size;
        Pull { member, from: rank * bytes, to: (offset - 1) * bytes, bytes, slot: None }
    };
    begin(DeviceOpKind::ReduceScatter(0), [staged, arrived], offsets.map(pull).collect(), false, group).pop()
}

/// Queues the copies from the members' `source`s to `target`, behind what the compute stream has queued so far; with `each`
/// there is one to wait for behind every copy, else one behind all.
fn begin(
    kind: DeviceOpKind,
    [source, target]: [&CubeTensor; 2],
    mut pulls: Vec<Pull>,
    each: bool,
    group: &Group,
) -> Vec<Pending> {
    let link = connect(group, gpu_of(&source.device)).expect("it was asked whether the members are within reach");
    let last = pulls.len().saturating_sub(1);
    for (i, pull) in pulls.iter_mut().enumerate() {
        pull.slot = (each || i == last).then(|| link.events.take());
    }
    let op = DeviceOp::new(kind, source.dtype, &[pulls.len(), elements(source)]);
    let noted = profile::operation(source, || exchanged(&op, bytes(source), group.size(), ", copied beside"));
    let sequence = group.issue(op.clone());
    let pending = |slot| {
        let buffers = vec![Held::new(target.clone())];
        Pending { in_flight: Some(InFlight { link: link.clone(), slot, buffers }) }
    };
    let waits = pulls.iter().filter_map(|pull| pull.slot).map(pending).collect();
    let lent = Held::new(source.clone());
    link.queue((sequence, op), [source, target], move |call, pointers| {
        let copies = call.copies().ok_or("its members do not reach each other's memory")?;
        copies.queue(call, pointers, &pulls, lent)
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
