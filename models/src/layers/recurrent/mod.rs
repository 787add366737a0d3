//! What linear recurrences share, Gated DeltaNet and Mamba-2: borders of documents, the convolution in front, heads for
//! positions where ranks share a sequence, and states in the cache; and of Gated DeltaNet chunks of positions, their decay, and the states between them.

mod borders;
mod chunks;
mod convolution;
mod head_parallel;
mod scan;
mod steps;

pub(super) use borders::Borders;
pub(super) use chunks::{Chunks, Decays};
pub(super) use convolution::{convolve, tail};
pub(super) use head_parallel::{Features, HeadParallel};
pub(super) use scan::states;
pub(super) use steps::extend;
