//! Grouped GEMMs of FP8 numbers in one launch.
//!
//! Warpgroup MMAs read FP8 tiles K-major alone, so both operands have the dimension that is summed contiguous: those of a
//! weight gradient are transposes `[columns, rows of all groups]`. To TMA and shared memory two numbers are one of 16 bits.
mod call;
pub mod kernel;
mod load;
mod plan;
mod scales;

pub use call::{Fp8Call, Fp8Operand};
pub use plan::{Fp8Plan, Scaling, Sums};
pub use scales::APART;
