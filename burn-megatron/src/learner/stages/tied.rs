//! Parameters that several stages share, such as a tied embedding: their gradient is the sum of all.

use backend_dist::collective::{recv, send};
use backend_dist::comm::Group;
use backend_dist::local::Placements;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use super::Division;

/// `grads` with the sums over the stages that share a parameter. All of them must call it, with the same model.
pub(super) fn sum_tied<M: Module>(
    model: &M,
    grads: GradientsParams,
    division: &Division,
    (pipeline, device): (&Group, &Device),
) -> GradientsParams {
    let mut tied = Tied { grads, division, pipeline, device };
    model.visit(&mut tied);
    tied.grads
}

struct Tied<'a> {
    grads: GradientsParams,
    division: &'a Division,
    pipeline: &'a Group,
    /// Without autodiff.
    device: &'a Device,
}

impl ModuleVisitor for Tied<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(ranks) = self.division.sharers(param.id) else { return };
        let (here, first) = (self.pipeline.rank(), ranks[0]);
        if !param.is_require_grad() || !ranks.contains(&here) {
            return;
        }
        let value = param.base().without_autodiff();
        let (shape, dtype, placements) = (value.dims(), value.dtype(), Placements::of(&value));
        let other = |from| placements.moved(recv(shape, dtype, self.device, from, self.pipeline));
        let own = self.grads.remove::<D>(param.id).unwrap_or_else(|| value.zeros_like());
        // Only the first rank adds, so that all have the same bits.
        let sum = if here == first {
            let sum = ranks[1..].iter().fold(own, |sum, rank| sum + other(*rank));
            ranks[1..].iter().for_each(|rank| send(sum.clone(), *rank, self.pipeline));
            sum
        } else {
            send(own, first, self.pipeline);
            other(first)
        };
        self.grads.register(param.id, sum);
    }
}
