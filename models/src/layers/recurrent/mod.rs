//! What linear recurrences share, Gated DeltaNet and Mamba-2: borders of documents, the convolution in front, heads for
//! positions where ranks share a sequence, and states in the cache.

mod borders;
mod convolution;
mod head_parallel;
mod steps;

pub(super) use borders::Borders;
pub(super) use convolution::{convolve, tail};
pub(super) use head_parallel::{Features, HeadParallel};
pub use steps::{Mixed, Recurrence};
