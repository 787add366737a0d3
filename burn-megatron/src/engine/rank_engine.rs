//! The training step of one rank: walks through its list of the schedule, then everything that needs all gradients.

mod build;
mod dynamic;
mod evaluate;
mod experts;
mod fp8;
mod state;
mod untrained;

use super::chunk::{Chunk, Output, Pass};
use super::clock::device_clock;
use super::losses::Losses;
use super::mail::Mail;
use super::report::LossSum;
use super::share::Share;
use super::{EngineConfig, EngineError, ExpertLoad, ExpertSummary, LossMean, StepReport, TokenBatch};
use crate::batch::BatchPlan;
use crate::lr::LrSchedule;
use crate::optim::{LossScaler, Optimizer, StepInfo, clip_factor};
use crate::schedule::{Action, Pass as Kind, Schedule, Work};
use crate::trace::{Recorder, Span, What};
use backend_dist::comm::Group;
use backend_dist::gpu::release_memory;
use backend_dist::launch::Rank;
use backend_dist::mesh::GridKind;
use backend_dist::ops::context::ContextParallel;
use backend_dist::ops::fp8::DelayedScaling;
use backend_dist::shard::{ParamSpec, Unit, stable_hash};
use burn::tensor::{DType, Tensor};
use dynamic::DynamicGroups;
pub use dynamic::packed_length;
use models::CausalLm;
use models::layers::DropoutKey;
use models::layers::moe::stats;
use models::layout::check_sequence;
pub use state::Position;
use std::time::Instant;

/// A rank's stages of the model, gradients, optimizer and groups. All ranks of the mesh call the same methods in the
/// same order.
pub struct RankEngine<M> {
    /// In the order of the layers.
    chunks: Vec<Chunk<M>>,
    optimizer: Optimizer,
    fp8: DelayedScaling,
    pipeline: Schedule,
    /// This rank's list, with receives ahead of time.
    actions: Vec<Action>,
    lr: LrSchedule,
    scaler: Option<LossScaler>,
    config: EngineConfig,
    plan: BatchPlan,
    rank: Rank,
    /// Ranks that hold the same weights and see other tokens.
    replicas: Group,
    /// By grid on which the model has parameters, the ranks that together hold these.
    model_parallel: Vec<(GridKind, Group)>,
    /// Of the last step.
    loads: Vec<ExpertLoad>,
    stages: Group,
    /// Ranks that share the rows of their micro-batches; `None` where each has whole rows.
    context: Option<Group>,
    /// Where each document is shared by as many replicas as its length asks for.
    dynamic: Option<DynamicGroups>,
    /// First and last stage, which share the weight of tied embeddings.
    ends: Option<Group>,
    dtype: DType,
    /// A GPU works behind the host; reading a loss would end that.
    runs_ahead: bool,
    hidden: usize,
    /// Of the whole model.
    elements: usize,
    recorder: Recorder,
    peak_in_flight: usize,
    /// A step has been done.
    warm: bool,
    step: u64,
    consumed: u64,
    grad_scale: f64,
}

impl<M: CausalLm> RankEngine<M> {
    /// The stages of the model that this rank holds, in the order of the layers; under ZeRO 3 without their
    /// weights, on GPUs with whatever is in their place.
    pub fn stages(&self) -> impl Iterator<Item = &M> {
        self.chunks.iter().flat_map(|chunk| &chunk.buckets).for_each(|(_, bucket)| self.optimizer.ready(*bucket));
        self.chunks.iter().map(Chunk::model)
    }

    /// How the global batch is cut.
    pub fn plan(&self) -> &BatchPlan {
        &self.plan
    }

    /// What every pipeline rank does in a step.
    pub fn schedule(&self) -> &Schedule {
        &self.pipeline
    }

    /// Finished optimizer steps.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The optimizer and its buffers.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The most micro-batches whose activations this rank has kept at once in the last step, over all its stages.
    pub fn peak_in_flight(&self) -> usize {
        self.peak_in_flight
    }

    /// Notes what this rank does when, and on a GPU also when that does it; all recorders count from the same origin.
    pub fn set_recorder(&mut self, recorder: Recorder) {
        let clock = self.recorder.take_device();
        let device = recorder.origin().and_then(|origin| clock.or_else(|| device_clock(&self.rank.device, origin)));
        self.recorder = recorder.with_device(device);
    }

    /// What has been noted since the last call.
    pub fn take_spans(&mut self) -> Vec<Span> {
        self.recorder.take()
    }

    /// This rank's gradients of the last step, per counted token and before clipping. All ranks call it together.
    pub fn gradients(&self) -> Vec<(ParamSpec, Vec<f64>)> {
        let buckets = self.chunks.iter().flat_map(|chunk| &chunk.buckets);
        let split = |bucket: &usize| {
            let values = self.optimizer.gradients(*bucket, self.grad_scale);
            let mut rest = values.as_slice();
            let params = &self.optimizer.spec(*bucket).params;
            let part = |spec: &ParamSpec| {
                let (own, tail) = rest.split_at(spec.local_len());
                rest = tail;
                (spec.clone(), own.to_vec())
            };
            params.iter().map(part).collect::<Vec<_>>()
        };
        buckets.flat_map(|(_, bucket)| split(bucket)).collect()
    }

    /// One optimizer step on the global batch; this rank computes its own rows.
    ///
    /// # Errors
    /// [`EngineError::NonFiniteLoss`] and [`EngineError::NonFiniteGradient`] before anything is updated;
    /// [`EngineError::Rows`] if the batch does not have the configured rows.
    pub fn train_step(&mut self, batch: &TokenBatch) -> Result<StepReport, EngineError> {
        if batch.rows != self.plan.global() {
            return Err(EngineError::Rows { rows: batch.rows, expected: self.plan.global() });
        }
        let micro_batches: Vec<_> = self.rows_of_step().into_iter().map(|rows| batch.slice(rows)).collect();
        self.train_micro_batches(&micro_batches)
    }

    /// One optimizer step, given only the rows that [`RankEngine::rows_of_step`] names.
    ///
    /// # Errors
    /// As [`RankEngine::train_step`].
    pub fn train_micro_batches(&mut self, micro_batches: &[TokenBatch]) -> Result<StepReport, EngineError> {
        let start = Instant::now();
        let rows: usize = micro_batches.iter().map(|micro| micro.rows).sum();
        let wanted = self.rows_of_step();
        let expected = wanted.iter().map(|rows| rows.len()).sum();
        if rows != expected || micro_batches.len() != wanted.len() {
            return Err(EngineError::Rows { rows, expected });
        }
        let layout = self.rank.mesh.layout();
        micro_batches.iter().try_for_each(|batch| check_sequence(layout, batch.seq))?;
        // What a step that failed has left.
        self.optimizer.skip();
        self.chunks.iter_mut().for_each(Chunk::forget);
        stats::take();
        let dealt = self.dynamic.as_ref().map(|groups| self.deal(groups, &micro_batches[0])).transpose()?;
        let in_turn = dealt.is_some();
        let parts = || micro_batches.iter().enumerate().map(|(index, batch)| self.part(index, batch)).collect();
        let shares: Vec<Share> = dealt.unwrap_or_else(parts);
        let shares = shares.as_slice();
        let losses = if in_turn { self.passes_in_turn(shares) } else { self.passes(shares) }?;
        // A GPU waits for the host from the norm to the update: what else the ranks tell each other comes before or after.
        let tokens = LossSum { loss: 0.0, tokens: counted(shares) }.total(&self.replicas).tokens;
        let mark = self.recorder.begin();
        let norm = self.optimizer.norm(1.0, &self.model_parallel);
        self.recorder.end(mark, What::Norm, None, None);
        let losses = self.read(losses, shares)?;
        let loss_scale = self.scaler.as_ref().map(LossScaler::scale);
        self.grad_scale = match self.config.loss {
            LossMean::PerToken => 1.0 / tokens.max(1) as f64,
            LossMean::PerMicroBatch => 1.0,
        } / loss_scale.unwrap_or(1.0);
        let grad_norm = norm * self.grad_scale;
        let skipped = !grad_norm.is_finite();
        if let Some(scaler) = &mut self.scaler {
            scaler.update(skipped);
        } else if skipped {
            let loss = self.over_all(losses, shares).mean();
            return Err(EngineError::NonFiniteGradient { norm: grad_norm, loss, step: self.step + 1 });
        }
        let clip_factor = clip_factor(self.config.clip, grad_norm);
        // Steps that were skipped do not count (megatron/training/training.py, `train_step`).
        let left_out = (self.step - self.optimizer.updates()) * self.plan.global() as u64;
        let lr = self.lr.at(self.consumed - left_out);
        match skipped {
            true => self.optimizer.skip(),
            false => self.update(&StepInfo { lr, grad_scale: self.grad_scale * clip_factor }),
        }
        let loss = self.over_all(losses, shares).mean();
        self.end_fp8_step();
        self.end_routing_step();

        let step = self.step;
        self.step += 1;
        self.consumed += self.plan.global() as u64;
        let (consumed, seconds) = (self.consumed, start.elapsed().as_secs_f64());
        // What CubeCL's pool has taken before it knew the sizes of a step.
        if !std::mem::replace(&mut self.warm, true) {
            release_memory(&self.rank.device);
        }
        let experts = ExpertSummary::of(&self.loads);
        Ok(StepReport {
            step,
            loss,
            grad_norm,
            clip_factor,
            lr,
            tokens,
            consumed,
            loss_scale,
            skipped,
            seconds,
            experts,
        })
    }

    /// All passes of the schedule and all sums of gradients; this rank's losses.
    fn passes(&mut self, shares: &[Share]) -> Result<Losses, EngineError> {
        let tokens = &shares[0].tokens;
        let mut mail = self.mail(tokens.rows, tokens.seq);
        let mut losses = Losses::default();
        self.peak_in_flight = 0;
        let actions = self.actions.clone();
        for (index, action) in actions.iter().enumerate() {
            match action {
                Action::Compute(work) => {
                    // Each bucket is reduced as soon as its last gradient is there, within the pass.
                    let last = actions.get(index + 1) == Some(&Action::ReduceGrads { chunk: work.chunk });
                    let next = actions[index + 1..].iter().find_map(|action| match action {
                        Action::Compute(work) => Some(self.chunks[work.chunk].first_used(work.pass).to_vec()),
                        _ => None,
                    });
                    let order = (last, next.unwrap_or_default());
                    let values = self.compute(*work, order, &shares[work.micro_batch], &mut mail);
                    losses.extend(values.map(|values| (work.micro_batch, values)));
                    if !self.runs_ahead {
                        losses = self.read(losses, shares)?;
                    }
                    let in_flight = self.chunks.iter().map(Chunk::in_flight).sum();
                    self.peak_in_flight = self.peak_in_flight.max(in_flight);
                }
                Action::Send(transfer) => {
                    let mark = self.recorder.begin();
                    mail.send(transfer);
                    self.recorder.end(mark, What::Send, Some(transfer.chunk), Some(transfer.micro_batch));
                }
                Action::Recv(transfer) => mail.expect(*transfer),
                Action::ReduceGrads { .. } | Action::Step => {}
            }
        }
        debug_assert!(mail.is_empty(), "the schedule leaves nothing behind");
        self.sum_over_model_parallel();
        Ok(losses)
    }

    /// Waits for losses that are still on the device.
    fn read(&self, losses: Losses, shares: &[Share]) -> Result<Losses, EngineError> {
        losses.read(shares).map_err(|(micro_batch, loss)| EngineError::NonFiniteLoss {
            loss,
            step: self.step + 1,
            micro_batch,
            rank: self.rank.rank,
            coords: self.rank.coords,
        })
    }

    /// Loss and tokens of the global batch; only the last stage has a loss, and every stage counts tokens.
    fn over_all(&self, losses: Losses, own: &[Share]) -> LossSum {
        let sum = LossSum { loss: losses.sum, tokens: counted(own) }.total(&self.replicas);
        let loss = self.stages.all_gather_host(sum.loss).into_iter().sum();
        LossSum { loss, tokens: sum.tokens }
    }

    fn dropout_seed(&self) -> u64 {
        stable_hash(&format!("dropout {} step {}", self.config.seed, self.step))
    }

    /// This rank's part of one of its micro-batches, for evaluation.
    fn share(&self, batch: &TokenBatch) -> Share {
        let comm = self.config.context.of_layer(0);
        let context = self.context.clone().map(|group| ContextParallel { group, comm });
        Share::new(batch, context, self.config.documents)
    }

    /// The same of the step's micro-batch `index`, for training.
    fn part(&self, index: usize, batch: &TokenBatch) -> Share {
        let mut share = self.share(batch);
        share.of.dropout = Some(DropoutKey {
            seed: self.dropout_seed(),
            first_sample: self.plan.rows(index, self.rank.coords.dp).start,
        });
        share.of.auxiliary = self.auxiliary_grad(batch, &share);
        share
    }

    /// Between stages: `rows` rows of `seq` positions of this rank.
    fn mail(&self, rows: usize, seq: usize) -> Mail {
        let layout = self.rank.mesh.layout();
        let seq = if layout.sequence_parallel() { seq / layout.tp } else { seq };
        Mail::new(self.stages.clone(), self.rank.device.clone(), [seq, rows, self.hidden], self.dtype)
    }

    /// One pass, `last` if no other adds to the stage's gradients, before one that uses the buckets `next` first; the losses of
    /// a forward pass of the last stage.
    fn compute(
        &mut self,
        work: Work,
        (last, next): (bool, Vec<usize>),
        share: &Share,
        mail: &mut Mail,
    ) -> Option<Tensor<2>> {
        let input = self.pipeline.input(self.stages.rank(), work).map(|input| {
            let mark = self.recorder.begin();
            let tensor = mail.take(input);
            if input.transfer().is_some() {
                self.recorder.end(mark, What::Receive, Some(work.chunk), Some(work.micro_batch));
            }
            tensor
        });
        let (mark, what) = match work.pass {
            Kind::Forward => (self.recorder.begin(), What::Forward),
            Kind::Backward => (self.recorder.begin(), What::Backward),
            Kind::BackwardInput => (self.recorder.begin(), What::BackwardInput),
            Kind::BackwardWeight => (self.recorder.begin(), What::BackwardWeight),
        };
        let mut pass = Pass {
            context: &self.config.context,
            keep: true,
            last,
            loss_grad: self.loss_grad(share),
            loss_type: self.loss_type(),
            place: (work.chunk, work.micro_batch),
            next: &next,
            optimizer: &mut self.optimizer,
            recorder: &mut self.recorder,
            device: &self.rank.device,
            share,
        };
        let chunk = &mut self.chunks[work.chunk];
        let mut losses = None;
        match work.pass {
            Kind::Forward => match chunk.forward(&mut pass, input) {
                Output::Activation(activation) => mail.put(work, activation),
                Output::Losses(values) => losses = Some(values),
            },
            Kind::Backward | Kind::BackwardInput => {
                if let Some(grad) = chunk.backward(&mut pass, input, work.pass == Kind::BackwardInput) {
                    mail.put(work, grad);
                }
            }
            Kind::BackwardWeight => chunk.weight_gradients(&mut pass),
        }
        self.recorder.end(mark, what, Some(work.chunk), Some(work.micro_batch));
        losses
    }

    /// Type of the losses: the parameters' own, at least `f32`.
    fn loss_type(&self) -> DType {
        if self.dtype == DType::F64 { DType::F64 } else { DType::F32 }
    }

    /// The gradient of each counted loss of a micro-batch in what is minimized, before the division by the tokens of the
    /// global batch. Ranks that share the rows of a micro-batch have parts of one mean, and gradients are sums over them.
    fn loss_grad(&self, share: &Share) -> f64 {
        let scale = self.scaler.as_ref().map_or(1.0, LossScaler::scale);
        match self.config.loss {
            LossMean::PerToken => scale,
            LossMean::PerMicroBatch => {
                scale / (share.counted.max(1) * self.plan.accumulation * self.plan.data_parallel) as f64
            }
        }
    }

    /// The gradient of an auxiliary loss, a mean over the tokens of a micro-batch, in what is minimized, before the division
    /// by the tokens of the global batch. Megatron multiplies it with all tokens, counted or not
    /// (megatron/core/transformer/moe/router.py, `attach_and_log_load_balancing_loss`), so that a loss of each sequence by
    /// itself does not depend on how the batch is cut.
    fn auxiliary_grad(&self, batch: &TokenBatch, share: &Share) -> f64 {
        let tokens = match self.config.loss {
            LossMean::PerToken => batch.tokens.len(),
            LossMean::PerMicroBatch => share.counted.max(1),
        };
        self.loss_grad(share) * tokens as f64
    }

    /// What is partial over tensor-parallel ranks, then the tied embeddings
    /// (megatron/core/distributed/finalize_model_grads.py has this order).
    fn sum_over_model_parallel(&mut self) {
        let mark = self.recorder.begin();
        self.optimizer.sum_partial();
        let tied = |chunk: &Chunk<M>| chunk.buckets.iter().find(|(unit, _)| *unit == Unit::Tied).map(|(_, b)| *b);
        let tied: Vec<usize> = self.chunks.iter().filter_map(tied).collect();
        match (tied.as_slice(), &self.ends) {
            // A pipeline in a V ends on the rank where it begins.
            ([embedding, head], _) => self.optimizer.sum_tied_here(*embedding, *head),
            ([one], Some(ends)) => self.optimizer.sum_tied(*one, ends),
            _ => {}
        }
        self.recorder.end(mark, What::PartialSums, None, None);
    }

    fn update(&mut self, info: &StepInfo) {
        let mark = self.recorder.begin();
        self.optimizer.begin_step();
        for chunk in &mut self.chunks {
            chunk.for_buckets(|bucket, model| self.optimizer.step(bucket, model, info));
        }
        self.recorder.end(mark, What::Update, None, None);
    }
}

/// Tokens that count, of a rank's rows.
fn counted(own: &[Share]) -> u64 {
    own.iter().map(|share| share.tokens.counted() as u64).sum()
}
