//! Gradients of parameters that one data-parallel rank owns.

use backend_dist::fully_shard::Owners;
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::Redistribute;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// The gradients that the fullest of `ranks` data-parallel ranks owns under ZeRO, with `tp` tensor-parallel ranks; one rank
/// owns all.
pub fn of_fullest<M: Module>(model: &M, gradients: GradientsParams, [ranks, tp]: [usize; 2]) -> GradientsParams {
    let owners = Owners::of(model, ranks);
    let parts = (0..ranks).map(|_| (0, GradientsParams::new())).collect();
    let mut split = Split { owners, tp, gradients, parts };
    model.visit(&mut split);
    let (_, fullest) = split.parts.into_iter().max_by_key(|(bytes, _)| *bytes).expect("a group has ranks");
    fullest
}

struct Split {
    owners: Owners,
    tp: usize,
    gradients: GradientsParams,
    /// Of every rank, with the bytes that it holds.
    parts: Vec<(usize, GradientsParams)>,
}

impl ModuleVisitor for Split {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (Some(owner), Some(gradient)) = (self.owners.owner(param.id), self.gradients.remove::<D>(param.id)) else {
            return;
        };
        let (bytes, part) = &mut self.parts[owner];
        let shards = if gradient.placement(Axis::Tp).is_shard() { self.tp } else { 1 };
        *bytes += gradient.shape().num_elements() / shards * gradient.dtype().size();
        part.register::<D>(param.id, gradient);
    }
}

/// Other gradients like `gradients`, for one more step.
pub fn again<M: Module>(model: &M, gradients: &GradientsParams) -> GradientsParams {
    let mut copy = Copy { gradients, copies: GradientsParams::new() };
    model.visit(&mut copy);
    copy.copies
}

struct Copy<'a> {
    gradients: &'a GradientsParams,
    copies: GradientsParams,
}

impl ModuleVisitor for Copy<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.copies.register::<D>(param.id, gradient.mul_scalar(1));
        }
    }
}
