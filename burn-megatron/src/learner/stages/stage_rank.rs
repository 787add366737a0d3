//! One rank of a pipeline: its stages, its share of the optimizer step.

use std::sync::Arc;

use backend_dist::gradients::place_gradients;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::local::Recent;
use backend_dist::parallelize::Plan;
use burn::module::{Module, ModuleDisplay, ParamId};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Bytes, Device};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, TrainStep};

use super::chunk::{Chunk, Run, Seed, Value};
use super::groups::Groups;
use super::stage_model::stage_model;
use super::stage_zero::StageZero;
use super::tied::sum_tied;
use super::values::{Values, values};
use super::{Activation, Division, Stages};
use crate::engine::p2p_communicator::P2pCommunicator;
use crate::learner::frozen::optimizer_step;
use crate::learner::ids::FirstIds;
use crate::learner::plain_fields::PlainFields;
use crate::learner::states::average_states;
use crate::learner::zero::Units;
use crate::learner::zero::records::{only, optimizer_record};
use crate::schedule::{Action, Pass, Work};

type Input<M> = <M as TrainStep>::Input;
type Output<M> = <M as TrainStep>::Output;

/// A rank of a pipeline, which leads those that hold shards with it.
pub(in crate::learner) struct StageRank<M: LearnerModel + Stages> {
    /// It steps the parameters of this rank; its others keep the values that the training began with, of which all ranks
    /// have one copy in host memory.
    learner: Learner<M>,
    /// With stand-ins for the parameters of other ranks.
    model: M,
    /// The same without gradients, if something is recomputed.
    frozen: Option<M>,
    chunks: Vec<Chunk<M>>,
    division: Arc<Division>,
    zero: StageZero,
    groups: Groups,
    /// Logical, with autodiff.
    device: Device,
    accumulator: GradientsAccumulator<M>,
    max_grad_norm: Option<f64>,
    /// Whether ranks of a stage begin each pass together.
    in_step: bool,
    ids: FirstIds,
    watch: PlainFields<M>,
    seed: Seed,
}

impl<M: LearnerModel + Stages + ModuleDisplay> StageRank<M> {
    /// The rank of `learner`, whose model is in host memory, on the logical device `device`. `plan` shards it over
    /// tensor-parallel ranks, ZeRO stage `zero` over data-parallel ones, with these units in stage 3. Fails if the plan
    /// does not fit the model.
    pub fn new(
        learner: Learner<M>,
        device: &Device,
        (rank, plan): (&Rank, &Plan),
        (zero, units): (u8, &Units),
        division: Arc<Division>,
    ) -> Result<Self, BoxError> {
        let groups = Groups::of(rank);
        let model = stage_model(learner.model(), &division, device, (rank, plan))?;
        let (zero, model) = StageZero::new((zero, units), model, &division, &groups);
        let chunks = division.chunks(groups.pp.rank());
        let recomputes = chunks.iter().flatten().any(|piece| piece.recompute);
        let seed = Seed { base: 0, micro_batch: 0 };
        let mut rank = Self {
            learner,
            frozen: recomputes.then(|| model.clone().no_grad()),
            model,
            chunks: chunks.into_iter().map(Chunk::new).collect(),
            division,
            zero,
            groups,
            device: device.clone(),
            accumulator: GradientsAccumulator::new(),
            max_grad_norm: None,
            in_step: false,
            ids: FirstIds::default(),
            watch: PlainFields::default(),
            seed,
        };
        rank.seed(0, 0);
        Ok(rank)
    }
}

impl<M: LearnerModel + Stages> StageRank<M> {
    /// Clips gradients by the norm of all of them together.
    pub fn clipping(mut self, max_grad_norm: Option<f64>) -> Self {
        self.max_grad_norm = max_grad_norm;
        self
    }

    /// Data-parallel ranks begin each pass together, because they wait for each other within it. Before, one may still free
    /// what a backward pass has left, of the other's device too, and would wait for that.
    pub fn in_step(mut self, on: bool) -> Self {
        self.in_step = on;
        self
    }

    /// In a process whose model has other ids than the first's.
    pub fn with_first_ids(mut self, ids: FirstIds) -> Self {
        self.ids = ids;
        self
    }

    /// Reduces gradients over data-parallel ranks during the backward passes, in buckets of so many bytes, if they are given.
    pub fn overlapping(mut self, bucket: Option<usize>) -> Self {
        if let Some(bytes) = bucket {
            self.model = self.zero.overlapping(self.model, &self.groups, bytes);
            self.refreeze();
        }
        self
    }

    pub fn learner(&self) -> &Learner<M> {
        &self.learner
    }

    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    pub fn division(&self) -> &Division {
        &self.division
    }

    /// Begins the random numbers of an epoch, which are its own on each data-parallel rank.
    pub fn seed(&mut self, base: u64, epoch: usize) {
        let position = (epoch as u64) << 32 | self.groups.dp.rank() as u64;
        self.seed = Seed { base: base ^ position.wrapping_mul(0x9e37_79b9_7f4a_7c15), micro_batch: 0 };
    }

    /// Forward and backward passes of these micro-batches in the order of the schedule; their gradients are added up. The
    /// outputs, if this rank holds the last stage: whoever reads one needs no other rank. Every rank of the pipeline
    /// must call it, with the same batches.
    pub fn train(&mut self, batches: Vec<Input<M>>) -> Vec<Output<M>> {
        let recent = Recent::on(&self.device);
        let batches: Vec<Input<M>> = batches.into_iter().map(|batch| batch.fork(&self.device)).collect();
        let schedule = self.division.schedule(batches.len());
        self.zero.begin_step(&schedule);
        let here = self.groups.pp.rank();
        let mut p2p = P2pCommunicator::new((self.groups.pp.clone(), self.device.clone()));
        let mut outputs: Vec<Option<Output<M>>> = batches.iter().map(|_| None).collect();
        for action in &schedule.ranks[here] {
            match action {
                Action::Compute(work) => {
                    let input = schedule.input(here, *work).map(|input| p2p.take(input));
                    if self.in_step {
                        self.groups.dp.barrier();
                    }
                    let Work { pass, chunk, micro_batch } = *work;
                    let seed = Seed { micro_batch: self.seed.micro_batch + micro_batch as u64, ..self.seed };
                    let (model, frozen, device) = (&self.model, &self.frozen, &self.device);
                    let run = Run { model, frozen, device, batch: &batches[micro_batch], seed };
                    self.zero.begin_pass(model, *work, &mut self.accumulator, &self.groups);
                    match pass {
                        Pass::Forward => match self.chunks[chunk].forward(&run, micro_batch, input) {
                            Value::Activation(activation) => p2p.put(*work, activation),
                            Value::Loss(_, output) => outputs[micro_batch] = Some(output),
                        },
                        _ => {
                            let (into, mut of_pass) = (&mut self.accumulator, GradientsAccumulator::new());
                            let reduces = self.zero.reduces_each_pass();
                            let sum = if reduces { &mut of_pass } else { &mut *into };
                            if let Some(grad) = self.chunks[chunk].backward(&run, micro_batch, input, sum) {
                                p2p.put(*work, grad);
                            }
                            if reduces {
                                into.accumulate(model, self.zero.after_backward(model, of_pass.grads(), &self.groups));
                            }
                        }
                    }
                    self.zero.end_pass(*work);
                }
                Action::Send(transfer) => p2p.send(transfer),
                Action::Recv(transfer) => p2p.expect(*transfer),
                Action::ReduceGrads { .. } | Action::Step => {}
            }
        }
        self.seed.micro_batch += batches.len() as u64;
        drop(batches);
        // Gradients stay where they are until the step.
        let sum = std::mem::replace(&mut self.accumulator, GradientsAccumulator::new());
        let grads = self.zero.end_step(&self.model, sum, &self.groups);
        recent.make_whole(&self.model, &grads);
        self.accumulator.accumulate(&self.model, grads);
        outputs.into_iter().flatten().collect()
    }

    /// The output of a batch without autodiff, if this rank holds the last stage. Every rank of the pipeline must call it.
    pub fn evaluate(&self, model: &M, batch: Input<M>) -> Option<Output<M>> {
        let device = self.device.clone().inner();
        let recent = Recent::on(&self.device);
        let batch = batch.fork(&device);
        let (division, pp) = (&self.division, &self.groups.pp);
        let run = Run { model, frozen: &None, device: &device, batch: &batch, seed: self.seed };
        let (mut x, mut found) = (None, None);
        for stage in 0..division.stages() {
            let (holder, chunk) = division.holder(stage);
            if holder != pp.rank() {
                continue;
            }
            if stage > 0 && division.holder(stage - 1).0 != holder {
                x = Some(M::Activation::receive(division.holder(stage - 1).0, &device, pp));
            }
            match self.chunks[chunk].evaluate(&run, x.take()) {
                Value::Loss(_, output) => found = Some(output),
                Value::Activation(y) if division.holder(stage + 1).0 != holder => {
                    y.send(division.holder(stage + 1).0, pp);
                }
                Value::Activation(y) => x = Some(y),
            }
        }
        recent.make_whole(&self.model, &GradientsParams::new());
        found
    }

    /// The model of an evaluation.
    pub fn valid_model(&self) -> M {
        self.model.valid()
    }

    /// Steps the model with the gradients that were added up, their mean over data-parallel ranks. Every rank must call it.
    pub fn step(&mut self) {
        let Groups { pp, dp, tp } = &self.groups;
        let model = self.model.clone();
        let grads = place_gradients(&model, self.accumulator.grads(), tp);
        let inner = self.device.clone().inner();
        let is_kept = |id| self.zero.keeps(id, dp);
        let grads = sum_tied(&model, grads, (&self.division, is_kept), (pp, &inner));
        let grads = self.zero.reduced(&model, grads, dp);
        let grads = match self.max_grad_norm {
            Some(max_norm) => self.zero.clipped(&model, grads, max_norm, &self.groups),
            None => grads,
        };
        self.learner.lr_step();
        let (changes, integers) = optimizer_step(&mut self.learner, grads, &mut self.watch);
        changes.refuse();
        let model = self.zero.stepped(model, &self.learner.model(), &self.device, &self.groups);
        self.model = integers.made_in(model, &[dp, pp]);
        self.refreeze();
    }

    /// Gives all ranks the mean of their running states. Every rank must call it.
    pub fn average_states(&mut self) {
        if !self.zero.states().is_empty() {
            self.model = average_states(self.model.clone(), self.zero.states(), &self.groups.dp);
            self.refreeze();
        }
    }

    fn refreeze(&mut self) {
        if self.frozen.is_some() {
            self.frozen = Some(self.model.clone().no_grad());
        }
    }

    /// What this rank saves, and no other, for the first process: values of its parameters, and states of the optimizer.
    /// Fails if the states cannot be written.
    pub fn saved(&self, store: &EventStoreClient) -> Result<(Values, Bytes), BoxError> {
        let (here, dp) = (self.groups.pp.rank(), self.groups.dp.rank());
        let states = optimizer_record(&self.learner, store).into_bytes()?;
        let is_own = |id| self.zero.saves_states(id, &self.groups);
        Ok((self.values(), self.ids.of_states(only(states, here == 0 && dp == 0, is_own)?)?))
    }

    /// Whether this rank's model has the value of a parameter or running state.
    pub fn has_value(&self, id: ParamId) -> bool {
        self.zero.has_value(id, &self.groups)
    }

    /// The values of the parameters that this rank saves, for the first process.
    pub fn values(&self) -> Values {
        self.ids.of_values(values(&self.model, |id| self.zero.saves_value(id, &self.groups)))
    }

    #[cfg(test)]
    pub fn buckets_during_passes(&self) -> usize {
        self.zero.buckets_during_passes()
    }

    /// The model of this rank, with stand-ins.
    pub fn model(&self) -> &M {
        &self.model
    }
}
