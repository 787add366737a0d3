//! A teacher in the stages of the student's pipeline.
//!
//! Its layers are divided evenly, whatever the schedule: one stage for each rank, the last where the student's head is. Before
//! the passes of a step it reads all micro-batches, and the last stage keeps its activations; their logits, which are many
//! more numbers, are made when the student's head needs them.

use super::super::distill::Teacher;
use super::super::local_batch::LocalBatch;
use super::RankEngine;
use crate::schedule::Placement;
use backend_dist::collective::{send, start_recv};
use burn::tensor::Tensor;
use models::{CausalLm, Part};

impl<M: CausalLm> RankEngine<M> {
    /// With a teacher, of which the loss of training takes the logits; the loss of evaluation stays the cross-entropy.
    pub fn with_teacher(mut self, teacher: Teacher) -> Self {
        self.teacher = Some(teacher);
        self
    }

    /// What this rank holds of a teacher with so many layers.
    pub fn teacher_part(&self, layers: usize) -> Part {
        let (stage, stages) = (self.teacher_stage(self.stages.rank()), self.stages.size());
        let layers = stage * layers / stages..(stage + 1) * layers / stages;
        Part { layers, embedding: stage == 0, head: stage + 1 == stages }
    }

    /// The teacher's stage of a rank of the pipeline, or the rank of a stage.
    fn teacher_stage(&self, rank: usize) -> usize {
        match self.pipeline.placement() {
            Placement::Loop { .. } => rank,
            Placement::V { ranks } => ranks - 1 - rank,
        }
    }

    /// The teacher's activations for all micro-batches of a step, where they go from stage to stage.
    pub(super) fn hear_teacher(&mut self, local_batches: &[LocalBatch]) {
        let (own, stages) = (self.teacher_stage(self.stages.rank()), self.stages.size());
        let Some(teacher) = self.teacher.as_ref().filter(|_| stages > 1) else { return };
        let device = &self.rank.device;
        for (micro_batch, local) in local_batches.iter().enumerate() {
            let shape = self.activation_shape(local, teacher.hidden);
            let receive = |from| start_recv(shape, self.dtype, device, from, &self.stages).wait();
            let before = (own > 0).then(|| receive(self.teacher_stage(own - 1)));
            let activations = teacher.activations(local, before, device);
            match own + 1 < stages {
                true => send(activations, self.teacher_stage(own + 1), &self.stages),
                false => self.heard.extend([(micro_batch, activations)]),
            }
        }
    }

    /// The teacher's logits for a micro-batch whose head this rank computes.
    pub(super) fn teach(&mut self, micro_batch: usize, local: &LocalBatch) -> Option<Tensor<3>> {
        let teacher = self.teacher.as_ref()?;
        let heard = self.heard.remove(&micro_batch);
        Some(teacher.logits_of(heard.unwrap_or_else(|| teacher.activations(local, None, &self.rank.device))))
    }
}
