//! Parameters that several stages share, such as a tied embedding: their gradient is the sum of all.

use backend_dist::collective::{recv, send};
use backend_dist::comm::Group;
use backend_dist::local::Placements;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use super::Division;

/// `grads` with the sums over the stages that share a parameter, of which data-parallel ranks that do not keep its gradient know
/// nothing. All stages must call it, with the same model.
pub(super) fn sum_tied<M: Module>(
    model: &M,
    grads: GradientsParams,
    (division, is_kept): (&Division, impl Fn(ParamId) -> bool),
    (pipeline, device): (&Group, &Device),
) -> GradientsParams {
    let mut tied = Tied { grads, division, is_kept: &is_kept, pipeline, device };
    model.visit(&mut tied);
    tied.grads
}

struct Tied<'a> {
    grads: GradientsParams,
    division: &'a Division,
    is_kept: &'a dyn Fn(ParamId) -> bool,
    pipeline: &'a Group,
    /// Without autodiff.
    device: &'a Device,
}

impl ModuleVisitor for Tied<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(ranks) = self.division.sharers(param.id) else { return };
        let (here, first) = (self.pipeline.rank(), ranks[0]);
        if !param.is_require_grad() || !ranks.contains(&here) || !(self.is_kept)(param.id) {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use backend_dist::launch::launch;
    use backend_dist::mesh::{Mesh, ParallelLayout};
    use backend_dist::parallelize::Plan;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::SgdConfig;
    use burn::train::{Learner, RegressionOutput};
    use parking_lot::Mutex;

    use crate::learner::stages::{Part, StageRank, Stages, Wanted};
    use crate::learner::zero::Units;

    use super::*;

    /// Both ends have `ends`, and the first has something more: by size the two stages would choose different owners.
    #[derive(Module, Debug)]
    struct Tie {
        large: Linear,
        ends: Linear,
        blocks: Vec<Linear>,
    }

    impl Stages for Tie {
        type Activation = Tensor<2>;

        fn blocks(&self) -> usize {
            self.blocks.len()
        }

        fn owner(&self, path: &str) -> Option<Part> {
            if path.starts_with("ends") { Some(Part::Tied) } else { Part::by_path(path, "large", "blocks", "") }
        }

        fn first(&self, batch: &Tensor<2>) -> Tensor<2> {
            self.ends.forward(self.large.forward(batch.clone()).tanh())
        }

        fn block(&self, index: usize, x: Tensor<2>, _: &Tensor<2>) -> Tensor<2> {
            self.blocks[index].forward(x).tanh()
        }

        fn last(&self, x: Tensor<2>, batch: &Tensor<2>) -> (Tensor<1>, RegressionOutput) {
            let loss = self.ends.forward(x.clone()).powi_scalar(2).mean();
            (loss.clone(), RegressionOutput::new(loss, x, batch.clone()))
        }
    }

    crate::steps_of_stages!(Tie, Tensor<2>, RegressionOutput);

    #[test]
    fn zero_3_has_a_tied_weight_once_in_each_stage_and_trains_it_as_one_rank() {
        let device = Device::flex().autodiff();
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(&device);
        let model = Tie { large: linear(64, 4), ends: linear(4, 4), blocks: (0..2).map(|_| linear(4, 4)).collect() };
        let id = model.ends.weight.id;
        let trained = |layout: &str, device: &Device| {
            let layout: ParallelLayout = layout.parse().unwrap();
            let wanted = Wanted { micro_batches: Some(2), ..Wanted::default() };
            let division = Arc::new(Division::of(&model, &layout, &wanted).unwrap());
            let learner = Mutex::new(Learner::new(model.clone(), SgdConfig::new().init(), 0.1));
            let ranks = launch(&Mesh::new(layout.clone()).unwrap(), &[Device::flex()], |rank| {
                let learner = learner.lock().clone();
                let (plan, units) = (Plan::auto(), Units::auto().keep_below(2));
                let mut stages =
                    StageRank::new(learner, device, (&rank, &plan), (layout.zero, &units), division.clone())?
                        .clipping(Some(0.5));
                for _ in 0..2 {
                    stages.train((1..3).map(|x| Tensor::full([1, 64], x, device)).collect());
                    stages.step();
                }
                let own = rank.coords.dp == division.shared_owner(id, layout.dp.max(1)).unwrap();
                assert_eq!(stages.has_value(id), own || layout.zero < 3);
                Ok(own.then(|| stages.model().ends.weight.base().into_data().iter::<f32>().collect::<Vec<_>>()))
            });
            ranks.unwrap().into_iter().flatten().collect::<Vec<_>>()
        };
        let alone = trained("TP1", &device);
        for device in [device.clone(), device.gradient_checkpointing()] {
            let sharded = trained("PP2 DP2 ZeRO3", &device);
            assert_eq!(sharded.len(), 2);
            for stage in sharded {
                let gap = stage.iter().zip(&alone[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(gap < 1e-6, "{stage:?} instead of {:?}", alone[0]);
            }
        }
    }
}
