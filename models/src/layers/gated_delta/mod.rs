//! Gated DeltaNet: linear attention whose state is a matrix for each head, which forgets and corrects itself.
//!
//! Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464), as Qwen3-Next
//! has it (transformers' `modeling_qwen3_next.py`): queries, keys and values pass through a short causal convolution and
//! SiLU; queries and keys are divided by their length; the output is normalised and gated.

mod layer;

pub use layer::{GatedDeltaConfig, GatedDeltaNet};
