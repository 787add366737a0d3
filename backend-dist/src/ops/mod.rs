//! Local fused operations with hand-written backward passes.
//!
//! Every operation exists in three layers:
//!
//! 1. [`LocalKernels`]: forward and gradients on one backend. The default bodies (module `plain`) are the formulas
//!    written with Burn's primitives and serve every backend; module `flex` replaces them with tight loops on the CPU.
//! 2. `LocalOps`: the operations as Burn backend extensions. Concrete backends call their kernels, `Autodiff` records
//!    one node per operation and calls the gradient kernels, computing only the gradients some parent asks for.
//! 3. The public functions of this module, on [`Tensor`](burn::tensor::Tensor).
//!
//! Activations are `[sequence, batch, hidden]`, linear weights `[out, in]`, attention inputs
//! `[sequence, batch, heads, head_dim]`. f32 and f64 are computed in their own precision, bf16 and f16 through f32.

mod api;
mod attended;
mod autodiff;
pub mod conjugate;
pub mod context;
pub(crate) mod copy_engines;
mod cross_entropy;
#[cfg(feature = "cuda")]
mod cuda;
mod determinism;
mod drop_key;
mod extras;
mod flex;
pub mod fp8;
mod fused;
#[cfg(feature = "cuda")]
pub mod grouped;
mod head;
mod head_norms;
mod kernels;
mod latent;
mod local;
pub mod main_grads;
pub mod moe;
mod options;
mod outputs;
#[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "CPU ranks exchange nothing beside products"))]
pub(crate) mod pieces;
mod plain;
mod product;
mod prologue;
mod residual;
mod shares;
mod split;
mod sums;
mod tape;
#[cfg(test)]
mod tests;
#[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "CPU ranks exchange nothing beside products"))]
pub(crate) mod turns;
pub mod weight_grads;

pub use api::{
    add_bias, attention, attention_packed, dropout, embedding, gelu, layer_norm, linear, rms_norm, rope, rope_packed,
    swiglu,
};
pub use attended::{Attended, keep_attended, with_attended};
pub use copy_engines::copy_engines;
pub use cross_entropy::vocab_parallel_cross_entropy;
pub use determinism::deterministic;
pub use drop_key::DropKey;
pub use fused::{LinearOptions, linear_with};
pub use head::{Head, LOGITS_AT_ONCE, linear_cross_entropy, positions_at_once};
pub use head_norms::norm_heads;
pub use kernels::{LocalKernels, NormGrads, NormNeeds};
pub use latent::latent_keys;
pub use options::{AttentionDropout, AttentionOptions, GeluKind, PackedHeads, Rotation};
pub use pieces::is_worth_a_piece;
pub use product::{Entry, Exit};
pub use prologue::Prologue;
pub use residual::Residual;
pub use shares::{shares, softmax};
pub use split::split;
pub use sums::{expand_dim, log_sum_exp, matmul, sum, sum_dim};
pub use tape::{Tape, pull_back};
