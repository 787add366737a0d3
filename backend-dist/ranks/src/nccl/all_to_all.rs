//! All-to-alls of matrix rows.

use super::communicator::{Call, Communicator};
use super::copies::Pull;
use super::{collective_operation, data_type, finished, grouped, scaled};
use crate::comm::Splits;
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::overlap::dma;
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::result as driver;
use cudarc::driver::sys::CUstream;
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t};
use gpu::cuda::{PinnedBuffer, dense, empty};
use gpu::profile;
use std::ffi::c_void;
use std::sync::Arc;

/// The offsets of rows in source and target, in bytes, and their size.
#[derive(Clone, Copy)]
pub(crate) struct RowSpan {
    pub from: usize,
    pub to: usize,
    /// Elements of a row.
    pub row: usize,
    /// Bytes of a row.
    pub bytes: usize,
    pub data_type: ncclDataType_t,
}

impl RowSpan {
    /// Queues sends and receives of the other members' rows, within an NCCL group call.
    ///
    /// # Safety
    /// The rows must be within the buffers, which must live until the operation has ended.
    pub(crate) unsafe fn collective(
        self,
        [from, to]: [*mut c_void; 2],
        Splits { send, receive }: &Splits,
        local: usize,
        (comm, stream): (ncclComm_t, cudaStream_t),
    ) -> Result<(), nccl::NcclError> {
        let (mut sent, mut received) = (self.from, self.to);
        for (peer, (send, receive)) in send.iter().zip(receive).enumerate() {
            if peer != local {
                // SAFETY: promised by the caller.
                unsafe {
                    nccl::send(from.byte_add(sent), send * self.row, self.data_type, peer as i32, comm, stream)?;
                    nccl::recv(to.byte_add(received), receive * self.row, self.data_type, peer as i32, comm, stream)?;
                }
            }
            sent += send * self.bytes;
            received += receive * self.bytes;
        }
        Ok(())
    }

    /// Queues a copy of the rank's local rows. NCCL would use threads of its kernel for it that the other rows need.
    ///
    /// # Safety
    /// As [`RowSpan::collective`].
    pub(crate) unsafe fn copy_local(
        self,
        [from, to]: [*mut c_void; 2],
        Splits { send, receive }: &Splits,
        local: usize,
        stream: CUstream,
    ) -> Result<(), String> {
        let [before, behind] = [send, receive].map(|rows| rows[..local].iter().sum::<usize>() * self.bytes);
        let bytes = send[local] * self.bytes;
        if send[local] != receive[local] {
            return Err(format!("a rank sends itself {} rows and expects {}", send[local], receive[local]));
        }
        if bytes == 0 {
            return Ok(());
        }
        let [from, to] = [from as u64 + (self.from + before) as u64, to as u64 + (self.to + behind) as u64];
        // SAFETY: promised by the caller.
        unsafe { driver::memcpy_dtod_async(to, from, bytes, stream) }.map_err(|error| error.to_string())
    }
}

/// Queues copies of rows of one or more matrices, from the source to the target of each, by DMA copy engines; `sources`
/// are held while other members read them.
pub(crate) fn queue_copies(
    call: Call,
    matrices: &[(RowSpan, [*mut c_void; 2])],
    Splits { send, receive }: &Splits,
    local: usize,
    sources: Vec<PinnedBuffer>,
) -> Result<(), String> {
    if send[local] != receive[local] {
        return Err(format!("a rank sends itself {} rows and expects {}", send[local], receive[local]));
    }
    let size = send.len();
    let addresses = matrices.iter().flat_map(|(span, [from, _])| starts(*from as usize + span.from, span.bytes, send));
    let pulls = matrices.iter().enumerate().flat_map(|(matrix, (span, [_, to]))| {
        let starts = starts(*to as usize + span.to, span.bytes, receive);
        // The local rows last; at any time each member is read by one other member.
        (1..=size).map(|offset| (local + offset) % size).map(move |member| {
            let (to, bytes) = (starts[member], receive[member] * span.bytes);
            Pull { member, from: matrix * size + local, to, bytes, slot: None }
        })
    });
    let copies = call.copies().ok_or("its members do not reach each other's memory")?;
    copies.queue(call, addresses.collect(), pulls, sources)
}

/// The start of each member's rows, if they follow each other from `start` on, with `bytes` each.
fn starts(start: usize, bytes: usize, rows: &[usize]) -> Vec<usize> {
    let ends = rows.iter().scan(start, |at, rows| {
        *at += rows * bytes;
        Some(*at)
    });
    std::iter::once(start).chain(ends).take(rows.len()).collect()
}

/// An all-to-all of rows of dimension 0 of `x`. It overlaps nothing on the compute stream but the copy of the rank's
/// local rows.
pub(super) fn collective(x: CubeTensor, splits: &Splits, group: &Group, link: &Arc<Communicator>) -> CubeTensor {
    let (rows, splits) = (x.meta.shape()[0], splits.clone());
    assert!(
        [splits.send.len(), splits.receive.len()] == [group.size(); 2] && splits.sent() == rows,
        "all-to-all on {group:?}: {splits:?} do not divide {rows} rows among {} members",
        group.size()
    );
    let kind = DeviceOpKind::AllToAll { send: splits.send.clone(), receive: splits.receive.clone() };
    let op = DeviceOp::new(kind, x.dtype, x.meta.shape());
    let x = dense(x);
    let out = empty(&x, scaled(&x, |_| splits.received()), x.dtype);
    // Not by division: a member may send no rows and receive some.
    let row: usize = x.meta.shape()[1..].iter().product();
    let span = RowSpan { from: 0, to: 0, row, bytes: row * x.dtype.size(), data_type: data_type(x.dtype) };
    let noted = profile::operation(&x, || collective_operation(&op, rows * span.bytes, group.size(), ""));
    let (sequence, local) = (group.issue(op.clone()), group.rank());
    let lent = dma::are_available(link, group).then(|| PinnedBuffer::new(x.clone()));
    link.queue((sequence, op), [&x, &out], move |call, buffers| {
        if let Some(lent) = lent {
            queue_copies(call, &[(span, buffers)], &splits, local, vec![lent])?;
            return call.lead();
        }
        call.follow()?;
        // SAFETY: the splits add up to the rows of either buffer. CubeCL reuses memory in the order of the compute
        // stream, which has queued its wait when the buffers are released.
        unsafe {
            finished(grouped(|| span.collective(buffers, &splits, local, call.target())))?;
            span.copy_local(buffers, &splits, local, call.compute())?;
        }
        call.lead()
    });
    drop(noted);
    out
}
