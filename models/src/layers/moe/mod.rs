//! Mixtures of experts.

pub mod stats;
