//! Gradients of a rank's stages that are reduced over data-parallel ranks while the backward pass of the last micro-batch
//! continues.

use std::sync::Arc;

use backend_dist::gradients::overlapped::Reducer;
use backend_dist::gradients::place_gradients_of;
use burn::module::{Module, ParamId};
use burn::optim::{GradientsAccumulator, GradientsParams};

use super::Division;
use super::groups::Groups;
use crate::learner::zero::Owners;
use crate::schedule::{Pass, Schedule, Work};

/// A reducer for each chunk of a rank: their last micro-batches come at different times. Those of parameters that several
/// parts use are left for the step, because stages add them first.
pub(super) struct Overlap {
    reducers: Vec<Reducer>,
    division: Arc<Division>,
    here: usize,
    /// Of a step: the micro-batch that each chunk has last.
    last: Vec<usize>,
}

impl Overlap {
    /// In buckets of so many bytes; the model whose gradients are reduced. From ZeRO 1 on only owners get means.
    pub fn new<M: Module>(
        model: M,
        division: &Arc<Division>,
        groups: &Groups,
        (zero, owners, bytes): (u8, &Owners, usize),
    ) -> (Self, M) {
        let here = groups.pp.rank();
        let owner = |id| owners.owner(id).filter(|_| zero > 0);
        let of_chunk = |chunk| {
            let is_of = |id| division.chunk_of(id, here) == Some(chunk);
            Reducer::of_some(&model, &groups.dp, owner, is_of, bytes)
        };
        let reducers: Vec<_> = (0..division.chunks(here).len()).map(of_chunk).collect();
        let model = reducers.iter().fold(model, |model, reducer| reducer.attach(model));
        (Self { reducers, division: division.clone(), here, last: Vec::new() }, model)
    }

    /// Whether gradients of a parameter are reduced here.
    pub fn reduces(&self, id: ParamId) -> bool {
        self.division.chunk_of(id, self.here).is_some()
    }

    /// Begins the passes of a step.
    pub fn begin_step(&mut self, schedule: &Schedule) {
        self.last = vec![0; self.reducers.len()];
        for work in schedule.passes(self.here).filter(|work| work.pass != Pass::Forward) {
            self.last[work.chunk] = work.micro_batch;
        }
    }

    /// The reducer of a pass, if it is one of the last micro-batch of its chunk.
    fn of(&self, work: Work) -> Option<&Reducer> {
        (self.last[work.chunk] == work.micro_batch).then(|| &self.reducers[work.chunk])
    }

    /// How many buckets have left during passes since the last call.
    #[cfg(test)]
    pub fn during_passes(&self) -> usize {
        self.reducers.iter().map(|reducer| reducer.take_counts().during).sum()
    }

    /// Before a pass. In a backward pass gradients are added to those of earlier micro-batches, if `adds_up`.
    pub fn begin_pass<M: Module>(
        &self,
        model: &M,
        work: Work,
        earlier: &mut GradientsAccumulator<M>,
        (adds_up, groups): (bool, &Groups),
    ) {
        let Some(reducer) = self.of(work) else { return };
        if work.pass == Pass::Forward {
            return reducer.begin_pass(model, GradientsParams::new());
        }
        if !adds_up {
            reducer.resume(model, GradientsParams::new());
            return;
        }
        let is_of = |id| self.division.chunk_of(id, self.here) == Some(work.chunk);
        let earlier_ones = place_gradients_of(model, earlier.grads(), &groups.tp, is_of);
        let others = reducer.resume(model, earlier_ones);
        earlier.accumulate(model, others);
    }

    /// After a pass.
    pub fn end_pass(&self, work: Work) {
        if let Some(reducer) = self.of(work) {
            reducer.pause();
        }
    }

    /// After the passes of a step: `grads` with the means that this rank gets.
    pub fn end_step<M: Module>(&self, model: &M, grads: GradientsParams, groups: &Groups) -> GradientsParams {
        let grads = place_gradients_of(model, grads, &groups.tp, |id| self.reduces(id));
        self.reducers.iter().fold(grads, |grads, reducer| reducer.end_pass(model, grads))
    }
}

#[cfg(test)]
mod tests {
    use backend_dist::launch::launch;
    use backend_dist::mesh::{Mesh, ParallelLayout};
    use backend_dist::parallelize::Plan;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::SgdConfig;
    use burn::tensor::{Device, Tensor};
    use burn::train::{Learner, RegressionOutput};
    use parking_lot::Mutex;

    use crate::learner::stages::{Part, StageRank, Stages, Wanted};
    use crate::learner::zero::Units;

    use super::*;

    #[derive(Module, Debug)]
    struct Chain {
        blocks: Vec<Linear>,
    }

    impl Stages for Chain {
        type Activation = Tensor<2>;

        fn blocks(&self) -> usize {
            self.blocks.len()
        }

        fn owner(&self, path: &str) -> Option<Part> {
            Part::by_path(path, "first", "blocks", "last")
        }

        fn first(&self, batch: &Tensor<2>) -> Tensor<2> {
            batch.clone()
        }

        fn block(&self, index: usize, x: Tensor<2>, _: &Tensor<2>) -> Tensor<2> {
            self.blocks[index].forward(x).tanh()
        }

        fn last(&self, x: Tensor<2>, batch: &Tensor<2>) -> (Tensor<1>, RegressionOutput) {
            let loss = x.clone().mean();
            (loss.clone(), RegressionOutput::new(loss, x, batch.clone()))
        }
    }

    crate::steps_of_stages!(Chain, Tensor<2>, RegressionOutput);

    /// Of a step of two micro-batches: every weight and every bias leaves while a pass continues.
    #[test]
    fn buckets_leave_during_the_backward_pass_of_the_last_micro_batch() {
        let device = Device::flex().autodiff();
        let chain = Chain { blocks: (0..4).map(|_| LinearConfig::new(4, 4).init(&device)).collect() };
        for layout in ["PP2 DP2", "PP2 VPP2 DP2 ZeRO1", "PP2 DP2 ZeRO2"] {
            let layout: ParallelLayout = layout.parse().unwrap();
            let wanted = Wanted { micro_batches: Some(2), ..Wanted::default() };
            let division = Arc::new(Division::of(&chain, &layout, &wanted).unwrap());
            let learner = Mutex::new(Learner::new(chain.clone(), SgdConfig::new().init(), 0.1));
            let counts = launch(&Mesh::new(layout.clone()).unwrap(), &[Device::flex()], |rank| {
                let learner = learner.lock().clone();
                let (plan, units) = (Plan::auto(), Units::auto());
                let stages = StageRank::new(learner, &device, (&rank, &plan), (layout.zero, &units), division.clone())?;
                let mut stages = stages.overlapping(Some(1));
                let mut counts = Vec::new();
                for _ in 0..2 {
                    stages.train(vec![Tensor::ones([1, 4], &device); 2]);
                    stages.step();
                    counts.push(stages.buckets_during_passes());
                }
                Ok(counts)
            });
            // Two blocks on each stage.
            assert_eq!(counts.unwrap(), vec![vec![4; 2]; 4], "{layout}");
        }
    }
}
