//! ZeRO among the data-parallel ranks with the same stages.

use std::collections::HashSet;
use std::sync::Arc;

use backend_dist::comm::Group;
use backend_dist::fully_shard::FullyShard;
use backend_dist::gradients::{average_gradients_of, clip_grad_norm, place_gradients};
use burn::module::{Module, ParamId};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::Device;

use super::Division;
use super::groups::Groups;
use super::overlap::Overlap;
use crate::learner::zero::{Owners, Units, reduce_some_to_owners, running_states, share_parameters, with_stepped};
use crate::schedule::{Schedule, Work};

/// Who keeps what of the parameters of one rank's stages.
pub(super) struct StageZero {
    stage: u8,
    division: Arc<Division>,
    /// Of stages 1 and 2 who steps which parameter; of stage 3 who has it.
    owners: Arc<Owners>,
    shards: Option<FullyShard>,
    overlap: Option<Overlap>,
    /// The running states of these stages, which the ranks average.
    states: HashSet<ParamId>,
}

impl StageZero {
    /// Of `model`, which has stand-ins for the parameters of other pipeline ranks; the model as stage 3 has it.
    pub fn new<M: Module>(
        (stage, units): (u8, &Units),
        model: M,
        division: &Arc<Division>,
        groups: &Groups,
    ) -> (Self, M) {
        let (division, here) = (division.clone(), groups.pp.rank());
        let states = running_states(&model).into_iter().filter(|id| division.is_on(*id, here)).collect();
        if stage < 3 {
            let owners = Owners::of(&model, if stage > 0 { groups.dp.size() } else { 1 }).into();
            return (Self { stage, division, owners, shards: None, overlap: None, states }, model);
        }
        // All stages that have a shared parameter agree on its owner.
        let given = |id| division.shared_owner(id, groups.dp.size());
        let shards = FullyShard::of_some(&model, &groups.dp, units, (|id| division.is_on(id, here), given));
        let shards = shards.recomputing();
        let model = shards.shard(model);
        (Self { stage, owners: shards.owners().clone(), division, shards: Some(shards), overlap: None, states }, model)
    }

    /// From now on gradients are reduced in buckets of so many bytes while the backward pass of the last micro-batch
    /// continues; the model for that.
    pub fn overlapping<M: Module>(&mut self, model: M, groups: &Groups, bytes: usize) -> M {
        let (overlap, model) = Overlap::new(model, &self.division, groups, (self.stage, &self.owners, bytes));
        self.overlap = Some(overlap);
        model
    }

    #[cfg(test)]
    pub fn buckets_during_passes(&self) -> usize {
        self.overlap.iter().map(Overlap::during_passes).sum()
    }

    /// Before the passes of a step.
    pub fn begin_step(&mut self, schedule: &Schedule) {
        self.overlap.iter_mut().for_each(|overlap| overlap.begin_step(schedule));
    }

    /// Before a pass of one stage; `sum` has the gradients of those before.
    pub fn begin_pass<M: Module>(&self, model: &M, work: Work, sum: &mut GradientsAccumulator<M>, groups: &Groups) {
        if let Some(shards) = &self.shards {
            shards.begin_pass(model);
        }
        if let Some(overlap) = &self.overlap {
            overlap.begin_pass(model, work, sum, (!self.reduces_each_pass(), groups));
        }
    }

    /// After a pass of one stage.
    pub fn end_pass(&self, work: Work) {
        self.overlap.iter().for_each(|overlap| overlap.end_pass(work));
    }

    /// After the passes of a step: what this rank keeps of their gradients.
    pub fn end_step<M: Module>(&self, model: &M, mut sum: GradientsAccumulator<M>, groups: &Groups) -> GradientsParams {
        let Some(overlap) = &self.overlap else { return sum.grads() };
        if !self.reduces_each_pass() {
            return overlap.end_step(model, sum.grads(), groups);
        }
        sum.accumulate(model, overlap.end_step(model, GradientsParams::new(), groups));
        sum.grads()
    }

    /// Whether gradients are reduced after each backward pass, so that only their owners keep sums.
    pub fn reduces_each_pass(&self) -> bool {
        self.stage >= 2
    }

    /// What this rank keeps of the gradients of a backward pass.
    pub fn after_backward<M: Module>(&self, model: &M, grads: GradientsParams, groups: &Groups) -> GradientsParams {
        let grads = place_gradients(model, grads, &groups.tp);
        match &self.shards {
            Some(shards) => shards.end_pass(model, grads),
            // Those of shared parameters are added over their stages first.
            None => reduce_some_to_owners(model, grads, |id| !self.is_tied(id), &self.owners, &groups.dp),
        }
    }

    /// The gradients of a step, of which those of shared parameters have been added.
    pub fn reduced<M: Module>(&self, model: &M, grads: GradientsParams, dp: &Group) -> GradientsParams {
        let is_left = |id| !self.overlap.as_ref().is_some_and(|overlap| overlap.reduces(id));
        match self.stage {
            0 => average_gradients_of(model, grads, dp, is_left),
            1 => reduce_some_to_owners(model, grads, is_left, &self.owners, dp),
            2 => reduce_some_to_owners(model, grads, |id| self.is_tied(id), &self.owners, dp),
            _ => grads,
        }
    }

    fn is_tied(&self, id: ParamId) -> bool {
        self.division.sharers(id).is_some()
    }

    /// Clips the gradients of a step by the norm of those of all ranks.
    pub fn clipped<M: Module>(
        &self,
        model: &M,
        grads: GradientsParams,
        max_norm: f64,
        groups: &Groups,
    ) -> GradientsParams {
        let alone = Group::single();
        let among = if self.stage > 0 { &groups.dp } else { &alone };
        // A shared parameter is on several stages.
        let counts = |id| self.is_first_of(id, among.rank()) && self.division.saver(id) == groups.pp.rank();
        clip_grad_norm(model, grads, max_norm, counts, &[among, &groups.pp]).0
    }

    /// Whether data-parallel rank `dp` is the one that stands for a parameter: its owner, or the first of those who have it.
    fn is_first_of(&self, id: ParamId, dp: usize) -> bool {
        if let Some(owner) = self.owners.owner(id) { owner == dp } else { dp == 0 }
    }

    /// Whether this rank saves the optimizer's states of a parameter.
    pub fn saves_states(&self, id: ParamId, groups: &Groups) -> bool {
        self.division.saver(id) == groups.pp.rank() && self.is_first_of(id, groups.dp.rank())
    }

    /// Whether this rank keeps the gradient of a parameter of its stages from one micro-batch to the next, and its value.
    pub fn keeps(&self, id: ParamId, dp: &Group) -> bool {
        self.stage < 3 || self.owners.owner(id).is_none_or(|owner| owner == dp.rank())
    }

    /// Whether this rank has the value of a parameter or running state; of others it has stand-ins.
    pub fn has_value(&self, id: ParamId, groups: &Groups) -> bool {
        self.keeps(id, &groups.dp) && self.division.is_on(id, groups.pp.rank())
    }

    /// Whether this rank saves the value of a parameter or running state.
    pub fn saves_value(&self, id: ParamId, groups: &Groups) -> bool {
        let dp = groups.dp.rank();
        let is_own = if self.stage == 3 { self.is_first_of(id, dp) } else { dp == 0 };
        is_own && self.division.saver(id) == groups.pp.rank()
    }

    /// `model` with the values that the optimizers have stepped.
    pub fn stepped<M: Module>(&self, model: M, stepped: &M, device: &Device, groups: &Groups) -> M {
        match self.stage {
            1 | 2 => share_parameters(model, stepped, &self.owners, &groups.dp),
            _ => with_stepped(model, stepped, device, |id| self.has_value(id, groups)),
        }
    }

    pub fn states(&self) -> &HashSet<ParamId> {
        &self.states
    }
}
