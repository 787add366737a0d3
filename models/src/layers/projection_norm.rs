//! RMSNorms of features that are sharded over the tensor-parallel ranks.

use backend_dist::ops::tensor_parallel::{
    Partial, copy_to_tensor_parallel, gather_from_tensor_parallel, reduce_from_tensor_parallel,
};
use backend_dist::ops::{gated_rms_norm, sum_dim};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{DType, Tensor, TensorData};

use super::norm::in_fp32;
use crate::param::{ParamBuilder, Result, TensorParallel};

/// An RMSNorm of features that are sharded over the tensor-parallel ranks: of all of them together, or of groups of them.
/// With fewer shards than ranks, neighbours have the same shard.
#[derive(Module, Debug)]
pub(super) struct ProjectionNorm {
    weight: Param<Tensor<1>>,
    eps: f64,
    /// Of a group, each counted once.
    features: usize,
    /// Groups over all ranks.
    groups: usize,
    /// Ranks that have the same shard.
    copies: usize,
    #[module(skip)]
    parallel: TensorParallel,
    #[module(skip)]
    fp32: bool,
}

impl ProjectionNorm {
    /// Of all `features` together, of which there are `parts` shards.
    pub fn new(params: &mut ParamBuilder, name: &str, features: usize, parts: usize, eps: f64) -> Result<Self> {
        Self::build(params, name, [features, parts, 1], eps)
    }

    /// Of each of `groups` groups of `features`, one shard for each rank. A rank has some groups, or a part of one.
    pub fn of_groups(params: &mut ParamBuilder, name: &str, features: usize, groups: usize, eps: f64) -> Result<Self> {
        let parts = params.place().size;
        Self::build(params, name, [features, parts, groups], eps)
    }

    fn build(params: &mut ParamBuilder, name: &str, [features, parts, groups]: [usize; 3], eps: f64) -> Result<Self> {
        let at = params.place();
        let section = Section::split(format!("{name}.weight"), &[features], 0, parts, at);
        let weight = params.sections(vec![(section, Init::ONES)])?;
        let (parallel, fp32) = (params.parallel().clone(), params.has_fp32_norms());
        Ok(Self { weight, eps, features: features / groups, groups, copies: at.size / parts, parallel, fp32 })
    }

    /// Normalises the rank's features `[s, b, features / parts]`; statistics are at least fp32.
    ///
    /// A sum of squares counts every copy of a shard, so it is divided by the number of copies. Its gradient on a rank
    /// is that of the rank's own heads; all ranks' together, divided likewise, belong to each copy, because the
    /// gradients of copies are summed.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let ([seq, samples, own], dtype) = (x.dims(), x.dtype());
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let groups = self.groups / self.parallel.size().min(self.groups);
        let x = x.cast(wide).reshape([seq, samples, groups, own / groups]);
        let squares = sum_dim(x.clone() * x.clone(), 3).squeeze_dim::<3>(3);
        let mean = self.over_ranks(squares).mul_scalar(((self.features * self.copies) as f64).recip());
        let normed = x.clone() * mean.add_scalar(self.eps).sqrt().recip().unsqueeze_dim(3);
        let [x, normed] = [x, normed].map(|x| x.reshape([seq, samples, own]));
        let normed = match self.fp32 && dtype == DType::F64 {
            true => normed.clone() + (self.rounded(x) - normed.detach()),
            false => normed,
        };
        (normed * self.weight.val().cast(wide).unsqueeze()).cast(dtype)
    }

    /// [`forward`](Self::forward) of `x silu(gate)`, both `[s, b, features / parts]`: one operation if the rank has whole
    /// groups.
    pub fn gated(&self, x: Tensor<3>, gate: Tensor<3>) -> Tensor<3> {
        let (dtype, ranks) = (x.dtype(), self.parallel.size());
        if self.groups >= ranks && !(self.fp32 && dtype == DType::F64) {
            return gated_rms_norm(x, gate, self.weight.val(), self.groups / ranks, self.eps);
        }
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        self.forward(x.cast(wide) * silu(gate.cast(wide))).cast(dtype)
    }

    /// The sums `[s, b, groups]` of the rank's groups over all ranks that have a part of them.
    fn over_ranks(&self, sums: Tensor<3>) -> Tensor<3> {
        let ranks = self.parallel.size();
        if self.groups >= ranks {
            return sums;
        }
        // The rank's part of its one group, in the place of the group among all.
        let group = self.parallel.group.rank() / (ranks / self.groups);
        let places: Vec<f32> = (0..self.groups).map(|at| if at == group { 1.0 } else { 0.0 }).collect();
        let places = Tensor::<1>::from_data(TensorData::new(places, [self.groups]), (&sums.device(), sums.dtype()));
        let all = reduce_from_tensor_parallel(Partial::new(sums * places.unsqueeze()), &self.parallel.group);
        copy_to_tensor_parallel(all, &self.parallel.group).narrow(2, group, 1)
    }

    /// The rank's features as transformers normalises all of them: in fp32, in its order of summation.
    fn rounded(&self, x: Tensor<3>) -> Tensor<3> {
        let ([seq, batch, own], ranks) = (x.dims(), self.parallel.size());
        let parts = ranks / self.copies;
        let all = gather_from_tensor_parallel(x.detach(), &self.parallel.group);
        let once = all.reshape([seq, batch, parts, self.copies, own]).narrow(3, 0, 1);
        let whole = in_fp32(&once.reshape([seq, batch, self.groups, self.features]), self.eps);
        let whole = whole.reshape([seq, batch, parts * own]);
        whole.narrow(2, self.parallel.group.rank() / self.copies * own, own)
    }
}
