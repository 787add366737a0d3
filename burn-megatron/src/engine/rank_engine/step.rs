//! The training step of one rank: the passes, then everything that needs all gradients.

use super::super::chunk::{Chunk, name_of};
use super::super::local_batch::LocalBatch;
use super::super::losses::Losses;
use super::super::report::LossSum;
use super::RankEngine;
use crate::engine::{
    Anomaly, AnomalyAction, EngineError, ExpertSummary, GradientStats, LossMean, Rollouts, StepReport, TokenBatch,
};
use crate::grpo::GrpoSums;
use crate::optim::{LossScaler, StepInfo, clip_factor};
use crate::preference::{PreferenceMeans, PreferenceSums};
use crate::trace::SpanKind;
use backend_dist::gpu::release_memory;
use backend_dist::mesh::Axis;
use models::CausalLm;
use models::layers::AttentionLogits;
use models::layout::check_sequence;
use std::time::Instant;

/// Losses that are none of tokens alone.
#[derive(Default)]
pub(super) struct Scores {
    pub pairs: PreferenceSums,
    pub completions: GrpoSums,
    /// KL divergences, in distillation.
    pub divergence: Losses,
}

impl<M: CausalLm> RankEngine<M> {
    /// One optimizer step on the global batch; this rank computes its own sequences of it.
    ///
    /// # Errors
    /// [`EngineError::NonFiniteLoss`] and [`EngineError::NonFiniteGradient`] before anything is updated;
    /// [`EngineError::Sequences`] and [`EngineError::Token`] if the batch does not have the configured sequences or has tokens
    /// that the model lacks.
    pub fn train_step(&mut self, batch: &TokenBatch) -> Result<StepReport, EngineError> {
        if batch.sequences != self.plan.global() {
            return Err(EngineError::Sequences { given: batch.sequences, expected: self.plan.global() });
        }
        let micro_batches: Vec<_> =
            self.sequences_of_step().into_iter().map(|sequences| batch.slice(sequences)).collect();
        self.train_micro_batches(&micro_batches)
    }

    /// One optimizer step, given only the sequences that [`RankEngine::sequences_of_step`] names.
    pub fn train_micro_batches(&mut self, micro_batches: &[TokenBatch]) -> Result<StepReport, EngineError> {
        self.train(micro_batches, &[])
    }

    /// One optimizer step of GRPO on completions, given the same sequences with what is known of each micro-batch.
    ///
    /// # Panics
    /// Without [`EngineConfig::grpo`](crate::engine::EngineConfig::grpo), or if there is not one entry a micro-batch.
    pub fn train_rollouts(
        &mut self,
        micro_batches: &[TokenBatch],
        rollouts: &[Rollouts],
    ) -> Result<StepReport, EngineError> {
        assert!(self.config.grpo.is_some() && rollouts.len() == micro_batches.len(), "completions without GRPO");
        self.train(micro_batches, rollouts)
    }

    fn train(&mut self, micro_batches: &[TokenBatch], rollouts: &[Rollouts]) -> Result<StepReport, EngineError> {
        let start = Instant::now();
        let sequences: usize = micro_batches.iter().map(|micro| micro.sequences).sum();
        let wanted = self.sequences_of_step();
        let expected = wanted.iter().map(|sequences| sequences.len()).sum();
        if sequences != expected || micro_batches.len() != wanted.len() {
            return Err(EngineError::Sequences { given: sequences, expected });
        }
        let layout = self.rank.mesh.layout();
        micro_batches.iter().try_for_each(|batch| check_sequence(layout, batch.seq))?;
        micro_batches.iter().try_for_each(|batch| batch.check_tokens(self.vocabulary))?;
        // What a step that failed has left.
        self.forget_step();
        self.chunks.iter_mut().for_each(Chunk::forget);
        self.forget_routing();
        self.attempts += 1;
        let dealt = self.dynamic.as_ref().map(|groups| self.assign(groups, &micro_batches[0])).transpose()?;
        let parts = || {
            micro_batches
                .iter()
                .enumerate()
                .map(|(at, batch)| self.training_batch(at, batch, rollouts.get(at)))
                .collect()
        };
        let mut local_batches: Vec<LocalBatch> = dealt.unwrap_or_else(parts);
        let units = self.count_units(&local_batches);
        if let Some(units) = units {
            self.share_units(units, &mut local_batches);
        }
        let local_batches = local_batches.as_slice();
        self.follow(local_batches.len())?;
        let (losses, mut scores) = self.passes(local_batches)?;
        // A GPU waits for the host from the norm to the update: the other communication happens before or
        // after.
        let tokens = LossSum { loss: 0.0, tokens: counted(local_batches) }.total(&self.dp_ranks).tokens;
        let units = units.unwrap_or(tokens);
        let mark = self.recorder.begin();
        let (norm, squares) = self.optimizer.norm_and_squares(&self.model_parallel);
        let zeros = self.config.num_zeros_in_grad.then(|| self.optimizer.zeros_in_grad(&self.model_parallel));
        self.recorder.end(mark, SpanKind::Norm, None, None);
        self.poisoned = false;
        let losses = self.read(losses, local_batches)?;
        let loss_scale = self.scaler.as_ref().map(LossScaler::scale);
        self.grad_scale = match self.config.loss {
            LossMean::PerToken => 1.0 / units.max(1) as f64,
            LossMean::PerMicroBatch => 1.0,
        } / loss_scale.unwrap_or(1.0);
        let grad_norm = norm * self.grad_scale;
        let groups = self.config.groups.scales().len();
        let squares = squares.into_iter().filter(|_| self.config.layer_norms);
        let named = squares.map(|(key, sum)| (name_of(key, groups), sum));
        self.gradients = GradientStats::of(named, self.grad_scale, zeros);
        let mut mean = None;
        let mut anomaly = None;
        if self.config.anomaly.is_on() {
            let (loss, ..) = *mean.insert(self.mean_loss(&losses, &scores, units, local_batches));
            anomaly = self.anomaly(loss, grad_norm)?;
        }
        let skipped = anomaly.is_some() || !grad_norm.is_finite();
        match &mut self.scaler {
            Some(scaler) if anomaly.is_none() => scaler.update(skipped),
            None if skipped && anomaly.is_none() => {
                let loss = self.mean_loss(&losses, &scores, units, local_batches).0;
                return Err(EngineError::NonFiniteGradient { norm: grad_norm, loss, step: self.step + 1 });
            }
            _ => {}
        }
        let clip_factor = clip_factor(self.config.clip, grad_norm);
        // Steps that were skipped do not count (megatron/training/training.py, `train_step`).
        let moved = self.consumed - self.skipped;
        let (lr, weight_decay) = (self.lr.at(moved), self.weight_decay.at(moved));
        match skipped {
            true => {
                self.optimizer.skip();
                self.skipped += self.plan.global() as u64;
            }
            false => {
                self.optimizer.set_weight_decay(weight_decay);
                self.update(&StepInfo { lr, grad_scale: self.grad_scale * clip_factor });
            }
        }
        let (loss, preference, grpo) = mean.unwrap_or_else(|| self.mean_loss(&losses, &scores, units, local_batches));
        let divergence = std::mem::take(&mut scores.divergence).read_any(local_batches);
        let teacher_kl = self.config.distill.map(|_| self.over_all(&divergence, local_batches).mean());
        if anomaly.is_some() {
            self.fp8.forget_step();
        } else {
            self.end_fp8_step();
        }
        self.end_routing_step(anomaly.is_none());

        let step = self.step;
        self.step += 1;
        self.consumed += self.plan.global() as u64;
        self.follow_ramp();
        let (consumed, seconds) = (self.consumed, start.elapsed().as_secs_f64());
        // What CubeCL's pool has taken before it knew the sizes of a step.
        if !std::mem::replace(&mut self.warm, true) {
            release_memory(&self.rank.device);
        }
        let experts = ExpertSummary::of(&self.loads);
        let own = self.attention_logits.as_ref().map(AttentionLogits::take);
        let of_all = |own| self.rank.group(Axis::World).all_gather_host(own).into_iter().flatten().reduce(f64::max);
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
            anomaly,
            seconds,
            experts,
            preference,
            grpo,
            teacher_kl,
            max_attention_logit: own.and_then(of_all),
        })
    }

    /// Waits for losses that are still on the device. Fails with [`EngineError::NonFiniteLoss`], unless such steps are
    /// skipped.
    pub(super) fn read(&self, losses: Losses, local_batches: &[LocalBatch]) -> Result<Losses, EngineError> {
        if self.config.anomaly.non_finite != AnomalyAction::Stop {
            return Ok(losses.read_any(local_batches));
        }
        losses.read(local_batches).map_err(|(micro_batch, loss)| EngineError::NonFiniteLoss {
            loss,
            step: self.step + 1,
            micro_batch,
            rank: self.rank.rank,
            coords: self.rank.coords,
        })
    }

    /// Why this step is to be skipped; every rank decides as the first one. Fails if it is to end the run.
    fn anomaly(&mut self, loss: f64, grad_norm: f64) -> Result<Option<(Anomaly, AnomalyAction)>, EngineError> {
        // fp16's loss scale is lowered for gradients that overflow where the loss does not.
        if self.scaler.is_some() && loss.is_finite() && !grad_norm.is_finite() {
            return Ok(None);
        }
        let world = self.rank.group(Axis::World);
        let (loss, grad_norm) = world.broadcast_host((world.rank() == 0).then_some((loss, grad_norm)), 0);
        match self.anomalies.judge(&self.config.anomaly, loss, grad_norm) {
            Some((anomaly, AnomalyAction::Stop)) => Err(EngineError::Anomaly { anomaly, step: self.step + 1 }),
            skipped => Ok(skipped),
        }
    }

    /// Drops what the passes of a step have left for its end.
    fn forget_step(&mut self) {
        self.optimizer.skip();
        self.fp8.forget_step();
    }

    /// Refuses a loss of pairs or completions that is not finite, unless such steps are skipped.
    pub(super) fn check_finite(&self, micro_batch: usize, loss: f64) -> Result<(), EngineError> {
        let (step, rank, coords) = (self.step + 1, self.rank.rank, self.rank.coords);
        match loss.is_finite() || self.config.anomaly.non_finite != AnomalyAction::Stop {
            true => Ok(()),
            false => Err(EngineError::NonFiniteLoss { loss, step, micro_batch, rank, coords }),
        }
    }

    /// The loss of the global batch, a mean over tokens, pairs, or the units of GRPO.
    fn mean_loss(
        &self,
        losses: &Losses,
        scores: &Scores,
        units: u64,
        own: &[LocalBatch],
    ) -> (f64, Option<PreferenceMeans>, Option<GrpoSums>) {
        if self.config.preference.is_some() {
            let sums = self.all_pairs(scores.pairs);
            return (sums.loss / units.max(1) as f64, Some(sums.means()), None);
        }
        if self.config.grpo.is_some() {
            let sums = self.all_completions(scores.completions);
            return (sums.loss / units.max(1) as f64, None, Some(sums));
        }
        (self.over_all(losses, own).mean(), None, None)
    }

    /// Loss and tokens of the global batch; only the last stage has a loss, and every stage counts tokens.
    pub(super) fn over_all(&self, losses: &Losses, own: &[LocalBatch]) -> LossSum {
        let sum = LossSum { loss: losses.sum, tokens: counted(own) }.total(&self.dp_ranks);
        let loss = self.stages.all_gather_host(sum.loss).into_iter().sum();
        LossSum { loss, tokens: sum.tokens }
    }

    fn update(&mut self, info: &StepInfo) {
        let mark = self.recorder.begin();
        self.optimizer.begin_step();
        for chunk in &mut self.chunks {
            chunk.for_buckets(|bucket, model| self.optimizer.step(bucket, model, info));
        }
        self.recorder.end(mark, SpanKind::Update, None, None);
    }
}

/// Tokens that count, of a rank's sequences.
fn counted(own: &[LocalBatch]) -> u64 {
    own.iter().map(|local| local.tokens.counted() as u64).sum()
}
