//! Rows that change owner.

use super::communicator::{Call, Communicator};
use super::copies::Pull;
use super::{Held, data_type, exchanged, finished, grouped, scaled};
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::cuda::{dense, empty};
use crate::ops::moe::Splits;
use crate::overlap::copies;
use crate::profile;
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::result as driver;
use cudarc::driver::sys::CUstream;
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t};
use std::ffi::c_void;
use std::sync::Arc;

/// Where rows begin in source and target, in bytes, and how long they are.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub from: usize,
    pub to: usize,
    /// Elements of a row.
    pub row: usize,
    /// Bytes of a row.
    pub bytes: usize,
    pub data_type: ncclDataType_t,
}

impl Span {
    /// Queues sends and receives of all members' rows but the rank's own; within a group of NCCL's calls.
    ///
    /// # Safety
    /// The rows must lie within the buffers, which must live until the operation has ended.
    pub(crate) unsafe fn exchange(
        self,
        [from, to]: [*mut c_void; 2],
        Splits { send, receive }: &Splits,
        own: usize,
        (comm, stream): (ncclComm_t, cudaStream_t),
    ) -> Result<(), nccl::NcclError> {
        let (mut sent, mut received) = (self.from, self.to);
        for (peer, (send, receive)) in send.iter().zip(receive).enumerate() {
            if peer != own {
                // SAFETY: the caller's.
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

    /// Queues a copy of the rank's own rows. NCCL would take threads of its kernel from the others' rows for it.
    ///
    /// # Safety
    /// As [`Span::exchange`].
    pub(crate) unsafe fn keep(
        self,
        [from, to]: [*mut c_void; 2],
        Splits { send, receive }: &Splits,
        own: usize,
        stream: CUstream,
    ) -> Result<(), String> {
        let [before, behind] = [send, receive].map(|rows| rows[..own].iter().sum::<usize>() * self.bytes);
        let bytes = send[own] * self.bytes;
        if send[own] != receive[own] {
            return Err(format!("a rank sends itself {} rows and expects {}", send[own], receive[own]));
        }
        if bytes == 0 {
            return Ok(());
        }
        let [from, to] = [from as u64 + (self.from + before) as u64, to as u64 + (self.to + behind) as u64];
        // SAFETY: the caller's.
        unsafe { driver::memcpy_dtod_async(to, from, bytes, stream) }.map_err(|error| error.to_string())
    }
}

/// Queues copies of rows of one matrix or several, from the source to the target of each, by copy engines; `sources`
/// are held as long as others read them.
pub(crate) fn copied(
    call: Call,
    matrices: &[(Span, [*mut c_void; 2])],
    Splits { send, receive }: &Splits,
    own: usize,
    sources: Vec<Held>,
) -> Result<(), String> {
    if send[own] != receive[own] {
        return Err(format!("a rank sends itself {} rows and expects {}", send[own], receive[own]));
    }
    let size = send.len();
    let addresses = matrices.iter().flat_map(|(span, [from, _])| starts(*from as usize + span.from, span.bytes, send));
    let pulls = matrices.iter().enumerate().flat_map(|(matrix, (span, [_, to]))| {
        let starts = starts(*to as usize + span.to, span.bytes, receive);
        // The member's own last: at any time everybody is copied from by one other.
        (1..=size).map(|offset| (own + offset) % size).map(move |member| {
            let (to, bytes) = (starts[member], receive[member] * span.bytes);
            Pull { member, from: matrix * size + own, to, bytes, slot: None }
        })
    });
    let copies = call.copies().ok_or("its members do not reach each other's memory")?;
    copies.queue(call, addresses.collect(), pulls, sources)
}

/// Where the rows of each member begin, if so many rows of `bytes` follow each other from `start` on.
fn starts(start: usize, bytes: usize, rows: &[usize]) -> Vec<usize> {
    let ends = rows.iter().scan(start, |at, rows| {
        *at += rows * bytes;
        Some(*at)
    });
    std::iter::once(start).chain(ends).take(rows.len()).collect()
}

/// Rows of dimension 0 of `x` go to other members, and theirs come. Nothing runs beside it on the compute stream but
/// the copy of the rank's own rows.
pub(super) fn exchange(x: CubeTensor, splits: &Splits, group: &Group, link: &Arc<Communicator>) -> CubeTensor {
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
    // Not by division: a member may have no rows and receive some.
    let row: usize = x.meta.shape()[1..].iter().product();
    let span = Span { from: 0, to: 0, row, bytes: row * x.dtype.size(), data_type: data_type(x.dtype) };
    let noted = profile::operation(&x, || exchanged(&op, rows * span.bytes, group.size(), ""));
    let (sequence, own) = (group.issue(op.clone()), group.rank());
    let lent = copies::carry(link, group).then(|| Held::new(x.clone()));
    link.queue((sequence, op), [&x, &out], move |call, buffers| {
        if let Some(lent) = lent {
            copied(call, &[(span, buffers)], &splits, own, vec![lent])?;
            return call.lead();
        }
        call.follow()?;
        // SAFETY: the splits add up to the rows of either buffer. CubeCL reuses memory in the order of the compute
        // stream, which has queued its wait when the buffers are let go.
        unsafe {
            finished(grouped(|| span.exchange(buffers, &splits, own, call.target())))?;
            span.keep(buffers, &splits, own, call.compute())?;
        }
        call.lead()
    });
    drop(noted);
    out
}
