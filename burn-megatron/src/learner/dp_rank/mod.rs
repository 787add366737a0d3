//! One rank's model and optimizer, whole or with ZeRO.

pub(super) mod constants;
mod own;

use backend_dist::comm::Group;
use backend_dist::gradients::{average_gradients, clip_grad_norm};
use backend_dist::launch::BoxError;
use backend_dist::local::Recent;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsAccumulator, GradientsParams, OptimizerRecord};
use burn::tensor::{Bytes, Device};
use burn::train::metric::store::EventStoreClient;
use burn::train::{InferenceStep, Learner, LearnerModel, TrainOutput, TrainStep};

use own::Own;

use super::devices::host;
use super::frozen::optimizer_step;
use super::ids::FirstIds;
use super::loading::{load, loaded};
use super::plain_fields::PlainFields;
use super::processes::gather_to_first;
use super::states::average_states;
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
    ids: FirstIds,
    watch: PlainFields<M>,
}

impl<M: LearnerModel> DpRank<M> {
    /// The data-parallel rank of `learner` on `device`; with `placing` that is a logical device, and `zero` is given.
    /// Fails if the plan does not fit the model.
    pub fn new(
        mut learner: Learner<M>,
        device: &Device,
        zero: Option<Zero>,
        group: &Group,
        placing: Option<&Placing<M>>,
    ) -> Result<Self, BoxError> {
        let own = zero.map(|zero| Own::new(zero, learner.model(), device, group, placing)).transpose()?;
        match (&own, placing) {
            (Some(_), _) => learner.fork(&host()),
            (None, None) => learner.fork(device),
            (None, Some(placing)) => {
                learner.fork(device);
                // The device learns of which sizes parameters are.
                drop(placing.place(learner.model(), device)?);
            }
        }
        let (device, within) = (device.clone(), placing.map(Placing::group));
        let (accumulator, group, ids) = (GradientsAccumulator::new(), group.clone(), FirstIds::default());
        let watch = PlainFields::default();
        Ok(Self { learner, own, accumulator, group, device, max_grad_norm: None, within, ids, watch })
    }

    /// In a process whose model has other ids than the first's.
    pub fn with_first_ids(mut self, ids: FirstIds) -> Self {
        self.ids = ids;
        self
    }

    /// Clips gradients by the norm of all of them together.
    pub fn clipping(mut self, max_grad_norm: Option<f64>) -> Self {
        self.max_grad_norm = max_grad_norm;
        self
    }

    /// The gradients of a step that this rank has, clipped if they are to be.
    fn clipped(&self, model: &M, grads: GradientsParams) -> GradientsParams {
        let Some(max_norm) = self.max_grad_norm else { return grads };
        if let Some(shards) = self.own.as_ref().and_then(Own::shards) {
            return shards.clip_grad_norm(model, grads, max_norm).0;
        }
        match &self.own {
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
        self.own.as_ref().is_some_and(|own| own.shards().is_some())
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

    /// The model's forward and backward pass on one batch, the last of a step or not. What is left of it on a logical
    /// device is whole, but for the gradients, which are where their parameters are: whoever reads it needs no other rank.
    pub fn train_step(
        &mut self,
        batch: <M as TrainStep>::Input,
        is_last: bool,
    ) -> TrainOutput<<M as TrainStep>::Output> {
        let recent = Recent::on(&self.device);
        let output = match &mut self.own {
            None => self.learner.train_step(batch),
            Some(own) => own.pass(batch, is_last, &mut self.accumulator, self.within.as_ref()),
        };
        recent.make_whole(&self.model(), &output.grads);
        output
    }

    /// A validation step, whose output is whole as that of a training step.
    pub fn valid_step(&self, model: &M, batch: <M as InferenceStep>::Input) -> <M as InferenceStep>::Output {
        let recent = Recent::on(&self.device);
        let output = InferenceStep::step(model, batch);
        recent.make_whole(model, &GradientsParams::new());
        output
    }

    /// Adds the gradients of a micro-step. Every rank must call it.
    pub fn accumulate(&mut self, grads: GradientsParams) {
        let model = self.model();
        let grads = match &self.own {
            Some(Own { zero, is_reduced: false, .. }) if zero.stage == 2 => {
                reduce_to_owners(&model, grads, &zero.owners, &self.group)
            }
            _ => grads,
        };
        self.accumulator.accumulate(&model, grads);
    }

    /// Steps the model with the mean over the ranks of the accumulated gradients. Every rank must call it.
    pub fn step(&mut self) {
        let model = self.model();
        let grads = self.accumulator.grads();
        self.learner.lr_step();
        let is_reduced = self.own.as_mut().is_some_and(|own| std::mem::take(&mut own.is_reduced));
        let grads = match self.own.as_ref().map(|own| &own.zero) {
            Some(zero) if is_reduced || zero.stage > 1 => grads,
            Some(zero) if zero.stage == 1 => reduce_to_owners(&model, grads, &zero.owners, &self.group),
            _ => average_gradients(&model, grads, &self.group),
        };
        let grads = self.clipped(&model, grads);
        let Some(own) = &mut self.own else { return self.learner.optimizer_step(grads) };
        let (changes, integers) = optimizer_step(&mut self.learner, grads, &mut self.watch);
        let (stepped, rank) = (self.learner.model(), self.group.rank());
        let model = match (own.shards(), own.zero.stage) {
            (Some(shards), _) => {
                let owners = shards.owners();
                let is_own = |id| owners.owner(id).is_none_or(|owner| owner == rank);
                with_stepped(model, &stepped, &self.device, is_own)
            }
            (None, 0) => with_stepped(model, &stepped, &self.device, |_| true),
            (None, _) => share_parameters(model, &stepped, &own.zero.owners, &self.group),
        };
        own.model = integers.made_in(model, &[&self.group]);
        if own.zero.stage > 0 || self.within.is_some() {
            return changes.refuse();
        }
        own.model = changes.made_in(own.model.clone(), &self.device);
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

    /// The same for the first process.
    fn states_for_first(&self, store: &EventStoreClient) -> Result<Bytes, BoxError> {
        Ok(self.ids.of_states(self.states(store).into_bytes()?)?)
    }

    /// The learner with the whole model and the optimizer states of all ranks, on rank 0. Every rank must call it.
    pub fn whole(&self, store: &EventStoreClient) -> Result<Option<Learner<M>>, BoxError> {
        let first = self.group.rank() == 0;
        let Some(Own { zero, model, .. }) = &self.own else {
            return if first { self.whole_of_learner(store).map(Some) } else { Ok(None) };
        };
        if self.within.is_some() {
            return self.whole_of_logical(store, zero, model);
        }
        if zero.stage == 0 {
            let mut whole = self.learner.clone();
            if first {
                load(&mut whole, model.clone().into_record());
            }
            return Ok(first.then_some(whole));
        }
        // Of stage 3 a collective.
        let model = model.clone().into_record();
        let Some(states) = gather_to_first(self.states_for_first(store)?, &self.group) else { return Ok(None) };
        let states = join(states, &zero.owners)?;
        let mut whole = self.learner.clone();
        load(&mut whole, model);
        whole.load_optim(states);
        Ok(Some(whole))
    }

    /// [`whole`](Self::whole) of the learner's own model; of a logical device, which ends with its rank, in host memory.
    fn whole_of_learner(&self, store: &EventStoreClient) -> Result<Learner<M>, BoxError> {
        let mut whole = self.learner.clone();
        if self.within.is_some() {
            let states = OptimizerRecord::from_bytes(self.states(store).into_bytes()?)?;
            whole.fork(&host());
            whole.load_optim(states);
        }
        Ok(whole)
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
        let own = if zero.stage > 0 || first { Some(self.states_for_first(store)?) } else { None };
        let Some(states) = gather_to_first(own, &self.group) else { return Ok(None) };
        let states = join(states.into_iter().flatten(), &zero.owners)?;
        let mut whole = self.learner.clone();
        whole.fork(&host());
        load(&mut whole, model);
        whole.load_optim(states);
        Ok(Some(whole))
    }

    /// The trained model, whole on rank 0. Every rank must call it.
    pub fn into_model(self) -> Result<M, BoxError> {
        if !self.is_fully_sharded() {
            // A logical device ends with its rank.
            let is_read = self.within.is_some() && self.group.rank() == 0;
            let model = match &self.own {
                Some(own) if own.has_hooks() => {
                    loaded(self.learner.model().fork(&self.device), own.model.clone().into_record())?
                }
                _ => self.model(),
            };
            return Ok(if is_read { model.fork(&host()) } else { model });
        }
        let record = self.model().into_record();
        let model = self.learner.model();
        let first = self.group.rank() == 0;
        // The optimizer's states make way for the model.
        drop((self.learner, self.own, self.accumulator));
        Ok(match self.within {
            Some(_) if first => loaded(model.fork(&host()), record)?,
            None if first => loaded(model, record)?.fork(&self.device),
            _ => model,
        })
    }
}
