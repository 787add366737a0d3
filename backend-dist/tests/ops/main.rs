//! Every local operation against the same formula in plain Burn with Burn's own autodiff.

mod attention;
mod bias;
mod blockwise;
mod compare;
mod cross_entropy;
mod finite;
mod fp8;
mod fp8_blocks;
mod fp8_experts;
mod fused;
mod half;
mod low_rank_swiglu;
mod moe;
mod pointwise;
mod residual;
mod shared_input;
mod tape;
