//! RMSNorms of queries and keys before they are rotated: of each head (Qwen3, Gemma 3), or of all heads together
//! (OLMo 2), whose sum of squares the tensor-parallel ranks add up.

use backend_dist::ops::PackedHeads;
use backend_dist::ops::conjugate::{
    Partial, copy_to_tensor_parallel, gather_from_tensor_parallel, reduce_from_tensor_parallel,
};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};

use super::norm::{Norm, NormKind, in_fp32};
use crate::param::{BuildError, ParamBuilder, TensorParallel};

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
    ) -> Result<Self, BuildError> {
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

/// An RMSNorm of features that are sharded over the tensor-parallel ranks. With fewer shards than ranks, neighbours
/// have the same shard.
#[derive(Module, Debug)]
pub(super) struct ProjectionNorm {
    weight: Param<Tensor<1>>,
    eps: f64,
    /// Of all ranks, each counted once.
    features: usize,
    /// Ranks that have the same shard.
    copies: usize,
    #[module(skip)]
    parallel: TensorParallel,
    #[module(skip)]
    fp32: bool,
}

impl ProjectionNorm {
    fn new(params: &mut ParamBuilder, name: &str, features: usize, parts: usize, eps: f64) -> Result<Self, BuildError> {
        let at = params.place();
        let section = Section::split(format!("{name}.weight"), &[features], 0, parts, at);
        let weight = params.sections(vec![(section, Init::ONES)])?;
        let (parallel, fp32) = (params.parallel().clone(), params.has_fp32_norms());
        Ok(Self { weight, eps, features, copies: at.size / parts, parallel, fp32 })
    }

    /// Normalises the rank's features `[s, b, features / parts]`; statistics are at least fp32.
    ///
    /// A sum of squares counts every copy of a shard, so it is divided by the number of copies. Its gradient on a rank
    /// is that of the rank's own heads; all ranks' together, divided likewise, belong to each copy, because the
    /// gradients of copies are summed.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = x.dtype();
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let x = x.cast(wide);
        let squares = (x.clone() * x.clone()).sum_dim(2);
        let all = reduce_from_tensor_parallel(Partial::new(squares), &self.parallel.group);
        let all = copy_to_tensor_parallel(all, &self.parallel.group);
        let mean = all.mul_scalar(((self.features * self.copies) as f64).recip());
        let normed = x.clone() * mean.add_scalar(self.eps).sqrt().recip();
        let normed = match self.fp32 && dtype == DType::F64 {
            true => normed.clone() + (self.rounded(x) - normed.detach()),
            false => normed,
        };
        (normed * self.weight.val().cast(wide).unsqueeze()).cast(dtype)
    }

    /// The rank's features as transformers normalises all of them: in fp32, in its order of summation.
    fn rounded(&self, x: Tensor<3>) -> Tensor<3> {
        let ([seq, batch, own], ranks) = (x.dims(), self.parallel.size());
        let parts = ranks / self.copies;
        let all = gather_from_tensor_parallel(x.detach(), &self.parallel.group);
        let once = all.reshape([seq, batch, parts, self.copies, own]).narrow(3, 0, 1);
        let whole = in_fp32(&once.reshape([seq, batch, parts * own]), self.eps);
        whole.narrow(2, self.parallel.group.rank() / self.copies * own, own)
    }
}
