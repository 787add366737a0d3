//! Exponentials and logarithms. In f32 they use the hardware's instructions, so that only f64 needs CUDA's libdevice.
use crate::hopper::ptx;
use core::f32::consts::{LN_2, LOG2_E};
use cubecl::prelude::*;

/// `eˣ`. In f32 its relative error is 2⁻²² and, for the rounding of `x log₂ e`, `|x|` 2⁻²⁴.
#[cube]
pub fn exp<A: Float>(x: A) -> A {
    let bytes = A::size();
    if comptime![bytes == 4] { A::cast_from(ptx::exp2(f32::cast_from(x) * LOG2_E)) } else { x.exp() }
}

/// The natural logarithm. In f32 its absolute error is 2⁻²² near 1, the relative one 2⁻²³ elsewhere.
#[cube]
pub fn ln<A: Float>(x: A) -> A {
    let bytes = A::size();
    if comptime![bytes == 4] { A::cast_from(ptx::log2(f32::cast_from(x)) * LN_2) } else { x.ln() }
}
