//! Linear layers in FP8: inputs, weights and output gradients are rounded to eight bits with one scale per tensor or
//! block, multiplied, and accumulated in f32 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022; the recipes are
//! Transformer Engine's).
//!
//! On CUDA the GEMMs are cuBLASLt's (compute capability 8.9 or more). On the CPU they are emulated: the same values,
//! multiplied in the working type.

mod delayed;
mod expert_gemms;
mod experts;
mod groups;
mod kernels;
mod known_amax;
mod layers;
mod linear;
mod linear_gemms;
mod node;
mod recipe;
mod sharing;
mod told_gradient;
mod weights;

pub use delayed::{DelayedScaling, LayerHistory};
pub use experts::{ExpertRanks, ExpertSharding, Fp8Experts};
pub use groups::{Form, Fp8GroupKernels, Groups, QuantizedGroups, RowsOf};
pub use kernels::{Fp8Kernels, Matrix, Precision, Quantized, Scales, Scaling, Sides};
pub use kernels_cubecl::fp8::{BLOCK, Granularity};
pub use known_amax::KnownAmax;
pub use layers::Fp8Layers;
pub use linear::Fp8Linear;
pub(super) use linear_gemms::{Fp8Weight, Purpose, SavedFp8, backward, forward};
pub use node::{grouped_activated_linear, grouped_linear};
pub use recipe::{AmaxAlgorithm, Fp8Format, Fp8Recipe, Fp8Scaling, MULTIPLE, Number};
pub use sharing::Sharing;
pub use told_gradient::ToldGradient;
