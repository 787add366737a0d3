//! Linear layers in FP8: inputs, weights and gradients of outputs are rounded to eight bits with a scale for each
//! tensor, multiplied, and summed up in f32 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022; the recipes
//! are Transformer Engine's).
//!
//! On CUDA the products are cuBLASLt's (compute capability 8.9 or more). On the CPU they are emulated: the same
//! numbers, multiplied in the working type.

mod delayed;
mod experts;
mod groups;
mod kernels;
mod linear;
mod node;
mod pieces;
mod recipe;
mod sharing;
mod weights;

pub use delayed::{DelayedScaling, LayerHistory};
pub use experts::{ExpertCut, ExpertRanks, Fp8Experts};
pub use groups::{Fp8GroupKernels, Groups, QuantizedGroups};
pub use kernels::{Fp8Kernels, Matrix, Precision, Quantized, Scales, Sides};
pub(super) use linear::{Fp8Kept, Fp8Weight, Purpose, backward, forward};
pub use linear::{Fp8Linear, MULTIPLE};
pub use node::{grouped_linear, grouped_swiglu_linear};
pub use recipe::{AmaxAlgorithm, Fp8Format, Fp8Recipe, Fp8Scaling, Number};
pub use sharing::{Sharing, with_sharing};
pub use weights::{weights_changed, weights_may_change};
