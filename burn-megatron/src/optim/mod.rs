//! The optimizer: AdamW with Megatron's rules, gradient buffers, and the global-norm clip.

pub mod clip;
pub mod decay;
