//! All-to-alls of matrix rows that overlap the computation.

use super::{InFlight, Pending, dma};
use crate::comm::Splits;
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::nccl::all_to_all::{RowSpan, queue_copies};
use crate::nccl::{collective_operation, connect, data_type, elements, finished, gpu_of, grouped};
use burn_cubecl::tensor::CubeTensor;
use gpu::cuda::PinnedBuffer;
use gpu::profile;

/// Rows of the matrix `from`, from row `first` on, and rows of `to`, from row `at` on. Both are contiguous and have the
/// same type and width.
pub struct RowRange {
    pub from: CubeTensor,
    pub first: usize,
    pub to: CubeTensor,
    pub at: usize,
}

impl RowRange {
    fn span(&self, splits: &Splits) -> RowSpan {
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
        RowSpan { from: first * bytes, to: at * bytes, row, bytes, data_type: data_type(from.dtype) }
    }
}

/// An all-to-all of rows of one or two matrices, in one operation.
///
/// # Panics
/// Unless the rows are within their matrices, on the rank's own GPU, and every member has one.
pub fn all_to_all(matrices: &[RowRange], splits: &Splits, group: &Group) -> Pending {
    let [first, last] = match matrices {
        [one] => [one, one],
        [one, other] => [one, other],
        _ => panic!("all-to-all on {group:?}: {} matrices", matrices.len()),
    };
    let lengths = [splits.send.len(), splits.receive.len()];
    assert_eq!(lengths, [group.size(); 2], "all-to-all on {group:?}: {splits:?}");
    let link = connect(group, gpu_of(&first.from.device))
        .unwrap_or_else(|| panic!("{group:?} has members that share a GPU or have none"));
    let spans: Vec<RowSpan> = matrices.iter().map(|rows| rows.span(splits)).collect();
    let kind = DeviceOpKind::AllToAll { send: splits.send.clone(), receive: splits.receive.clone() };
    let op = DeviceOp::new(kind, first.from.dtype, &[splits.sent(), spans[0].row]);
    let noted = profile::operation(&first.from, || {
        let bytes = spans.iter().map(|span| splits.sent() * span.bytes).sum();
        collective_operation(&op, bytes, group.size(), ", overlapped")
    });
    let (sequence, slot) = (group.issue(op.clone()), link.events.take());
    let (splits, local) = (splits.clone(), group.rank());
    let lent = || matrices.iter().map(|rows| PinnedBuffer::new(rows.from.clone())).collect();
    let lent: Option<Vec<PinnedBuffer>> = dma::are_available(&link, group).then(lent);
    let tensors = [&first.from, &first.to, &last.from, &last.to];
    let buffers = tensors.map(|x| PinnedBuffer::new(x.clone()));
    link.queue((sequence, op), tensors, move |call, [from, to, last_from, last_to]| {
        let buffers = [[from, to], [last_from, last_to]];
        if let Some(lent) = lent {
            let matrices: Vec<_> = spans.into_iter().zip(buffers).collect();
            queue_copies(call, &matrices, &splits, local, lent)?;
            return call.record(slot);
        }
        call.follow()?;
        // SAFETY: the rows are within the buffers, which are held until the compute stream has queued its wait.
        unsafe {
            let collective = |(span, x): (&RowSpan, _)| span.collective(x, &splits, local, call.target());
            finished(grouped(|| spans.iter().zip(buffers).try_for_each(collective)))?;
            for (span, buffers) in spans.iter().zip(buffers) {
                span.copy_local(buffers, &splits, local, call.target().1 as _)?;
            }
        }
        call.record(slot)
    });
    drop(noted);
    Pending { in_flight: Some(InFlight { link, slot, buffers: buffers.into() }) }
}
