//! Shared by the attention kernels: TMA rings, GEMMs of tiles, masks and dropout, the epilogue.
mod epilogue;
mod gemm;
mod mask;
mod tma_ring;

pub use epilogue::store;
pub use gemm::{issue_gemm_rs, issue_gemm_ss, operand_registers, pack_operand, pin_operand};
pub use mask::{MASKED, RowDropoutKeys, apply_mask, is_kept, row_dropout_keys};
pub use tma_ring::{Ring, Slot, fetch, load, offset, release, ring, slot, wait_full};
