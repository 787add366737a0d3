//! The same on a GPU.

use super::{INFINITY, MULTIPLIERS};
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
