//! GEMMs of tiles by warpgroup MMAs, and their left operands in registers.
use crate::hopper::mma::{self, Half, PANEL, STEP};
use cubecl::prelude::*;

/// Registers for the left operand of a GEMM with an inner dimension of `block`.
#[cube]
pub fn operand_registers(#[comptime] block: usize) -> Sequence<Array<u32>> {
    let mut registers = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..comptime![block / STEP] {
        registers.push(Array::<u32>::new(4usize));
    }
    registers
}

/// Rounds an accumulator of `block` columns to 16 bits, as the left operand of another GEMM. With `dropped`, a negative
/// number marks an element that dropout drops, and becomes 0.
#[cube]
pub fn pack_operand(
    registers: &mut Sequence<Array<u32>>,
    from: &Array<f32>,
    #[comptime] block: usize,
    #[comptime] dropped: bool,
    #[comptime] element: Half,
) {
    #[unroll]
    for s in 0..comptime![block / STEP] {
        #[unroll]
        for i in 0..4usize {
            let at = comptime![s * 8 + i * 2];
            let mut low = from[at];
            let mut high = from[at + 1];
            if comptime![dropped] {
                low = max(low, 0.0);
                high = max(high, 0.0);
            }
            let packed = mma::pack(low, high, element);
            let target = registers.index_mut(s);
            target[i] = packed;
        }
    }
}

/// Keeps accesses to the operand's registers on their side of this point.
#[cube]
pub fn pin_operand(registers: &mut Sequence<Array<u32>>, #[comptime] block: usize) {
    #[unroll]
    for s in 0..comptime![block / STEP] {
        mma::pin(registers.index_mut(s));
    }
}

/// Starts `acc = a bᵀ` as one group, both operands in shared memory ("SS"): 64 rows of `a`, `block` rows of `b`, both
/// `head_dim` long.
#[cube]
pub fn issue_gemm_ss(
    acc: &mut Array<f32>,
    a: u64,
    b: u64,
    #[comptime] block: usize,
    #[comptime] head_dim: usize,
    #[comptime] element: Half,
) {
    let width = comptime![head_dim.next_multiple_of(PANEL)];
    let a_layout = comptime![mma::k_major(mma::ROWS, width)];
    let b_layout = comptime![mma::k_major(block, width)];
    mma::fill(acc, 0.0, comptime![block / 2]);
    mma::pin(acc);
    mma::fence();
    #[unroll]
    for s in 0..comptime![head_dim / STEP] {
        let a = a + comptime![mma::advance(a_layout, 0, s * STEP)];
        let b = b + comptime![mma::advance(b_layout, 0, s * STEP)];
        mma::mma(acc, a, b, block, a_layout.major, b_layout.major, element);
    }
    mma::commit();
}

/// Starts `acc += a b` as one group, the left operand in registers ("RS"): `a` 64 × `block`, `b` a tile of `block`
/// rows.
#[cube]
pub fn issue_gemm_rs(
    acc: &mut Array<f32>,
    a: &mut Sequence<Array<u32>>,
    b: u64,
    #[comptime] block: usize,
    #[comptime] head_dim: usize,
    #[comptime] element: Half,
) {
    let layout = comptime![mma::mn_major(head_dim.next_multiple_of(PANEL), block)];
    mma::pin(acc);
    pin_operand(a, block);
    mma::fence();
    #[unroll]
    for s in 0..comptime![block / STEP] {
        let b = b + comptime![mma::advance(layout, 0, s * STEP)];
        mma::mma_registers(acc, a.index(s), b, head_dim, layout.major, element);
    }
    mma::commit();
}
