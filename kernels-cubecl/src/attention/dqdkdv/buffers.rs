//! Shared memory of the fused kernel.
use crate::hopper::bulk::Quad;
use crate::hopper::mma::Pair;
use cubecl::prelude::*;

/// Shared memory besides the rings of tiles.
#[derive(CubeType)]
pub struct SharedBuffers {
    /// Statistics of the queries in the ring. Of each stage: `-lse · log₂ e` of every query, then `delta`.
    pub lse_delta: Shared<[f32]>,
    /// dS of the last steps.
    pub ds: Shared<[Pair]>,
    /// dQ on its way to the accumulator; each warpgroup stages half of the columns.
    pub dq_stage: Shared<[Quad]>,
    /// Barriers: both warpgroups have written dS.
    pub ds_full: Shared<[u64]>,
}
