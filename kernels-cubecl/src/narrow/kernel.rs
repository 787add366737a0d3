//! The same on a GPU.

use super::dynamic::{BLOCK, LEAST};
use super::{INFINITY, MULTIPLIERS};
use crate::pointwise::F32x4;
use cubecl::prelude::*;

/// Four 16-bit numbers, two in each word, the first in the lower half.
pub type Halves = Vector<u32, Const<2>>;

#[cube]
fn mix(bits: u32) -> u32 {
    let first = (bits ^ (bits >> 16u32)) * comptime![MULTIPLIERS[0]].runtime();
    let second = (first ^ (first >> 15u32)) * comptime![MULTIPLIERS[1]].runtime();
    second ^ (second >> 16u32)
}

/// [`super::Place::random`] of element `i`, given the five numbers of place number `tensor`.
#[cube]
pub fn random(places: &[u32], tensor: u32, i: u32, step: u32) -> u32 {
    let at = (tensor * 5) as usize;
    let local = places[at + 1] + i;
    let block = places[at + 2];
    let index = local / block * places[at + 3] + places[at + 4] + local % block;
    mix(mix(index ^ places[at]) ^ step)
}

#[cube]
fn is_nan(bits: u32) -> bool {
    (bits & 0x7fff_ffffu32) > comptime![INFINITY].runtime()
}

/// A bf16 number in fp32, by stochastic rounding with the lower half of `random`.
#[cube]
pub fn round(number: f32, random: u32) -> f32 {
    let bits = u32::reinterpret(number);
    let rounded = (bits + (random & 0xffffu32)) & 0xffff_0000u32;
    f32::reinterpret(select(is_nan(bits), bits | 0x40_0000u32, rounded))
}

/// One of four 16-bit numbers.
#[cube]
pub fn half(halves: Halves, #[comptime] i: usize) -> u32 {
    let word = halves.extract(comptime![i / 2]);
    if comptime![i % 2 == 0] { word & 0xffffu32 } else { word >> 16u32 }
}

/// Two 16-bit numbers in a word.
#[cube]
pub fn pack(low: u32, high: u32) -> u32 {
    (low & 0xffffu32) | (high << 16u32)
}

/// The fp32 number of a weight and a remainder.
#[cube]
pub fn join(weight: u32, remainder: u32) -> f32 {
    f32::reinterpret(((weight - (remainder >> 15u32)) << 16u32) | remainder)
}

/// The weight and the remainder of an fp32 number, 16 bits each.
#[cube]
pub fn split(number: f32) -> (u32, u32) {
    let bits = u32::reinterpret(number);
    let nan = is_nan(bits);
    let weight = select(nan, (bits >> 16u32) | 0x40u32, ((bits + 0x8000u32) >> 16u32) & 0xffffu32);
    (weight, select(nan, 0u32, bits & 0xffffu32))
}

/// The fp32 numbers of four weights and remainders.
#[cube]
pub fn join_vector(upper: Halves, lower: Halves) -> F32x4 {
    let mut joined = F32x4::empty();
    #[unroll]
    for i in 0..4usize {
        joined.insert(i, join(half(upper, i), half(lower, i)));
    }
    joined
}

/// The weights and the remainders of four fp32 numbers.
#[cube]
pub fn split_vector(numbers: F32x4) -> (Halves, Halves) {
    let mut upper = Halves::empty();
    let mut lower = Halves::empty();
    #[unroll]
    for i in 0..2usize {
        let (low, low_rest) = split(numbers.extract(comptime![2 * i]));
        let (high, high_rest) = split(numbers.extract(comptime![2 * i + 1]));
        upper.insert(i, pack(low, high));
        lower.insert(i, pack(low_rest, high_rest));
    }
    (upper, lower)
}

/// Numbers of a [`super::dynamic::Map`] in [`super::dynamic::Map::words`]: the entries, then the thresholds.
pub const MAP: usize = 2 * BLOCK;

/// [`super::dynamic::Map::scale`] of a block, given its greatest magnitude.
#[cube]
pub fn scale_of(most: f32) -> f32 {
    select(most < comptime![LEAST], 0.0f32, most)
}

/// What the numbers of a block with this scale are multiplied by before they are looked up.
#[cube]
pub fn inverse(scale: f32) -> f32 {
    select(scale > 0.0f32, 1.0f32 / scale, 0.0f32)
}

/// The number of one of four codes, by the map that begins at `first` of the tables.
#[cube]
pub fn decode(tables: &Shared<[f32]>, #[comptime] first: usize, codes: u32, #[comptime] i: usize, scale: f32) -> f32 {
    tables[comptime![first] + ((codes >> comptime![8 * i as u32]) & 0xffu32) as usize] * scale
}

/// The code of a number that is divided by its scale already: how many thresholds are below it.
#[cube]
pub fn encode(tables: &Shared<[f32]>, #[comptime] first: usize, scaled: f32) -> u32 {
    let mut code = 0u32;
    #[unroll]
    for i in 0..8u32 {
        let step = comptime![128u32 >> i];
        let threshold = tables[comptime![first + BLOCK] + (code + step - 1u32) as usize];
        if threshold < scaled {
            code += step;
        }
    }
    code
}
