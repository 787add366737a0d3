//! Views of parts of matrices, which only cuBLASLt and NCCL read and write: CubeCL's kernels want other alignments.

use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;

use super::columns;
use crate::ops::pieces::Cut;

/// Piece `piece` of the matrix `x`, which has no gaps.
pub(super) fn piece_of(x: &CubeTensor, cut: Cut, piece: usize) -> CubeTensor {
    blocks(x, [cut.parts, cut.rows(piece)], cut.part, cut.start(piece))
}

/// `parts` blocks of `rows` rows of the matrix `x`, which has no gaps, where they lie: `[parts, rows, columns]`. They
/// start `stride` rows apart, the first at row `start`. Blocks that touch are one: a single product is quicker than a
/// batch.
pub(super) fn blocks(x: &CubeTensor, [parts, rows]: [usize; 2], stride: usize, start: usize) -> CubeTensor {
    let columns = columns(x);
    let [parts, rows] = if stride == rows { [1, parts * rows] } else { [parts, rows] };
    view(x, [parts, rows, columns], [stride * columns, columns, 1], start * columns)
}

/// `count` columns of the matrix `x`, which has no gaps, from column `start` on: `[1, rows, count]`.
pub(super) fn columns_of(x: &CubeTensor, start: usize, count: usize) -> CubeTensor {
    let (rows, columns) = (super::rows(x), columns(x));
    view(x, [1, rows, count], [0, columns, 1], start)
}

/// The matrix `w`, `batches` times.
pub(super) fn shared(w: &CubeTensor, batches: usize) -> CubeTensor {
    let (shape, strides) = (w.meta.shape(), w.meta.strides());
    view(w, [batches, shape[0], shape[1]], [0, strides[0], strides[1]], 0)
}

/// The elements of `x` from element `start` on with this shape and these strides. Strides of dimensions of one element
/// do not count.
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
