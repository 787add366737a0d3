//! The Hopper instructions the kernels are written in: warpgroup MMA, special functions, named barriers.

pub mod bulk;
pub mod mma;
pub mod ptx;
pub mod ring;
pub mod store;
