//! The search for the least number of a row that is drawn from, by bits.

use cubecl::prelude::*;

use crate::hopper::ptx::exp2;
use crate::pointwise::{CubeShape, Vec8, cube_sums};

/// The last bits of each number of this type as an f32, all of them zero.
pub fn zeros<E>() -> u32 {
    // Of bf16, and of f16, whose fraction has 10 of 23 bits.
    if size_of::<E>() == 4 { 0 } else { 13 }
}

/// A row and how it is weighed.
#[derive(CubeType, Clone, Copy)]
pub struct Row {
    /// Its first vector.
    pub first: u32,
    /// Its vectors.
    pub width: u32,
    /// Its greatest number, which has the weight 1.
    pub top: f32,
    /// log₂ e over the temperature.
    pub scale: f32,
}

/// The weight of a number.
#[cube]
pub fn weight(number: f32, row: &Row) -> f32 {
    exp2((number - row.top) * row.scale)
}

/// The place of a number among all, without its last bits: greater numbers have greater places.
#[cube]
pub fn place_of(number: f32, #[comptime] zeros: u32) -> u32 {
    let bits = u32::reinterpret(number);
    select(bits >= 0x8000_0000u32, !bits, bits | 0x8000_0000u32) >> zeros
}

/// The least number at a place, whatever its last bits.
#[cube]
pub fn least_at(place: u32, #[comptime] zeros: u32) -> f32 {
    let bits = place << zeros;
    f32::reinterpret(select(bits >= 0x8000_0000u32, bits & 0x7fff_ffffu32, !bits))
}

/// The number at a place whose last bits are zero.
#[cube]
pub fn number_at(place: u32, #[comptime] zeros: u32) -> f32 {
    f32::reinterpret((u32::reinterpret(least_at(place, zeros)) >> zeros) << zeros)
}

/// The sums over the row's numbers from `low` on and from `high` on: of their weights, or how many they are.
#[cube]
pub fn sums_from<E: Float>(
    logits: &[Vec8<E>],
    row: &Row,
    low: f32,
    high: f32,
    scratch: &mut Shared<[f32]>,
    #[comptime] weighs: bool,
    #[comptime] cube: CubeShape,
) -> (f32, f32) {
    let mut from_low = 0.0f32;
    let mut from_high = 0.0f32;
    let mut column = UNIT_POS;
    while column < row.width {
        let vector = logits[(row.first + column) as usize];
        #[unroll]
        for i in 0..8usize {
            let number = f32::cast_from(vector.extract(i));
            if comptime![weighs] {
                // Most tokens of a trained model are far below, whose weights need not be known.
                if number >= low {
                    let each = weight(number, row);
                    from_low += each;
                    from_high += select(number >= high, each, 0.0f32);
                }
            } else {
                from_low += select(number >= low, 1.0f32, 0.0f32);
                from_high += select(number >= high, 1.0f32, 0.0f32);
            }
        }
        column += CUBE_DIM_X;
    }
    let sums = cube_sums(from_low, from_high, scratch, 0u32, cube);
    // The next call writes there.
    sync_cube();
    sums
}

/// The last place from `low` on from which on the sum is at least `goal`, and the sum from the next one on. From `low` on
/// it is.
#[cube]
pub fn last_place<E: Float>(
    logits: &[Vec8<E>],
    row: &Row,
    low: u32,
    goal: f32,
    scratch: &mut Shared<[f32]>,
    #[comptime] weighs: bool,
    #[comptime] zeros: u32,
    #[comptime] cube: CubeShape,
) -> (u32, f32) {
    let mut low = low;
    let mut high = place_of(row.top, zeros) + 1;
    let mut above = 0.0f32;
    while high - low > 1 {
        let left = high - low;
        let (third, other) = (low + max(left / 3, 1u32), low + max(left * 2 / 3, 1u32));
        let (from_third, from_other) =
            sums_from(logits, row, least_at(third, zeros), least_at(other, zeros), scratch, weighs, cube);
        if from_other >= goal {
            low = other;
        } else if from_third >= goal {
            low = third;
            high = other;
            above = from_other;
        } else {
            high = third;
            above = from_third;
        }
    }
    (low, above)
}
