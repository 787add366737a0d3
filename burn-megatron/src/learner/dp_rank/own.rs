//! A model of a rank's own, apart from its learner's, and the communication of its passes.

use backend_dist::comm::Group;
use backend_dist::fully_shard::FullyShard;
use backend_dist::gradients::overlapped::Reducer;
use backend_dist::gradients::place_gradients;
use backend_dist::launch::BoxError;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::Device;
use burn::train::{LearnerModel, TrainOutput, TrainStep};

use super::constants::with_plain_constants;
use crate::learner::devices::has_checkpointing;
use crate::learner::states::with_own_states;
use crate::learner::tensor_parallel::Placing;
use crate::learner::zero::Zero;

/// With ZeRO, with gradients that are reduced during the backward pass, on a logical device, and for modules with running
/// states, which the learners' clones share.
pub(super) struct Own<M> {
    pub zero: Zero,
    /// Of stage 3 its parameters are on their owners.
    pub model: M,
    during: During,
    /// Whether the gradients that were added up have been reduced.
    pub is_reduced: bool,
}

/// What communicates during a pass.
enum During {
    Nothing,
    /// Gathers and reductions of stage 3.
    Shards(FullyShard),
    Reductions(Reducer),
}

impl<M: LearnerModel> Own<M> {
    /// Of the model `model`, of which other ranks have clones. Fails if the plan does not fit the model.
    pub fn new(
        zero: Zero,
        model: M,
        device: &Device,
        group: &Group,
        placing: Option<&Placing<M>>,
    ) -> Result<Self, BoxError> {
        // Forks have leaves of their own: graphs of different threads must not share a node.
        let model = if (zero.stage == 3 || placing.is_some()) && has_checkpointing(device) {
            with_plain_constants(&model)
        } else if !zero.states.is_empty() {
            with_own_states(&model)
        } else {
            model
        };
        let model = if let Some(placing) = placing { placing.place(model, device)? } else { model };
        let (model, during) = if zero.stage == 3 {
            let shards = FullyShard::new(&model, group, &zero.units);
            let shards = if placing.is_some() { shards } else { shards.on(device) };
            // Records are put together for rank 0.
            shards.record_on(0);
            (shards.shard(model).fork(device), During::Shards(shards))
        } else if let Some(bytes) = zero.overlap {
            let model = model.fork(device);
            let owner = |id| zero.owners.owner(id).filter(|_| zero.stage > 0);
            let reducer = Reducer::with_buckets(&model, group, owner, bytes);
            (reducer.attach(model), During::Reductions(reducer))
        } else {
            (model.fork(device), During::Nothing)
        };
        Ok(Self { zero, model, during, is_reduced: false })
    }

    /// How stage 3 shards the model.
    pub fn shards(&self) -> Option<&FullyShard> {
        if let During::Shards(shards) = &self.during { Some(shards) } else { None }
    }

    /// Whether the model communicates, so that it cannot leave its rank.
    pub fn has_hooks(&self) -> bool {
        matches!(self.during, During::Reductions(_))
    }

    /// The forward and backward pass of a micro-batch; if it is the last of a step, those of `earlier` come to its gradients.
    /// These are where their parameters are, on a logical device along the axis of `within`.
    pub fn pass(
        &mut self,
        batch: <M as TrainStep>::Input,
        is_last: bool,
        earlier: &mut GradientsAccumulator<M>,
        within: Option<&Group>,
    ) -> TrainOutput<<M as TrainStep>::Output> {
        let model = &self.model;
        let step = |batch| {
            let mut output = TrainStep::step(model, batch);
            if let Some(within) = within {
                output.grads = place_gradients(model, output.grads, within);
            }
            output
        };
        match &self.during {
            During::Shards(shards) => {
                shards.begin_pass(model);
                let mut output = step(batch);
                output.grads = shards.end_pass(model, output.grads);
                output
            }
            // Stage 2 reduces those of every micro-batch, and only their owners keep sums.
            During::Reductions(reducer) if is_last || self.zero.stage == 2 => {
                self.is_reduced = true;
                let earlier = if self.zero.stage == 2 { GradientsParams::new() } else { earlier.grads() };
                reducer.begin_pass(model, earlier);
                let mut output = step(batch);
                output.grads = reducer.end_pass(model, output.grads);
                output
            }
            _ => step(batch),
        }
    }
}
