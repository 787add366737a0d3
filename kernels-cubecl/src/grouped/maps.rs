//! The tensor maps (TMA descriptors) of a call's matrices.
use super::plan::{Gemm, GroupedPlan};
use super::tiles::{DEPTH, ROWS};
use crate::hopper::mma::PANEL;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgmma::Swizzle;
use half::bf16;

/// A matrix of 16-bit numbers, or pairs of bytes, in boxes of `lines` lines of 64.
pub(super) fn operand(handle: &Handle, [rows, columns]: [usize; 2], lines: usize) -> TensorMapArg<Tiled> {
    // SAFETY: the call compared the sizes with the buffer.
    let arg = unsafe { TensorArg::from_raw_parts(handle.clone(), [columns, 1].into(), [rows, columns].into()) };
    let tiles = TiledArgs { tile_size: [lines, PANEL].into() };
    let map = TensorMapArg::new(tiles, arg, bf16::elem_type_native()).with_swizzle(Swizzle::B128.into());
    map.with_prefetch(TensorMapPrefetch::B256)
}

/// Scales of blocks, in boxes of `count` of a line.
pub(super) fn scales(handle: &Handle, [lines, line]: [usize; 2], count: usize) -> TensorMapArg<Tiled> {
    // SAFETY: the call compared the sizes with the buffer.
    let arg = unsafe { TensorArg::from_raw_parts(handle.clone(), [line, 1].into(), [lines, line].into()) };
    TensorMapArg::new(TiledArgs { tile_size: [1, count].into() }, arg, f32::elem_type_native())
}

/// The left operand: the rows, or their gradients.
pub(super) fn left(handle: &Handle, shape: [usize; 2], plan: GroupedPlan) -> TensorMapArg<Tiled> {
    operand(handle, shape, if plan.gemm == Gemm::WeightGradient { DEPTH } else { ROWS })
}

/// The right operand: the groups' matrices, or the rows.
pub(super) fn right(handle: &Handle, shape: [usize; 2], plan: GroupedPlan) -> TensorMapArg<Tiled> {
    operand(handle, shape, if plan.gemm == Gemm::Forward { plan.width } else { DEPTH })
}

/// Results, in boxes of 16 rows × 128 bytes. TMA does not write the parts of a tile outside of a result.
pub(super) fn result(handle: &Handle, [matrices, rows, columns]: [usize; 3], plan: GroupedPlan) -> TensorMapArg<Tiled> {
    // SAFETY: the call compared the sizes with the buffer.
    let arg = unsafe {
        TensorArg::from_raw_parts(handle.clone(), [rows * columns, columns, 1].into(), [matrices, rows, columns].into())
    };
    let tiles = TiledArgs { tile_size: [1, 16, plan.result_panel()].into() };
    let element = if plan.result_bytes() == 2 { bf16::elem_type_native() } else { f32::elem_type_native() };
    TensorMapArg::new(tiles, arg, element).with_swizzle(Swizzle::B128.into())
}
