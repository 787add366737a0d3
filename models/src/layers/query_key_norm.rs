//! RMSNorms of queries and keys before they are rotated: of each head (Qwen3, Gemma 3), or of all heads together
//! (OLMo 2), whose sum of squares the tensor-parallel ranks add up.

use backend_dist::ops::PackedHeads;
use burn::module::Module;

use super::norm::{Norm, NormKind};
use super::projection_norm::ProjectionNorm;
use crate::param::{ParamBuilder, Result};

/// Over which features a query or key is normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOver {
    /// Those of each head, with one weight for all heads.
    Head,
    /// Those of all heads, as the projection gives them.
    Projection,
}

/// The norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryKeyNorm {
    /// Over which features.
    pub over: NormOver,
    /// Which RMSNorm; over projections there is only [`NormKind::Rms`].
    pub kind: NormKind,
    /// Epsilon.
    pub eps: f64,
}

/// The layers of a [`QueryKeyNorm`]: of the queries and of the keys.
#[derive(Module, Debug)]
pub(super) enum QueryKeyNorms {
    Heads([Norm; 2]),
    Projections([ProjectionNorm; 2]),
}

impl QueryKeyNorms {
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        (PackedHeads { heads, kv_heads }, head_dim): (PackedHeads, usize),
        norm: QueryKeyNorm,
    ) -> Result<Self> {
        let [q, k] = ["q_norm", "k_norm"].map(|part| format!("{name}.{part}"));
        Ok(match norm.over {
            NormOver::Head => Self::Heads([
                Norm::of_heads(params, &q, head_dim, norm.kind, norm.eps)?,
                Norm::of_heads(params, &k, head_dim, norm.kind, norm.eps)?,
            ]),
            NormOver::Projection => {
                let ranks = params.place().size;
                Self::Projections([
                    ProjectionNorm::new(params, &q, heads * head_dim, ranks, norm.eps)?,
                    ProjectionNorm::new(params, &k, kv_heads * head_dim, ranks.min(kv_heads), norm.eps)?,
                ])
            }
        })
    }
}
