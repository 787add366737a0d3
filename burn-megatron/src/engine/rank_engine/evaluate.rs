//! The loss on held-out rows.

use super::super::chunk::{Output, Pass};
use super::super::losses::Losses;
use super::super::share::Share;
use super::RankEngine;
use crate::batch::BatchPlan;
use crate::engine::{EngineError, EvalReport, TokenBatch};
use crate::schedule::{Pass as Kind, Work};
use models::CausalLm;
use models::layers::moe::stats;
use models::layout::check_sequence;

impl<M: CausalLm> RankEngine<M> {
    /// Mean loss over the rows of a held-out batch, without gradients. The rows may be any multiple of micro-batch
    /// times data-parallel ranks.
    ///
    /// Tokens behind the last prediction that counts fill a row up: in a mixture no expert gets them, and rows of a
    /// batch that has such are computed one by one. So what an expert has room for does not depend on them.
    ///
    /// # Errors
    /// If the rows or their length do not divide, or have tokens that the model lacks.
    pub fn eval_step(&mut self, batch: &TokenBatch) -> Result<EvalReport, EngineError> {
        let mut plan = BatchPlan::from_global(batch.rows, self.plan.micro, self.plan.data_parallel)?;
        check_sequence(self.rank.mesh.layout(), batch.seq)?;
        batch.check_tokens(self.vocabulary)?;
        let ends = batch.ends();
        let filled = self.is_mixture && ends.iter().any(|end| *end < batch.seq);
        if filled {
            plan = BatchPlan::from_global(batch.rows, 1, self.plan.data_parallel)?;
        }
        let share = |micro| {
            let rows = plan.rows(micro, self.rank.coords.dp);
            let mut share = self.share(&batch.slice(rows.clone()));
            share.of.filled_from = filled.then(|| ends[rows.start]);
            share
        };
        let own: Vec<Share> = (0..plan.accumulation).map(share).collect();
        let mut mail = self.mail(&own);
        let mut losses = Losses::default();
        // Without backward passes there is nothing to interleave: each stage in turn takes all micro-batches.
        for chunk in 0..self.chunks.len() {
            for (micro_batch, share) in own.iter().enumerate() {
                let work = Work { pass: Kind::Forward, chunk, micro_batch };
                let input = self.pipeline.input(self.stages.rank(), work).map(|input| {
                    input.transfer().into_iter().for_each(|transfer| mail.expect(transfer));
                    mail.take(input)
                });
                let mut pass = Pass {
                    context: &self.config.context,
                    keep: false,
                    last: false,
                    loss_grad: 0.0,
                    loss_type: self.loss_type(),
                    place: (chunk, micro_batch),
                    next: &[],
                    optimizer: &mut self.optimizer,
                    recorder: &mut self.recorder,
                    device: &self.rank.device,
                    share,
                };
                match stats::paused(|| self.chunks[chunk].forward(&mut pass, input)) {
                    Output::Activation(activation) => mail.put(work, activation),
                    Output::Losses(values) => losses.extend([(micro_batch, values)]),
                }
                if !self.runs_ahead {
                    losses = losses.read_any(&own);
                }
                if let Some(transfer) = self.pipeline.output(self.stages.rank(), work) {
                    mail.send(&transfer);
                }
            }
        }
        let sum = self.over_all(losses.read_any(&own), &own);
        Ok(EvalReport { loss: sum.mean(), tokens: sum.tokens })
    }
}
