//! Products of tiles, and their left operands in registers.
use crate::hopper::mma::{self, Half, PANEL, STEP};
use cubecl::prelude::*;

/// Arrays of registers for the left operand of a product over `block` elements.
#[cube]
pub fn operand(#[comptime] block: usize) -> Sequence<Array<u32>> {
    let mut registers = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..comptime![block / STEP] {
        registers.push(Array::<u32>::new(4usize));
    }
    registers
}

/// Rounds an accumulator of `block` columns to 16 bits, as the left operand of another product. With `dropped`,
/// negative numbers stand for ones that were dropped.
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

/// Starts `scores = a bᵀ` as one group: 64 rows of `a`, `block` rows of `b`, both `head_dim` long.
#[cube]
pub fn issue_scores(
    scores: &mut Array<f32>,
    a: u64,
    b: u64,
    #[comptime] block: usize,
    #[comptime] head_dim: usize,
    #[comptime] element: Half,
) {
    let width = comptime![head_dim.next_multiple_of(PANEL)];
    let a_layout = comptime![mma::k_major(mma::ROWS, width)];
    let b_layout = comptime![mma::k_major(block, width)];
    mma::fill(scores, 0.0, comptime![block / 2]);
    mma::pin(scores);
    mma::fence();
    #[unroll]
    for s in 0..comptime![head_dim / STEP] {
        let a = a + comptime![mma::advance(a_layout, 0, s * STEP)];
        let b = b + comptime![mma::advance(b_layout, 0, s * STEP)];
        mma::mma(scores, a, b, block, a_layout.major, b_layout.major, element);
    }
    mma::commit();
}

/// Starts `sum += a b` as one group: `a` 64 × `block` in registers, `b` a tile of `block` rows.
#[cube]
pub fn issue_product(
    sum: &mut Array<f32>,
    a: &mut Sequence<Array<u32>>,
    b: u64,
    #[comptime] block: usize,
    #[comptime] head_dim: usize,
    #[comptime] element: Half,
) {
    let layout = comptime![mma::mn_major(head_dim.next_multiple_of(PANEL), block)];
    mma::pin(sum);
    pin_operand(a, block);
    mma::fence();
    #[unroll]
    for s in 0..comptime![block / STEP] {
        let b = b + comptime![mma::advance(layout, 0, s * STEP)];
        mma::mma_registers(sum, a.index(s), b, head_dim, layout.major, element);
    }
    mma::commit();
}
