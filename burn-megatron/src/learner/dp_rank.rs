//! One rank's model and optimizer, whole or with ZeRO.

use backend_dist::comm::Group;
use backend_dist::fully_shard::FullyShard;
use backend_dist::gradients::{average_gradients, clip_grad_norm, place_gradients};
use backend_dist::launch::BoxError;
use backend_dist::local::Recent;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsAccumulator, GradientsParams, OptimizerRecord};
use burn::tensor::Device;
use burn::train::metric::store::EventStoreClient;
use burn::train::{InferenceStep, Learner, LearnerModel, TrainOutput, TrainStep};

use super::processes::gather_to_first;
use super::states::{average_states, with_own_states};
use super::tensor_parallel::Placing;
use super::zero::records::{join, optimizer_record};
use super::zero::{Zero, reduce_to_owners, share_parameters, with_stepped};

/// A model that is equal on all ranks, and the rank's share of its optimizer step.
pub(super) struct DpRank<M: LearnerModel> {
    /// Without a model of the rank's own it holds the model. Else it steps the owned parameters: its others keep the
    /// values that the training began with, because burn-train lets nobody set a learner's model except from a record.
    learner: Learner<M>,
    own: Option<Own<M>>,
    accumulator: GradientsAccumulator<M>,
    group: Group,
    device: Device,
    /// Of all gradients together.
    max_grad_norm: Option<f64>,
    /// Of a model on a logical device: the group along whose axis its parameters are sharded.
    within: Option<Group>,
}

/// A model of the rank's own: with ZeRO, and for modules with running states, which the learners' clones share.
struct Own<M> {
    zero: Zero,
    /// Of stage 3 its parameters are on their owners.
    model: M,
    shards: Option<FullyShard>,
}

/// Where the learner's copies of parameters that it never steps cost no accelerator memory. A parameter that it steps
/// moves to the device of its gradient, and stays there.
pub(super) fn host() -> Device {
    Device::flex().autodiff()
}

impl<M: LearnerModel> DpRank<M> {
    /// The data-parallel rank of `learner` on `device`; with `placing` that is a logical device, and `zero` is given.
    ///
    /// # Errors
    /// If the plan does not fit the model.
    pub fn new(
        mut learner: Learner<M>,
        device: &Device,
        zero: Option<Zero>,
        group: &Group,
        placing: Option<&Placing<M>>,
    ) -> Result<Self, BoxError> {
        // Forks have leaves of their own: graphs of different threads must not share a node.
        let own = |zero: Zero| {
            let model = if zero.states.is_empty() { learner.model() } else { with_own_states(&learner.model()) };
            let model = match placing {
                Some(placing) => placing.place(model, device)?,
                None => model,
            };
            if zero.stage < 3 {
                return Ok(Own { zero, model: model.fork(device), shards: None });
            }
            let shards = FullyShard::new(&model, group, &zero.units);
            let shards = if placing.is_some() { shards } else { shards.on(device) };
            // Records are put together for rank 0.
            shards.record_on(0);
            let model = shards.shard(model).fork(device);
            Ok::<_, BoxError>(Own { zero, model, shards: Some(shards) })
        };
        let own = zero.map(own).transpose()?;
        match own {
            None => learner.fork(device),
            Some(_) => learner.fork(&host()),
        }
        let (device, within) = (device.clone(), placing.map(Placing::group));
        let (accumulator, group) = (GradientsAccumulator::new(), group.clone());
        Ok(Self { learner, own, accumulator, group, device, max_grad_norm: None, within })
    }

    /// Clips gradients by the norm of all of them together.
    pub fn clipping(mut self, max_grad_norm: Option<f64>) -> Self {
        self.max_grad_norm = max_grad_norm;
        self
    }

    /// The gradients of a step that this rank has, clipped if they are to be.
    fn clipped(&self, model: &M, grads: GradientsParams) -> GradientsParams {
        let Some(max_norm) = self.max_grad_norm else { return grads };
        match &self.own {
            Some(Own { shards: Some(shards), .. }) => shards.clip_grad_norm(model, grads, max_norm).0,
            Some(Own { zero, .. }) if zero.stage > 0 => {
                let counts = |id| zero.owners.owner(id) == Some(self.group.rank());
                clip_grad_norm(model, grads, max_norm, counts, &[&self.group]).0
            }
            // All ranks have all gradients.
            _ => clip_grad_norm(model, grads, max_norm, |_| true, &[]).0,
        }
    }

    /// Whether a forward pass is a collective.
    pub fn is_fully_sharded(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.shards.is_some())
    }

    /// The current model, of which this rank may hold shards.
    pub fn model(&self) -> M {
        self.own.as_ref().map_or_else(|| self.learner.model(), |own| own.model.clone())
    }

    pub fn learning_rate(&self) -> ModuleLearningRate {
        self.learner.lr_current()
    }

    /// Begins the random numbers of an epoch, which are its own on each data-parallel rank, if the model is on a logical
    /// device. Others have the process's generator.
    pub fn seed(&self, base: u64, epoch: usize) {
        if self.within.is_some() {
            let position = (epoch as u64) << 32 | self.group.rank() as u64;
            self.device.seed(base ^ position.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
    }

    /// The model's forward and backward pass on one batch. What is left of it on a logical device is whole, but for the
    /// gradients, which are where their parameters are: whoever reads it needs no other rank.
    pub fn train_step(&self, batch: <M as TrainStep>::Input) -> TrainOutput<<M as TrainStep>::Output> {
        let Some(within) = &self.within else { return self.forward_backward(batch) };
        let recent = Recent::on(&self.device);
        let mut output = self.forward_backward(batch);
        let model = self.model();
        output.grads = place_gradients(&model, output.grads, within);
        recent.make_whole(&model, &output.grads);
        output
    }

    /// A validation step, whose output is whole as that of a training step.
    pub fn valid_step(&self, model: &M, batch: <M as InferenceStep>::Input) -> <M as InferenceStep>::Output {
        let recent = Recent::on(&self.device);
        let output = InferenceStep::step(model, batch);
        recent.make_whole(model, &GradientsParams::new());
        output
    }

    fn forward_backward(&self, batch: <M as TrainStep>::Input) -> TrainOutput<<M as TrainStep>::Output> {
        match &self.own {
            None => self.learner.train_step(batch),
            Some(Own { model, shards: None, .. }) => TrainStep::step(model, batch),
            Some(Own { model, shards: Some(shards), .. }) => {
                shards.begin_pass(model);
                let mut output = TrainStep::step(model, batch);
                output.grads = shards.end_pass(model, output.grads);
                output
            }
        }
    }

    /// Adds the gradients of a micro-step. Every rank must call it.
    pub fn accumulate(&mut self, grads: GradientsParams) {
        let model = self.model();
        let grads = match &self.own {
            Some(Own { zero, .. }) if zero.stage == 2 => reduce_to_owners(&model, grads, &zero.owners, &self.group),
            _ => grads,
        };
        self.accumulator.accumulate(&model, grads);
    }

    /// Steps the model with the mean over the ranks of the accumulated gradients. Every rank must call it.
    pub fn step(&mut self) {
        let model = self.model();
        let grads = self.accumulator.grads();
        self.learner.lr_step();
        let grads = match self.own.as_ref().map(|own| &own.zero) {
            None => average_gradients(&model, grads, &self.group),
            Some(zero) => match zero.stage {
                0 => average_gradients(&model, grads, &self.group),
                1 => reduce_to_owners(&model, grads, &zero.owners, &self.group),
                _ => grads,
            },
        };
        let grads = self.clipped(&model, grads);
        self.learner.optimizer_step(grads);
        let Some(Own { zero, model: current, shards }) = &mut self.own else { return };
        if let Some(shards) = shards {
            let owners = shards.owners();
            let rank = self.group.rank();
            let is_own = |id| owners.owner(id).is_none_or(|owner| owner == rank);
            *current = with_stepped(model, &self.learner.model(), &self.device, is_own);
            return;
        }
        let stepped = self.learner.model();
        *current = match zero.stage {
            0 => with_stepped(model, &stepped, &self.device, |_| true),
            _ => share_parameters(model, &stepped, &zero.owners, &self.group),
        };
    }

    /// Gives all ranks the mean of their running states. Every rank must call it.
    pub fn average_states(&mut self) {
        if let Some(Own { zero, model, .. }) = &mut self.own
            && !zero.states.is_empty()
        {
            *model = average_states(model.clone(), &zero.states, &self.group);
        }
    }

    /// The optimizer states that this rank holds.
    pub fn states(&self, store: &EventStoreClient) -> OptimizerRecord {
        optimizer_record(&self.learner, store)
    }

    /// The learner with the whole model and the optimizer states of all ranks, on rank 0. Every rank must call it.
    pub fn whole(&self, store: &EventStoreClient) -> Result<Option<Learner<M>>, BoxError> {
        let first = self.group.rank() == 0;
        let Some(Own { zero, model, .. }) = &self.own else {
            return Ok(first.then(|| self.learner.clone()));
        };
        if self.within.is_some() {
            return self.whole_of_logical(store, zero, model);
        }
        if zero.stage == 0 {
            let mut whole = self.learner.clone();
            if first {
                whole.load_model(model.clone().into_record());
            }
            return Ok(first.then_some(whole));
        }
        // Of stage 3 a collective.
        let model = model.clone().into_record();
        let Some(states) = gather_to_first(self.states(store).into_bytes()?, &self.group) else { return Ok(None) };
        let states = join(states, &zero.owners)?;
        let mut whole = self.learner.clone();
        whole.load_model(model);
        whole.load_optim(states);
        Ok(Some(whole))
    }

    /// [`whole`](Self::whole) of a model on a logical device, in host memory: it is read when this rank has other things
    /// to do.
    fn whole_of_logical(
        &self,
        store: &EventStoreClient,
        zero: &Zero,
        model: &M,
    ) -> Result<Option<Learner<M>>, BoxError> {
        let first = self.group.rank() == 0;
        // Of stage 3 a collective.
        let model = model.clone().into_record();
        let own = if zero.stage > 0 || first { Some(self.states(store).into_bytes()?) } else { None };
        let Some(states) = gather_to_first(own, &self.group) else { return Ok(None) };
        let states = join(states.into_iter().flatten(), &zero.owners)?;
        let mut whole = self.learner.clone();
        whole.fork(&host());
        whole.load_model(model);
        whole.load_optim(states);
        Ok(Some(whole))
    }

    /// The trained model, whole on rank 0. Every rank must call it.
    pub fn into_model(self) -> M {
        if !self.is_fully_sharded() {
            // A logical device ends with its rank.
            let is_read = self.within.is_some() && self.group.rank() == 0;
            return if is_read { self.model().fork(&host()) } else { self.model() };
        }
        let record = self.model().into_record();
        let model = self.learner.model();
        let first = self.group.rank() == 0;
        // The optimizer's states make way for the model.
        drop((self.learner, self.own, self.accumulator));
        match self.within {
            Some(_) if first => model.fork(&host()).load_record(record),
            None if first => model.load_record(record).fork(&self.device),
            _ => model,
        }
    }
}
