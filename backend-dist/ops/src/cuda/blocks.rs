//! Views of blocks of matrices, for cuBLASLt and NCCL only: CubeCL's kernels require other alignments.

use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;

use super::columns;
use layouts::gemm_split::Chunks;

/// Chunk `chunk` of the contiguous matrix `x`.
pub(super) fn chunk_of(x: &CubeTensor, chunks: Chunks, chunk: usize) -> CubeTensor {
    blocks(x, [chunks.shards, chunks.rows(chunk)], chunks.shard, chunks.start(chunk))
}

/// `count` blocks of `rows` rows of the contiguous matrix `x`, in place: `[count, rows, columns]`. They start `stride`
/// rows apart, the first at row `start`. Adjacent blocks become one: a single GEMM is faster than a batch.
pub(super) fn blocks(x: &CubeTensor, [count, rows]: [usize; 2], stride: usize, start: usize) -> CubeTensor {
    let columns = columns(x);
    let [count, rows] = if stride == rows { [1, count * rows] } else { [count, rows] };
    view(x, [count, rows, columns], [stride * columns, columns, 1], start * columns)
}

/// `count` columns of the contiguous matrix `x` from column `start` on: `[1, rows, count]`.
pub(super) fn columns_of(x: &CubeTensor, start: usize, count: usize) -> CubeTensor {
    let (rows, columns) = (super::rows(x), columns(x));
    view(x, [1, rows, count], [0, columns, 1], start)
}

/// The matrix `w`, `batches` times, without copies.
pub(super) fn shared(w: &CubeTensor, batches: usize) -> CubeTensor {
    let (shape, strides) = (w.meta.shape(), w.meta.strides());
    view(w, [batches, shape[0], shape[1]], [0, strides[0], strides[1]], 0)
}

/// A view of the elements of `x` from element `start` on. Strides of dimensions of size one are ignored.
pub(super) fn view(x: &CubeTensor, shape: [usize; 3], strides: [usize; 3], start: usize) -> CubeTensor {
    let handle = x.handle.clone().offset_start((start * x.dtype.size()) as u64);
    let (client, device) = (x.client.clone(), x.device.clone());
    let mut view = CubeTensor::new_contiguous(client, device, Shape::from(shape), handle, x.dtype);
    view.meta.strides_mut().copy_from_slice(&strides);
    view
}

/// The shape of `x` with another first and another last dimension.
pub(super) fn resized(x: &CubeTensor, first: impl Fn(usize) -> usize, last: usize) -> Shape {
    let mut shape = x.meta.shape().to_vec();
    let end = shape.len() - 1;
    shape[end] = last;
    shape[0] = first(shape[0]);
    Shape::from(shape)
}
