//! Pieces of the activations of tensor parallelism, exchanged beside the products that make or need them.
//!
//! Matrices are `[rows, columns]` without gaps; a whole one is the parts of all members one after the other, and piece
//! `i` of it is piece `i` of every part. See [`Cut`].

use super::{Pending, begin_piece};
use crate::comm::{DeviceOpKind, Group, ReduceOp};
use crate::nccl::{data_type, elements, grouped, reduction};
use crate::ops::pieces::Cut;
use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::result as nccl;

/// Elements of a row of a matrix of `rows` rows.
///
/// # Panics
/// If it has gaps or other sizes.
fn row(matrix: &CubeTensor, rows: usize) -> usize {
    let count = elements(matrix);
    assert!(
        rows > 0
            && count.is_multiple_of(rows)
            && matrix.is_contiguous()
            && matrix.handle.size_in_used() as usize >= count * matrix.dtype.size(),
        "{rows} rows of activations: shape {:?}, strides {:?}",
        matrix.meta.shape(),
        matrix.meta.strides()
    );
    count / rows
}

/// Writes piece `piece` of every member's `part` to its place in `whole`.
pub(crate) fn gather(part: &CubeTensor, whole: &CubeTensor, cut: Cut, piece: usize, group: &Group) -> Pending {
    let columns = row(part, cut.part);
    assert_eq!([cut.parts, columns], [group.size(), row(whole, cut.part * cut.parts)], "a gather over {group:?}");
    let (data_type, bytes) = (data_type(part.dtype), columns * part.dtype.size());
    let (count, stride, start) = (cut.rows(piece) * columns, cut.part * bytes, cut.start(piece) * bytes);
    let buffers = [part.clone(), whole.clone()];
    let lengths = buffers.each_ref().map(elements);
    let shape = [cut.rows(piece), columns];
    begin_piece(DeviceOpKind::AllGather(0), &shape, buffers, lengths, group, move |[from, to], comm, stream| {
        if cut.pieces() == 1 {
            // SAFETY: `from` holds `count` elements, `to` holds `count` for each member.
            return unsafe { nccl::all_gather(from, to, count, data_type, comm, stream) };
        }
        grouped(|| {
            (0..cut.parts).try_for_each(|peer| {
                // SAFETY: the piece lies within the part, and so it does in part `peer` of the whole.
                unsafe {
                    nccl::send(from.byte_add(start), count, data_type, peer as i32, comm, stream)?;
                    nccl::recv(to.byte_add(peer * stride + start), count, data_type, peer as i32, comm, stream)?;
                }
                Ok(())
            })
        })
    })
}

/// Writes piece `piece` of this member's part of the sum of all members' `staged` to its place in `part`. Pieces of
/// `staged` lie one after the other ([`Cut::staged`]).
pub(crate) fn scatter(staged: &CubeTensor, part: &CubeTensor, cut: Cut, piece: usize, group: &Group) -> Pending {
    let columns = row(part, cut.part);
    assert_eq!([cut.parts, columns], [group.size(), row(staged, cut.part * cut.parts)], "a sum over {group:?}");
    let (data_type, op, bytes) = (data_type(part.dtype), reduction(ReduceOp::Sum), columns * part.dtype.size());
    let count = cut.rows(piece) * columns;
    let [from_start, to_start] = [cut.staged(piece) * bytes, cut.start(piece) * bytes];
    let buffers = [staged.clone(), part.clone()];
    let lengths = buffers.each_ref().map(elements);
    let shape = [cut.parts * cut.rows(piece), columns];
    begin_piece(DeviceOpKind::ReduceScatter(0), &shape, buffers, lengths, group, move |[from, to], comm, stream| {
        // SAFETY: a piece has `count` elements for each member and lies within the staged ones, `count` within the
        // part.
        unsafe {
            let [from, to] = [from.byte_add(from_start), to.byte_add(to_start)];
            nccl::reduce_scatter(from, to, count, data_type, op, comm, stream)
        }
    })
}

/// Replaces piece `piece` of every member's `whole`, which has one part, by their sum.
pub(crate) fn reduce(whole: &CubeTensor, cut: Cut, piece: usize, group: &Group) -> Pending {
    let columns = row(whole, cut.part);
    assert_eq!(cut.parts, 1, "a sum over {group:?}");
    let (data_type, op) = (data_type(whole.dtype), reduction(ReduceOp::Sum));
    let (count, start) = (cut.rows(piece) * columns, cut.start(piece) * columns * whole.dtype.size());
    let (kind, shape) = (DeviceOpKind::AllReduce(ReduceOp::Sum), [cut.rows(piece), columns]);
    let (buffers, lengths) = ([whole.clone(), whole.clone()], [elements(whole); 2]);
    begin_piece(kind, &shape, buffers, lengths, group, move |[from, to], comm, stream| {
        // SAFETY: the piece lies within the buffer, and NCCL allows source and target to be one.
        unsafe { nccl::all_reduce(from.byte_add(start), to.byte_add(start), count, data_type, op, comm, stream) }
    })
}
