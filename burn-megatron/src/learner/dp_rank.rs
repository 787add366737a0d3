//! One rank's model and optimizer, whole or with ZeRO.

use backend_dist::comm::Group;
use backend_dist::launch::BoxError;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsAccumulator, GradientsParams, OptimizerRecord};
use burn::tensor::{Bytes, Device};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, TrainOutput, TrainStep};

use super::average::average_gradients;
use super::items::Items;
use super::zero::records::{of_owners, optimizer_record};
use super::zero::{Zero, reduce_to_owners, share_parameters};

/// A model that is equal on all ranks, and the rank's share of its optimizer step.
pub(super) struct DpRank<M: LearnerModel> {
    /// Without ZeRO it holds the model. With ZeRO it steps the owned parameters: its others keep the values that the
    /// training began with, because burn-train lets nobody set a learner's model except from a record.
    learner: Learner<M>,
    sharded: Option<Sharded<M>>,
    accumulator: GradientsAccumulator<M>,
    group: Group,
}

struct Sharded<M> {
    zero: Zero,
    model: M,
}

/// Where the learner's copies of parameters that it never steps cost no accelerator memory. A parameter that it steps
/// moves to the device of its gradient, and stays there.
pub(super) fn host() -> Device {
    Device::flex().autodiff()
}

impl<M: LearnerModel> DpRank<M> {
    /// The data-parallel rank of `learner` on `device`.
    pub fn new(mut learner: Learner<M>, device: &Device, zero: Option<Zero>, group: &Group) -> Self {
        // Forks have leaves of their own: graphs of different threads must not share a node.
        let sharded = zero.map(|zero| Sharded { zero, model: learner.model().fork(device) });
        match sharded {
            None => learner.fork(device),
            Some(_) => learner.fork(&host()),
        }
        Self { learner, sharded, accumulator: GradientsAccumulator::new(), group: group.clone() }
    }

    /// The current model.
    pub fn model(&self) -> M {
        self.sharded.as_ref().map_or_else(|| self.learner.model(), |sharded| sharded.model.clone())
    }

    pub fn learning_rate(&self) -> ModuleLearningRate {
        self.learner.lr_current()
    }

    /// The model's forward and backward pass on one batch.
    pub fn train_step(&self, batch: <M as TrainStep>::Input) -> TrainOutput<<M as TrainStep>::Output> {
        match &self.sharded {
            None => self.learner.train_step(batch),
            Some(sharded) => TrainStep::step(&sharded.model, batch),
        }
    }

    /// Adds the gradients of a micro-step. Every rank must call it.
    pub fn accumulate(&mut self, grads: GradientsParams) {
        let model = self.model();
        let grads = match &self.sharded {
            Some(Sharded { zero, .. }) if zero.stage == 2 => reduce_to_owners(&model, grads, &zero.owners, &self.group),
            _ => grads,
        };
        self.accumulator.accumulate(&model, grads);
    }

    /// Steps the model with the mean over the ranks of the accumulated gradients. Every rank must call it.
    pub fn step(&mut self) {
        let model = self.model();
        let grads = self.accumulator.grads();
        self.learner.lr_step();
        let Some(Sharded { zero, model: current }) = &mut self.sharded else {
            return self.learner.optimizer_step(average_gradients(&model, grads, &self.group));
        };
        let own = match zero.stage {
            1 => reduce_to_owners(&model, grads, &zero.owners, &self.group),
            _ => grads,
        };
        self.learner.optimizer_step(own);
        *current = share_parameters(model, &self.learner.model(), &zero.owners, &self.group);
    }

    /// The optimizer states that this rank holds.
    pub fn states(&self, store: &EventStoreClient) -> OptimizerRecord {
        optimizer_record(&self.learner, store)
    }

    /// The learner with the whole model and the optimizer states of all ranks, on rank 0. Every rank must call it.
    pub fn whole(
        &self,
        states_of_ranks: &Items<Bytes>,
        store: &EventStoreClient,
    ) -> Result<Option<Learner<M>>, BoxError> {
        let first = self.group.rank() == 0;
        let Some(Sharded { zero, model }) = &self.sharded else {
            return Ok(first.then(|| self.learner.clone()));
        };
        states_of_ranks.push(self.group.rank(), self.states(store).into_bytes()?);
        self.group.barrier();
        if !first {
            return Ok(None);
        }
        let states = of_owners(states_of_ranks.take().into_iter().enumerate(), &zero.owners)?;
        let mut whole = self.learner.clone();
        whole.load_model(model.clone().into_record());
        whole.load_optim(states);
        Ok(Some(whole))
    }
}
