//! The logistic function, of which SiLU, GELU and gates are made.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use std::f32::consts::LOG2_E;

use cubecl::prelude::*;

use crate::hopper::ptx;

/// `1 / (1 + exp(−x))`.
#[cube]
pub(super) fn sigmoid(x: f32) -> f32 {
    ptx::reciprocal(1.0 + ptx::exp2(-x * LOG2_E))
}
