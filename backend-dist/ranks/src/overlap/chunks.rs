//! Chunks of tensor-parallel activations, communicated overlapped with the GEMMs that compute or need them.
//!
//! Matrices are contiguous `[rows, columns]`; a whole one is the concatenation of all members' shards, and chunk `i` of
//! it is chunk `i` of every shard. See [`Chunks`].

use super::{Pending, begin_chunk};
use crate::comm::{DeviceOpKind, Group, ReduceOp};
use crate::nccl::{data_type, elements, grouped, reduction};
use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::result as nccl;
use layouts::gemm_split::Chunks;

/// Elements of a row of a matrix of `rows` rows.
///
/// # Panics
/// If it is not contiguous or has other sizes.
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

/// Gathers chunk `chunk` of every member's `shard` into `whole`.
pub fn gather(shard: &CubeTensor, whole: &CubeTensor, chunks: Chunks, chunk: usize, group: &Group) -> Pending {
    let columns = row(shard, chunks.shard);
    assert_eq!(
        [chunks.shards, columns],
        [group.size(), row(whole, chunks.shard * chunks.shards)],
        "a gather over {group:?}"
    );
    let (data_type, bytes) = (data_type(shard.dtype), columns * shard.dtype.size());
    let (count, stride, start) = (chunks.rows(chunk) * columns, chunks.shard * bytes, chunks.start(chunk) * bytes);
    let buffers = [shard.clone(), whole.clone()];
    let lengths = buffers.each_ref().map(elements);
    let shape = [chunks.rows(chunk), columns];
    begin_chunk(DeviceOpKind::AllGather(0), &shape, buffers, lengths, group, move |[from, to], comm, stream| {
        if chunks.count() == 1 {
            // SAFETY: `from` holds `count` elements, `to` holds `count` for each member.
            return unsafe { nccl::all_gather(from, to, count, data_type, comm, stream) };
        }
        grouped(|| {
            (0..chunks.shards).try_for_each(|peer| {
                // SAFETY: the chunk is within the shard, and within shard `peer` of the whole.
                unsafe {
                    nccl::send(from.byte_add(start), count, data_type, peer as i32, comm, stream)?;
                    nccl::recv(to.byte_add(peer * stride + start), count, data_type, peer as i32, comm, stream)?;
                }
                Ok(())
            })
        })
    })
}

/// Writes chunk `chunk` of this member's shard of the sum of all members' `staged` to `shard`. `staged` stores chunk
/// after chunk ([`Chunks::staged`]).
pub fn scatter(staged: &CubeTensor, shard: &CubeTensor, chunks: Chunks, chunk: usize, group: &Group) -> Pending {
    let columns = row(shard, chunks.shard);
    assert_eq!(
        [chunks.shards, columns],
        [group.size(), row(staged, chunks.shard * chunks.shards)],
        "a sum over {group:?}"
    );
    let (data_type, op, bytes) = (data_type(shard.dtype), reduction(ReduceOp::Sum), columns * shard.dtype.size());
    let count = chunks.rows(chunk) * columns;
    let [from_start, to_start] = [chunks.staged(chunk) * bytes, chunks.start(chunk) * bytes];
    let buffers = [staged.clone(), shard.clone()];
    let lengths = buffers.each_ref().map(elements);
    let shape = [chunks.shards * chunks.rows(chunk), columns];
    begin_chunk(DeviceOpKind::ReduceScatter(0), &shape, buffers, lengths, group, move |[from, to], comm, stream| {
        // SAFETY: a chunk has `count` elements for each member within `staged`, and `count` within the shard.
        unsafe {
            let [from, to] = [from.byte_add(from_start), to.byte_add(to_start)];
            nccl::reduce_scatter(from, to, count, data_type, op, comm, stream)
        }
    })
}

/// Replaces chunk `chunk` of every member's `whole`, which has one shard, by the members' sum.
pub fn reduce(whole: &CubeTensor, chunks: Chunks, chunk: usize, group: &Group) -> Pending {
    let columns = row(whole, chunks.shard);
    assert_eq!(chunks.shards, 1, "a sum over {group:?}");
    let (data_type, op) = (data_type(whole.dtype), reduction(ReduceOp::Sum));
    let (count, start) = (chunks.rows(chunk) * columns, chunks.start(chunk) * columns * whole.dtype.size());
    let (kind, shape) = (DeviceOpKind::AllReduce(ReduceOp::Sum), [chunks.rows(chunk), columns]);
    let (buffers, lengths) = ([whole.clone(), whole.clone()], [elements(whole); 2]);
    begin_chunk(kind, &shape, buffers, lengths, group, move |[from, to], comm, stream| {
        // SAFETY: the chunk is within the buffer, and NCCL allows source and target to be the same.
        unsafe { nccl::all_reduce(from.byte_add(start), to.byte_add(start), count, data_type, op, comm, stream) }
    })
}
