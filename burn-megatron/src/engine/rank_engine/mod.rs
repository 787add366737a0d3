//! What one rank has of a run: its stages of the model, gradients, optimizer and groups. What it does with them is in
//! the modules below: `step` in a training step, `passes` in its forward and backward passes.

mod average;
mod build;
mod dynamic;
mod evaluate;
mod experts;
mod extend;
mod fp8;
mod local_batches;
mod passes;
mod preference;
mod rollouts;
mod state;
mod step;
mod teacher;
mod untrained;

use super::anomaly::AnomalyWatch;
use super::chunk::Chunk;
use super::clock::device_clock;
use super::{EngineConfig, ExpertLoad, GradientStats, Teacher};
use crate::batch::BatchPlan;
use crate::lr::{LrSchedule, WeightDecaySchedule};
use crate::optim::{LossScaler, Optimizer};
use crate::schedule::{Action, Schedule};
use crate::trace::{Recorder, Span};
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::GridKind;
use backend_dist::ops::fp8::DelayedScaling;
use backend_dist::shard::ParamSpec;
use burn::tensor::{DType, Tensor};
use dynamic::DynamicGroups;
pub use dynamic::packed_length;
use models::CausalLm;
use models::layers::AttentionLogits;
use models::layers::moe::RouterRecords;
pub use rollouts::Reference;
pub use state::Position;
use std::collections::HashMap;

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
    weight_decay: WeightDecaySchedule,
    scaler: Option<LossScaler>,
    anomalies: AnomalyWatch,
    config: EngineConfig,
    plan: BatchPlan,
    rank: Rank,
    /// Ranks that hold the same weights and see other tokens.
    dp_ranks: Group,
    /// By grid on which parameters are trained, the ranks that together hold these.
    model_parallel: Vec<(GridKind, Group)>,
    routers: RouterRecords,
    /// Of the passes of a step, if it is asked for.
    attention_logits: Option<AttentionLogits>,
    /// Of the last step.
    loads: Vec<ExpertLoad>,
    /// Of the last step.
    gradients: GradientStats,
    stages: Group,
    /// Ranks that share the sequences of their micro-batches; `None` without context parallelism.
    context: Option<Group>,
    /// Where each document is shared by as many data-parallel ranks as its length asks for.
    dynamic: Option<DynamicGroups>,
    /// First and last stage, which share the weight of tied embeddings.
    ends: Option<Group>,
    dtype: DType,
    /// A GPU works behind the host; reading a loss would end that.
    runs_ahead: bool,
    hidden: usize,
    /// Of the whole model, wherever its experts are.
    is_moe: bool,
    /// Tokens that the model knows.
    vocabulary: usize,
    /// Of the tensors of a checkpoint of the whole model.
    checkpoint_bytes: u64,
    recorder: Recorder,
    peak_in_flight: usize,
    /// A step has been done.
    warm: bool,
    step: u64,
    /// Steps that were begun.
    attempts: u64,
    consumed: u64,
    /// Rows of the steps that were skipped: batches need not have been of one size.
    skipped: u64,
    grad_scale: f64,
    /// The gradients of the next step are NaN.
    poisoned: bool,
    /// Of preference tuning and GRPO, by micro-batch: what the gradients of its tokens' losses are.
    token_factors: HashMap<usize, Vec<f64>>,
    /// Of GRPO.
    reference: Option<Reference<M>>,
    /// Of distillation.
    teacher: Option<Teacher>,
    /// Activations of its last stage, by micro-batch, until the forward pass of the head.
    heard: HashMap<usize, Tensor<3>>,
    /// Its logits, by micro-batch, from the forward pass to the backward pass.
    taught: HashMap<usize, Tensor<3>>,
}

impl<M: CausalLm> RankEngine<M> {
    /// The stages of the model that this rank holds, in the order of the layers; under ZeRO 3 without their
    /// weights, on GPUs with whatever is in their place.
    pub fn stages(&self) -> impl Iterator<Item = &M> {
        self.chunks.iter().flat_map(|chunk| &chunk.buckets).for_each(|(_, bucket)| self.optimizer.ready(*bucket));
        self.chunks.iter().map(Chunk::model)
    }

    /// Makes the gradients of the next step NaN, as a broken GPU would.
    pub(crate) fn poison(&mut self) {
        self.poisoned = true;
    }

    /// How the global batch of the next step is split.
    pub fn plan(&self) -> &BatchPlan {
        &self.plan
    }

    /// Splits the batch of the next step.
    fn follow_ramp(&mut self) {
        let plan = self.config.plan_at(self.consumed, self.plan.data_parallel);
        self.plan = plan.expect("all sizes of the ramp divide");
    }

    /// Finished optimizer steps.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// What the last step says of its gradients.
    pub fn gradient_stats(&self) -> &GradientStats {
        &self.gradients
    }

    /// The optimizer and its buffers.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The most micro-batches in flight (activations saved for backward) in the last step, over all stages of this rank.
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
}
