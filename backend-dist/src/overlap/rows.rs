//! Rows that change owner beside the computation.

use super::{InFlight, Pending};
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::nccl::{Held, connect, data_type, elements, exchanged, finished, gpu_of};
use crate::ops::moe::Splits;
use crate::profile;
use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys::ncclDataType_t;

/// Rows of the matrix `from`, from row `first` on, to rows of `to`, from row `at` on. Both are without gaps, of one type and
/// width.
pub(crate) struct Rows {
    pub from: CubeTensor,
    pub first: usize,
    pub to: CubeTensor,
    pub at: usize,
}

/// Where rows lie, in bytes, and the elements of a row.
struct Span {
    from: usize,
    to: usize,
    row: usize,
    bytes: usize,
    data_type: ncclDataType_t,
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
    let Splits { send, receive } = splits.clone();
    assert_eq!([send.len(), receive.len()], [group.size(); 2], "all-to-all on {group:?}: {splits:?}");
    let link = connect(group, gpu_of(&first.from.device))
        .unwrap_or_else(|| panic!("{group:?} has members that share a GPU or have none"));
    let spans: Vec<Span> = matrices.iter().map(|rows| rows.span(splits)).collect();
    let kind = DeviceOpKind::AllToAll { send: send.clone(), receive: receive.clone() };
    let op = DeviceOp::new(kind, first.from.dtype, &[splits.sent(), spans[0].row]);
    let noted = profile::operation(&first.from, || {
        let bytes = spans.iter().map(|span| splits.sent() * span.bytes).sum();
        exchanged(&op, bytes, group.size(), ", beside")
    });
    let sequence = group.issue(op.clone());
    let slot = link.events.take();
    let tensors = [&first.from, &first.to, &last.from, &last.to];
    let buffers = tensors.map(|x| Held::new(x.clone()));
    link.queue((sequence, op), tensors, move |call, [from, to, last_from, last_to]| {
        call.follow()?;
        let (comm, stream) = call.target();
        let exchange = || {
            nccl::group_start()?;
            for (span, [from, to]) in spans.iter().zip([[from, to], [last_from, last_to]]) {
                let (mut sent, mut received) = (span.from, span.to);
                for (peer, (send, receive)) in send.iter().zip(&receive).enumerate() {
                    let (peer, send, receive) = (peer as i32, *send, *receive);
                    // SAFETY: the rows lie within the buffers, which are held until the compute stream has queued its wait.
                    unsafe {
                        nccl::send(from.byte_add(sent), send * span.row, span.data_type, peer, comm, stream)?;
                        nccl::recv(to.byte_add(received), receive * span.row, span.data_type, peer, comm, stream)?;
                    }
                    sent += send * span.bytes;
                    received += receive * span.bytes;
                }
            }
            nccl::group_end()
        };
        finished(exchange())?;
        call.record(slot)
    });
    drop(noted);
    Pending { in_flight: Some(InFlight { link, slot, buffers: buffers.into() }) }
}
