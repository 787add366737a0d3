//! What linear recurrences share, Gated DeltaNet and Mamba-2: borders of documents, the convolution in front, chunks of
//! positions and their decay, states between chunks, and states in the cache.

mod borders;
mod chunks;
mod convolution;
mod scan;
mod steps;

pub(super) use borders::Borders;
pub(super) use chunks::{Chunks, Decays};
pub(super) use convolution::convolve;
pub(super) use scan::{apply, states};
pub(super) use steps::{borders_of, extend};
