//! The loss on held-out sequences.

use super::super::chunk::{Output, Pass};
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
    /// Which labels are the likeliest tokens too.
    accuracy: bool,
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
            return Ok(EvalReport { loss, tokens: sums.pairs, accuracy: None, preference: Some(sums.means()) });
        }
        let mut losses = Losses::default();
        let mut hits = Losses::default();
        let wanted = Wanted { accuracy: self.config.accuracy, temperature: 1.0 };
        self.score_only(&own, wanted, |engine, micro_batch, values, right| {
            losses.extend([(micro_batch, values)]);
            hits.extend(right.map(|right| (micro_batch, right)));
            if !engine.runs_ahead {
                losses = std::mem::take(&mut losses).read_any(&own);
                hits = std::mem::take(&mut hits).read_any(&own);
            }
        });
        let sum = self.over_all(&losses.read_any(&own), &own);
        let hits = self.config.accuracy.then(|| self.over_all(&hits.read_any(&own), &own).mean());
        Ok(EvalReport { loss: sum.mean(), tokens: sum.tokens, accuracy: hits, preference: None })
    }

    /// Forward passes of micro-batches that leave nothing behind; `each` gets the losses `[sequences, seq]` of each, on the
    /// last stage.
    pub(super) fn forward_only(&mut self, own: &[LocalBatch], mut each: impl FnMut(&Self, usize, Tensor<2>)) {
        let wanted = Wanted { accuracy: false, temperature: 1.0 };
        self.score_only(own, wanted, |engine, micro_batch, losses, _| each(engine, micro_batch, losses));
    }

    /// [`RankEngine::forward_only`] with the losses of training, whose logits GRPO divides by the temperature.
    pub(super) fn forward_sampled(&mut self, own: &[LocalBatch], mut each: impl FnMut(&Self, usize, Tensor<2>)) {
        let wanted = Wanted { accuracy: false, temperature: self.temperature() };
        self.score_only(own, wanted, |engine, micro_batch, losses, _| each(engine, micro_batch, losses));
    }

    /// [`RankEngine::forward_only`], with which labels are the likeliest tokens where that is wanted.
    fn score_only(
        &mut self,
        own: &[LocalBatch],
        Wanted { accuracy, temperature }: Wanted,
        mut each: impl FnMut(&Self, usize, Tensor<2>, Option<Tensor<2>>),
    ) {
        let mut p2p = self.stage_p2p(own);
        // Without backward passes there is nothing to interleave: each stage in turn takes all micro-batches.
        for chunk in 0..self.chunks.len() {
            for (micro_batch, local) in own.iter().enumerate() {
                let work = Work { pass: Kind::Forward, chunk, micro_batch };
                let input = self.pipeline.input(self.stages.rank(), work).map(|input| {
                    input.transfer().into_iter().for_each(|transfer| p2p.expect(transfer));
                    p2p.take(input)
                });
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
                    taught: None,
                    accuracy,
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
                    Output::Losses(values, hits) => each(self, micro_batch, values, hits.map(|hits| *hits)),
                }
                if let Some(transfer) = self.pipeline.output(self.stages.rank(), work) {
                    p2p.send(&transfer);
                }
            }
        }
    }
}
