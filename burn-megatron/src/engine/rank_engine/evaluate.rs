//! The loss on held-out rows.

use super::super::chunk::{Output, Pass};
use super::super::report::LossSum;
use super::RankEngine;
use crate::batch::BatchPlan;
use crate::engine::{EngineError, EvalReport, TokenBatch};
use crate::schedule::{Pass as Kind, Work};
use burn::tensor::DType;
use models::CausalLm;

impl<M: CausalLm> RankEngine<M> {
    /// Mean loss over the rows of a held-out batch, without gradients. The rows may be any multiple of micro-batch
    /// times data-parallel ranks.
    ///
    /// # Errors
    /// If the rows do not divide.
    pub fn eval_step(&mut self, batch: &TokenBatch) -> Result<EvalReport, EngineError> {
        let plan = BatchPlan::from_global(batch.rows, self.plan.micro, self.plan.data_parallel)?;
        let own: Vec<TokenBatch> =
            (0..plan.accumulation).map(|micro| batch.slice(plan.rows(micro, self.rank.coords.dp))).collect();
        let mut mail = self.mail(plan.micro, batch.seq);
        let mut sum = LossSum::default();
        // Without backward passes there is nothing to interleave: each stage in turn takes all micro-batches.
        for chunk in 0..self.chunks.len() {
            for (micro_batch, rows) in own.iter().enumerate() {
                let work = Work { pass: Kind::Forward, chunk, micro_batch };
                let input = self.pipeline.input(self.stages.rank(), work).map(|input| {
                    input.transfer().into_iter().for_each(|transfer| mail.expect(transfer));
                    mail.take(input)
                });
                let mut pass = Pass {
                    dropout: None,
                    keep: false,
                    last: false,
                    loss_grad: 0.0,
                    loss_type: if self.dtype == DType::F64 { DType::F64 } else { DType::F32 },
                    place: (chunk, micro_batch),
                    optimizer: &mut self.optimizer,
                    recorder: &mut self.recorder,
                    device: &self.rank.device,
                    batch: rows,
                };
                let Output { activation, loss } = self.chunks[chunk].forward(&mut pass, input);
                activation.into_iter().for_each(|activation| mail.put(work, activation));
                sum = loss.into_iter().fold(sum, |sum, loss| [sum, loss].into_iter().sum());
                if let Some(transfer) = self.pipeline.output(self.stages.rank(), work) {
                    mail.send(&transfer);
                }
            }
        }
        let sum = self.over_all(sum, &own);
        Ok(EvalReport { loss: sum.mean(), tokens: sum.tokens })
    }
}
