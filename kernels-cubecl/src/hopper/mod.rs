//! The Hopper instructions that the kernels use: warpgroup MMA, TMA, barriers, special functions.

pub mod barrier;
pub mod bulk;
pub mod mma;
pub mod ptx;
pub mod tma;
