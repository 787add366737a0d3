//! Copies of tensors whose rows are contiguous.

use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::strided_rows::{StridedRows, pack};

/// `x` with its rows one behind the other, by a kernel that moves 16 bytes at a time; `None` if they are so, or `x` is no
/// tensor of such rows. CubeCL's copy of attention's heads took three times as long.
pub fn packed_rows(x: &CubeTensor) -> Option<CubeTensor> {
    let is_plain = x.qparams.is_none() && !x.meta.is_tiled() && x.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    if !is_plain || x.is_contiguous() {
        return None;
    }
    let rows = StridedRows::of(x.meta.shape(), x.meta.strides(), x.dtype.size())?;
    let out = super::empty(x, x.meta.shape().clone(), x.dtype);
    pack(&x.client, &x.handle, rows, &out.handle).ok()?;
    Some(out)
}
