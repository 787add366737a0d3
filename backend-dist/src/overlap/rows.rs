//! Rows that change owner beside the computation.

use super::{InFlight, Pending, copies};
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::nccl::rows::{Span, copied};
use crate::nccl::{Held, connect, data_type, elements, exchanged, finished, gpu_of, grouped};
use crate::ops::moe::Splits;
use crate::profile;
use burn_cubecl::tensor::CubeTensor;

/// Rows of the matrix `from`, from row `first` on, to rows of `to`, from row `at` on. Both are without gaps, of one
/// type and width.
pub(crate) struct Rows {
    pub from: CubeTensor,
    pub first: usize,
    pub to: CubeTensor,
    pub at: usize,
}

impl Rows {
    fn span(&self, splits: &Splits) -> Span {
        let (Self { from, first, to, at }, row) = (self, *self.from.meta.shape().last().expect("a matrix"));
        let holds = |x: &CubeTensor, end: usize| {
            let is_dense = x.is_contiguous() && x.handle.size_in_used() as usize >= elements(x) * x.dtype.size();
            is_dense && elements(x) >= end * row && x.dtype == from.dtype && x.meta.shape().last() == Some(&row)
        };
        assert!(
            holds(from, first + splits.sent()) && holds(to, at + splits.received()),
            "all-to-all of {splits:?}: from row {first} of {:?} {:?} to row {at} of {:?} {:?}",
            from.meta.shape(),
            from.dtype,
            to.meta.shape(),
            to.dtype
        );
        let bytes = row * from.dtype.size();
        Span { from: first * bytes, to: at * bytes, row, bytes, data_type: data_type(from.dtype) }
    }
}

/// Members exchange rows of one matrix or of two, in one operation.
///
/// # Panics
/// Unless the rows lie in their matrices, on the rank's own GPU, and every member has one.
pub(crate) fn all_to_all(matrices: &[Rows], splits: &Splits, group: &Group) -> Pending {
    let [first, last] = match matrices {
        [one] => [one, one],
        [one, other] => [one, other],
        _ => panic!("all-to-all on {group:?}: {} matrices", matrices.len()),
    };
    let lengths = [splits.send.len(), splits.receive.len()];
    assert_eq!(lengths, [group.size(); 2], "all-to-all on {group:?}: {splits:?}");
    let link = connect(group, gpu_of(&first.from.device))
        .unwrap_or_else(|| panic!("{group:?} has members that share a GPU or have none"));
    let spans: Vec<Span> = matrices.iter().map(|rows| rows.span(splits)).collect();
    let kind = DeviceOpKind::AllToAll { send: splits.send.clone(), receive: splits.receive.clone() };
    let op = DeviceOp::new(kind, first.from.dtype, &[splits.sent(), spans[0].row]);
    let noted = profile::operation(&first.from, || {
        let bytes = spans.iter().map(|span| splits.sent() * span.bytes).sum();
        exchanged(&op, bytes, group.size(), ", beside")
    });
    let (sequence, slot) = (group.issue(op.clone()), link.events.take());
    let (splits, own) = (splits.clone(), group.rank());
    let lent = || matrices.iter().map(|rows| Held::new(rows.from.clone())).collect();
    let lent: Option<Vec<Held>> = copies::carry(&link, group).then(lent);
    let tensors = [&first.from, &first.to, &last.from, &last.to];
    let buffers = tensors.map(|x| Held::new(x.clone()));
    link.queue((sequence, op), tensors, move |call, [from, to, last_from, last_to]| {
        let buffers = [[from, to], [last_from, last_to]];
        if let Some(lent) = lent {
            let matrices: Vec<_> = spans.into_iter().zip(buffers).collect();
            copied(call, &matrices, &splits, own, lent)?;
            return call.record(slot);
        }
        call.follow()?;
        // SAFETY: the rows lie within the buffers, which are held until the compute stream has queued its wait.
        unsafe {
            let exchange = |(span, x): (&Span, _)| span.exchange(x, &splits, own, call.target());
            finished(grouped(|| spans.iter().zip(buffers).try_for_each(exchange)))?;
            for (span, buffers) in spans.iter().zip(buffers) {
                span.keep(buffers, &splits, own, call.target().1 as _)?;
            }
        }
        call.record(slot)
    });
    drop(noted);
    Pending { in_flight: Some(InFlight { link, slot, buffers: buffers.into() }) }
}
