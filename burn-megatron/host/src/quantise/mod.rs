//! Weights of linear layers in few bits: rounded to the nearest number, or with GPTQ, which lets the weights that are not
//! rounded yet make up for the errors of those that are.
//!
//! Numbers on host memory only: no tensors, no files.

mod cholesky;
mod e4m3;
mod matrix;
mod pack;
mod scheme;

pub use cholesky::{Factor, NotDefinite};
pub use e4m3::{e4m3, to_e4m3};
pub use matrix::{Quantised, quantise};
pub use pack::{pack, packed_len, unpack};
pub use scheme::{Grid, Scheme};
