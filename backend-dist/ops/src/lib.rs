//! Local fused operations with hand-written backward passes.
//!
//! Every operation has three layers:
//!
//! 1. [`LocalKernels`]: forward and gradients on one backend. The default bodies (module `plain`) are the formulas
//!    written with Burn's primitives and serve every backend; module `flex` replaces them with tight loops on the CPU.
//! 2. `Operation`: the forward pass, what it saves, and the backward pass, over the kernels of any backend. One backend
//!    extension of Burn runs all operations; `Autodiff` records one node for each, and computes only the gradients that
//!    some parent needs.
//! 3. The public functions of this module, on [`Tensor`](burn::tensor::Tensor).
//!
//! Activations are `[sequence, batch, hidden]`, linear weights `[out, in]`, attention inputs
//! `[sequence, batch, heads, head_dim]`. f32 and f64 are computed in their own precision, bf16 and f16 through f32.

mod api;
mod attention;
mod attention_masks;
pub mod blockwise;
pub mod context;
mod convolution;
#[cfg(feature = "cuda")]
mod cuda;
pub mod decode;
pub mod draw;
mod dropout_mask;
mod dtype;
mod flex;
pub mod fp8;
mod gated_delta;
mod gated_norm;
#[cfg(feature = "cuda")]
pub mod grouped;
mod head_norms;
mod kernels;
mod latent;
mod local;
mod low_rank;
mod low_rank_swiglu;
pub mod main_grads;
mod masked_attention;
pub mod moe;
mod operation;
mod options;
mod pass;
mod plain;
mod prologue;
mod reductions;
mod residual;
mod saved_attention;
mod secondary_outputs;
mod shared_input;
mod softmax;
mod split;
mod ssd;
mod stash;
mod step;
mod tape;
pub mod tensor_parallel;
#[cfg(test)]
mod tests;
pub mod weight_grads;

pub use api::{
    add_bias, dropout, embedding, geglu, gelu, layer_norm, linear, rms_norm, rope, rope_packed, softcap, squared_relu,
    swiglu,
};
pub use attention::{attention, attention_packed};
pub use attention_masks::{AttentionMasks, Kept};
pub use convolution::causal_convolution;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub use cuda::{
    Arriving, begin_gather, collective_by_dma, gemm_and_collective, gemm_of_arriving, packed, times_small_matrix,
};
pub use dropout_mask::DropoutMask;
pub use gated_delta::{GatedDeltaHeads, GatedDeltaInputs, gated_delta, gated_delta_with_states};
pub use gated_norm::gated_rms_norm;
pub use head_norms::norm_heads;
pub use kernels::{LocalKernels, NormGrads, NormNeeds};
pub use latent::latent_keys;
pub use layouts::sizes::{LOGITS_AT_ONCE, positions_at_once};
pub use low_rank::add_linear;
pub use low_rank_swiglu::{SwiGluNeighbours, low_rank_swiglu};
pub use masked_attention::MaskedAttentionKernels;
pub use options::{AttentionDropout, AttentionOptions, GeluKind, PackedHeads, Rms, Rotation};
pub use pass::{PassContext, PassKind};
pub use prologue::Prologue;
pub use reductions::{expand_dim, log_sum_exp, matmul, matmul_mixed, sum, sum_dim};
pub use residual::Residual;
pub use saved_attention::{CoreAttention, SavedAttention};
pub use shared_input::SharedInput;
pub use softmax::{normalize_sum, softmax};
pub use split::split;
pub use ssd::{SsdHeads, SsdInputs, ssd, ssd_with_states};
pub use stash::HandOvers;
pub use tape::{Tape, pull_back};
pub use tensor_parallel::cross_entropy::vocab_parallel_cross_entropy;
pub use tensor_parallel::fused::{LinearOptions, linear_with};
pub use tensor_parallel::gemm::{InputCollective, OutputCollective};
pub use tensor_parallel::head::{Head, linear_cross_entropy};

macro_rules! kernels {
    ($($family:path),+ $(,)?) => {
        /// All kernels of a backend without autodiff.
        pub(crate) trait Kernels: $($family +)+ {}

        impl<B: $($family +)+> Kernels for B {}
    };
}

kernels! {
    context::SinkKernels, convolution::ConvolutionKernels, fp8::Fp8GroupKernels, gated_delta::node::GatedDeltaKernels,
    gated_norm::GatedNormKernels, head_norms::HeadNormKernels, latent::LatentKernels,
    low_rank::LowRankKernels, moe::BiasKernels, moe::MoeKernels, softmax::NormalizeKernels, split::SplitKernels,
    ssd::node::SsdKernels, tensor_parallel::gemm::Gemms,
}
