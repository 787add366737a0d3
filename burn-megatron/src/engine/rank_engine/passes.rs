//! The passes of a training step, in the order of the rank's list.

use super::super::chunk::{Chunk, HeldOut, Output, Pass};
use super::super::local_batch::LocalBatch;
use super::super::losses::Losses;
use super::super::p2p_communicator::P2pCommunicator;
use super::super::stage_p2p::StageP2p;
use super::RankEngine;
use super::step::Scores;
use crate::engine::EngineError;
use crate::schedule::{Action, Pass as Kind, ScheduleSpec, Work};
use crate::trace::SpanKind;
use backend_dist::shard::Unit;
use burn::tensor::{DType, Tensor};
use models::CausalLm;

impl<M: CausalLm> RankEngine<M> {
    /// The number of micro-batches from `least` on that the schedule can take.
    pub(super) fn legal_micro_batches(&self, least: usize) -> usize {
        let spec = |micro_batches| ScheduleSpec { micro_batches, ..self.pipeline.spec };
        let group = self.pipeline.spec.group();
        (least..=least + 2 * group).find(|count| spec(*count).check().is_ok()).unwrap_or(least)
    }

    /// Continues with lists of so many micro-batches.
    pub(super) fn follow(&mut self, micro_batches: usize) -> Result<(), EngineError> {
        if micro_batches != self.pipeline.spec.micro_batches {
            let spec = ScheduleSpec { micro_batches, ..self.pipeline.spec };
            self.pipeline = self.config.pipeline.schedule(spec)?;
            self.actions = self.pipeline.posted().ranks.swap_remove(self.stages.rank());
        }
        Ok(())
    }

    /// All passes of the schedule and all sums of gradients; this rank's losses.
    pub(super) fn passes(&mut self, local_batches: &[LocalBatch]) -> Result<(Losses, Scores), EngineError> {
        let mut p2p = self.stage_p2p(local_batches);
        let kl = self.kl(local_batches)?;
        self.hear_teacher(local_batches);
        let (mut losses, mut scores) = (Losses::default(), Scores::default());
        self.token_factors.clear();
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
                    let (values, divergence) =
                        self.compute(*work, order, &local_batches[work.micro_batch], &mut p2p).unzip();
                    scores.divergence.extend(divergence.flatten().map(|kl| (work.micro_batch, kl)));
                    let local = &local_batches[work.micro_batch];
                    match (values, self.config.preference, self.config.grpo) {
                        (Some(values), Some(_), _) => {
                            scores.pairs = scores.pairs.plus(self.score(work.micro_batch, local, values, kl)?);
                        }
                        (Some(values), _, Some(config)) => {
                            let tokens = self.score_completions(work.micro_batch, local, values, &config)?;
                            scores.completions = scores.completions.plus(tokens);
                        }
                        (values, ..) => losses.extend(values.map(|values| (work.micro_batch, values))),
                    }
                    if !self.runs_ahead {
                        losses = self.read(losses, local_batches)?;
                    }
                    let in_flight = self.chunks.iter().map(Chunk::in_flight).sum();
                    self.peak_in_flight = self.peak_in_flight.max(in_flight);
                }
                Action::Send(transfer) => {
                    let mark = self.recorder.begin();
                    p2p.send(transfer);
                    self.recorder.end(mark, SpanKind::Send, Some(transfer.chunk), Some(transfer.micro_batch));
                }
                Action::Recv(transfer) => p2p.expect(*transfer),
                Action::ReduceGrads { .. } | Action::Step => {}
            }
        }
        debug_assert!(p2p.is_empty(), "the schedule leaves nothing behind");
        self.sum_over_model_parallel();
        Ok((losses, scores))
    }

    /// Between stages, for micro-batches of these local_batches.
    pub(super) fn stage_p2p(&self, local_batches: &[LocalBatch]) -> P2pCommunicator<Tensor<3>, StageP2p> {
        let shapes = local_batches.iter().map(|local| self.activation_shape(local, self.hidden)).collect();
        let (pipeline, device) = (self.stages.clone(), self.rank.device.clone());
        P2pCommunicator::new(StageP2p { pipeline, device, shapes, dtype: self.dtype, posts: self.warm })
    }

    /// Of a micro-batch's activations with so many features, as this rank has them.
    pub(super) fn activation_shape(&self, local: &LocalBatch, hidden: usize) -> [usize; 3] {
        let layout = self.rank.mesh.layout();
        let parts = if layout.sequence_parallel() { layout.tp } else { 1 };
        [local.tokens.seq / parts, local.tokens.sequences, hidden]
    }

    /// One pass, `last` if no other adds to the stage's gradients, before one that uses the buckets `next` first; the
    /// losses of a forward pass of the last stage, in distillation with the KL divergences.
    fn compute(
        &mut self,
        work: Work,
        (last, next): (bool, Vec<usize>),
        local: &LocalBatch,
        p2p: &mut P2pCommunicator<Tensor<3>, StageP2p>,
    ) -> Option<(Tensor<2>, Option<Tensor<2>>)> {
        let input = self.pipeline.input(self.stages.rank(), work).map(|input| {
            let mark = self.recorder.begin();
            let tensor = p2p.take(input);
            if input.transfer().is_some() {
                self.recorder.end(mark, SpanKind::Receive, Some(work.chunk), Some(work.micro_batch));
            }
            tensor
        });
        let (mark, what) = match work.pass {
            Kind::Forward => (self.recorder.begin(), SpanKind::Forward),
            Kind::Backward => (self.recorder.begin(), SpanKind::Backward),
            Kind::BackwardInput => (self.recorder.begin(), SpanKind::BackwardInput),
            Kind::BackwardWeight => (self.recorder.begin(), SpanKind::BackwardWeight),
        };
        // The last pass that computes the head takes them away.
        let taught = match work.pass {
            Kind::Forward if self.chunks[work.chunk].model().part().head => {
                let logits = self.teach(work.micro_batch, local);
                self.taught.extend(logits.clone().map(|logits| (work.micro_batch, logits)));
                logits
            }
            Kind::Forward => None,
            _ => self.taught.remove(&work.micro_batch),
        };
        let mut pass = Pass {
            sharing: &self.config.context,
            routers: &self.routers,
            attention_logits: self.attention_logits.clone(),
            step: self.attempts,
            deterministic: self.config.deterministic,
            keep: true,
            last,
            loss_grad: self.loss_grad(local),
            factors: self.token_factors.get(&work.micro_batch).cloned(),
            temperature: self.temperature(),
            distill: self.config.distill,
            taught,
            held_out: HeldOut::default(),
            loss_type: self.loss_type(),
            index: (work.chunk, work.micro_batch),
            next: &next,
            optimizer: &mut self.optimizer,
            recorder: &mut self.recorder,
            device: &self.rank.device,
            local,
        };
        let chunk = &mut self.chunks[work.chunk];
        let mut losses = None;
        match work.pass {
            Kind::Forward => match chunk.forward(&mut pass, input) {
                Output::Activation(activation) => p2p.put(work, activation),
                Output::Losses(values, seen) => losses = Some((values, seen.divergence)),
            },
            Kind::Backward | Kind::BackwardInput => {
                if let Some(grad) = chunk.backward(&mut pass, input, work.pass == Kind::BackwardInput) {
                    p2p.put(work, grad);
                }
            }
            Kind::BackwardWeight => chunk.weight_gradients(&mut pass),
        }
        self.recorder.end(mark, what, Some(work.chunk), Some(work.micro_batch));
        losses
    }

    /// Type of the losses: the parameters' own, at least `f32`.
    pub(super) fn loss_type(&self) -> DType {
        if self.dtype == DType::F64 { DType::F64 } else { DType::F32 }
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
        self.recorder.end(mark, SpanKind::PartialSums, None, None);
    }
}
