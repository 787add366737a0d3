//! The loss on held-out sequences.

use super::super::chunk::{HeldOut, Output, Pass, Seen};
use super::super::local_batch::LocalBatch;
use super::super::losses::Losses;
use super::RankEngine;
use crate::batch::BatchPlan;
use crate::engine::{EngineError, EvalReport, TokenBatch};
use crate::schedule::{Pass as Kind, Work};
use burn::tensor::Tensor;
use models::CausalLm;
use models::layout::check_sequence;

/// What forward passes give.
#[derive(Clone, Copy)]
struct Wanted {
    /// What else than losses.
    held_out: HeldOut,
    /// The logits are divided by it.
    temperature: f64,
}

impl<M: CausalLm> RankEngine<M> {
    /// Mean loss over a held-out batch, without gradients. The number of sequences may be any multiple of micro-batch times
    /// data-parallel size.
    ///
    /// Tokens after the last prediction that counts are padding. In an MoE model padding is not routed to experts, and the
    /// sequences of a padded batch are computed one by one, so that expert capacity does not depend on padding.
    ///
    /// # Errors
    /// If the number of sequences or their length do not divide, or if they have tokens that the model lacks.
    pub fn eval_step(&mut self, batch: &TokenBatch) -> Result<EvalReport, EngineError> {
        let mut plan = BatchPlan::from_global(batch.sequences, self.plan.micro, self.plan.data_parallel)?;
        check_sequence(self.rank.mesh.layout(), batch.seq)?;
        batch.check_tokens(self.vocabulary)?;
        let ends = batch.ends();
        let filled = self.is_moe && ends.iter().any(|end| *end < batch.seq);
        if filled {
            plan = BatchPlan::from_global(batch.sequences, 1, self.plan.data_parallel)?;
        }
        let local = |micro| {
            let sequences = plan.sequences(micro, self.rank.coords.dp);
            let mut local = self.local_batch(&batch.slice(sequences.clone()));
            local.micro_batch.filled_from = filled.then(|| ends[sequences.start]);
            local
        };
        let own: Vec<LocalBatch> = (0..plan.accumulation).map(local).collect();
        if self.config.preference.is_some() {
            let sums = self.evaluate_pairs(&own)?;
            let loss = sums.loss / sums.pairs.max(1) as f64;
            return Ok(EvalReport {
                loss,
                tokens: sums.pairs,
                accuracy: None,
                teacher_kl: None,
                preference: Some(sums.means()),
            });
        }
        // Losses, hits and divergences.
        let mut all: [Losses; 3] = Default::default();
        // A file has said nothing of held-out data.
        let divergence = self.config.distill.filter(|_| self.teacher.is_some());
        let held_out = HeldOut { accuracy: self.config.accuracy, divergence };
        let read = |all: [Losses; 3]| all.map(|losses| losses.read_any(&own));
        self.score_only(&own, Wanted { held_out, temperature: 1.0 }, |engine, micro_batch, values, seen| {
            for (sum, values) in all.iter_mut().zip([Some(values), seen.hits, seen.divergence]) {
                sum.extend(values.map(|values| (micro_batch, values)));
            }
            if !engine.runs_ahead {
                all = read(std::mem::take(&mut all));
            }
        });
        let [losses, hits, divergences] = read(all);
        let sum = self.over_all(&losses, &own);
        let accuracy = held_out.accuracy.then(|| self.over_all(&hits, &own).mean());
        let teacher_kl = divergence.map(|_| self.over_all(&divergences, &own).mean());
        Ok(EvalReport { loss: sum.mean(), tokens: sum.tokens, accuracy, teacher_kl, preference: None })
    }

    /// Forward passes of micro-batches that leave nothing behind; `each` gets the losses `[sequences, seq]` of each, on the
    /// last stage.
    pub(super) fn forward_only(&mut self, own: &[LocalBatch], mut each: impl FnMut(&Self, usize, Tensor<2>)) {
        let wanted = Wanted { held_out: HeldOut::default(), temperature: 1.0 };
        self.score_only(own, wanted, |engine, micro_batch, losses, _| each(engine, micro_batch, losses));
    }

    /// [`RankEngine::forward_only`] with the losses of training, whose logits GRPO divides by the temperature.
    pub(super) fn forward_sampled(&mut self, own: &[LocalBatch], mut each: impl FnMut(&Self, usize, Tensor<2>)) {
        let wanted = Wanted { held_out: HeldOut::default(), temperature: self.temperature() };
        self.score_only(own, wanted, |engine, micro_batch, losses, _| each(engine, micro_batch, losses));
    }

    /// [`RankEngine::forward_only`], with what else is wanted of held-out tokens.
    fn score_only(
        &mut self,
        own: &[LocalBatch],
        Wanted { held_out, temperature }: Wanted,
        mut each: impl FnMut(&Self, usize, Tensor<2>, Seen),
    ) {
        if held_out.divergence.is_some() {
            self.hear_teacher(own);
        }
        let mut p2p = self.stage_p2p(own);
        // Without backward passes there is nothing to interleave: each stage in turn takes all micro-batches.
        for chunk in 0..self.chunks.len() {
            for (micro_batch, local) in own.iter().enumerate() {
                let work = Work { pass: Kind::Forward, chunk, micro_batch };
                let input = self.pipeline.input(self.stages.rank(), work).map(|input| {
                    input.transfer().into_iter().for_each(|transfer| p2p.expect(transfer));
                    p2p.take(input)
                });
                let asks = held_out.divergence.is_some() && self.chunks[chunk].model().part().head;
                let taught = if asks { self.teach(micro_batch, local) } else { None };
                let mut pass = Pass {
                    sharing: &self.config.context,
                    routers: &self.routers,
                    attention_logits: None,
                    step: self.attempts,
                    deterministic: self.config.deterministic,
                    keep: false,
                    last: false,
                    loss_grad: 0.0,
                    factors: None,
                    temperature,
                    distill: None,
                    taught,
                    held_out,
                    loss_type: self.loss_type(),
                    index: (chunk, micro_batch),
                    next: &[],
                    optimizer: &mut self.optimizer,
                    recorder: &mut self.recorder,
                    device: &self.rank.device,
                    local,
                };
                match self.chunks[chunk].forward(&mut pass, input) {
                    Output::Activation(activation) => p2p.put(work, activation),
                    Output::Losses(values, seen) => each(self, micro_batch, values, *seen),
                }
                if let Some(transfer) = self.pipeline.output(self.stages.rank(), work) {
                    p2p.send(&transfer);
                }
            }
        }
    }
}
