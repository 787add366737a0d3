//! The tensor maps (TMA descriptors) of a call's tensors.
use super::{AttentionShape, Tensor4};
use crate::hopper::mma::PANEL;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgmma::Swizzle;
use half::bf16;

/// `tensor` as `[batch, heads, panels, seq, columns]`, in boxes of the given panels, rows and columns. A head dimension
/// that is a multiple of 64 columns has a dimension of panels; any other, and with `flat` any at all, is one panel.
fn map(
    tensor: &Tensor4,
    flat: bool,
    panels: usize,
    rows: usize,
    columns: usize,
    swizzle: Swizzle,
) -> TensorMapArg<Tiled> {
    let ([seq, batch, heads, d], [by_row, by_batch, by_head]) = (tensor.shape, tensor.strides);
    let width = if flat { d } else { PANEL };
    // SAFETY: `Tensor4::check` compared the extent of the tensor with the size of its buffer.
    let arg = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle.clone(),
            [by_batch, by_head, PANEL, by_row, 1].into(),
            [batch, heads, d / width, seq, width].into(),
        )
    };
    let tiles = TiledArgs { tile_size: [1, 1, panels, rows, columns].into() };
    TensorMapArg::new(tiles, arg, bf16::elem_type_native()).with_swizzle(swizzle.into())
}

/// For loads of `rows` rows in the layout of warpgroup MMAs: a box is all panels of a head, or one panel if the head
/// dimension is no multiple of a panel.
pub(super) fn load(tensor: &Tensor4, rows: usize) -> TensorMapArg<Tiled> {
    let d = tensor.shape[3];
    let whole = d.is_multiple_of(PANEL);
    map(tensor, !whole, if whole { d / PANEL } else { 1 }, rows, PANEL, Swizzle::B128)
}

/// For stores of one plane's 16 rows, a panel at a time; of single rows if sequences are packed.
pub(super) fn store(tensor: &Tensor4, packed: bool) -> TensorMapArg<Tiled> {
    let d = tensor.shape[3];
    if packed {
        map(tensor, true, 1, 1, d, Swizzle::None)
    } else {
        map(tensor, !d.is_multiple_of(PANEL), 1, 16, PANEL, Swizzle::B128)
    }
}

/// Two kinds of statistics, `[2, batch, heads, padded_queries]` of 4 bytes each, in boxes of both kinds of `block`
/// queries. TMA fills in zeros past the last query.
pub(super) fn statistics(
    shape: &AttentionShape,
    handle: &Handle,
    block: usize,
    element: ElemType,
) -> TensorMapArg<Tiled> {
    // SAFETY: the callers checked that the buffer holds twice `statistics_len`, or allocated it with that size.
    let arg = unsafe {
        TensorArg::from_raw_parts(
            handle.clone(),
            [shape.statistics_len(), shape.padded_queries(), 1].into(),
            [2, shape.batch * shape.heads, shape.queries].into(),
        )
    };
    TensorMapArg::new(TiledArgs { tile_size: [2, 1, block].into() }, arg, element)
}
