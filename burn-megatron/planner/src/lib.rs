//! Predicts memory, communication and time of a run's step before it starts, and finds the fastest layouts.
//! Arithmetic on sizes: no tensors, no GPU, no Burn. docs/planning.md explains the numbers.
//!
//! ```
//! use host::flops::AttentionCount;
//! use planner::gpus::{Hardware, find};
//! use planner::known::llama3_8b;
//!
//! // Tokens per second of an H200 if its GEMMs never waited.
//! let h200 = Hardware::of(find("h200")?, 2);
//! let most = h200.gemms / llama3_8b().flop_shape(8192).per_token(AttentionCount::Causal);
//! assert!((11_000.0..14_000.0).contains(&most), "{most}");
//! # Ok::<(), String>(())
//! ```

mod collective;
mod decoder;
mod dynamic;
pub mod gpus;
pub mod known;
pub mod ladder;
mod memory;
mod muon;
mod operations;
mod plan;
mod post_training;
mod report;
mod search;
mod state;
#[cfg(test)]
mod tests;
mod time;
mod traffic;

use std::ops::Range;

use layouts::gemm_split::is_worth_chunking;
use layouts::mesh::{GridKind, ParallelLayout};
use layouts::recompute::Recompute;
use layouts::sizes::LOGITS_AT_ONCE;

pub use decoder::{Decoder, Experts, Latent, LayerKind, Linear, LocalExperts, LocalSizes, StateSpace};
pub use memory::{RankMemory, memory, total_memory};
pub use operations::Adapters;
pub use plan::Plan;
pub use post_training::{Completions, LossOf, PostTraining};
pub use report::{Report, bytes, describe, thousands};
pub use search::{Candidate, PASSES, SearchRequest, SearchResult, search};
pub use state::{Moments, StateBytes, States};
pub use time::{DrawTime, StepTime, step_time};
pub use traffic::{Traffic, traffic};

use gpus::GpuModel;
use host::batch::{BatchRamp, BatchSizes};
use host::schedule::stages::{Stage, StageLayout};
use host::schedule::{PipelineConfig, PipelineError, Placement, Schedule, ScheduleSpec};
use operations::{Over, Unit};
use state::Bucket;

/// A run, as the planner sees it.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model.
    pub decoder: Decoder,
    /// The parallel layout.
    pub layout: ParallelLayout,
    /// The pipeline schedule.
    pub schedule: ScheduleSpec,
    /// Its passes as text, if they are not the built-in ones.
    pub passes: Option<String>,
    /// The layers of each stage.
    pub stages: StageLayout,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// How the global batch grows to the size of a planned step.
    pub ramp: Option<BatchRamp>,
    /// Sequence length in tokens.
    pub seq: usize,
    /// Bytes of a weight and of an activation.
    pub element: u64,
    /// Those of 2 bytes are bf16, else f16.
    pub bf16: bool,
    /// Values that the optimizer keeps.
    pub moments: Moments,
    /// Bytes of an element of each.
    pub state_bytes: StateBytes,
    /// Share of the parameters whose moments and master weights are in host memory.
    pub offload: f64,
    /// Newton-Schulz iterations per step of Muon, if it is the optimizer.
    pub newton_schulz: Option<usize>,
    /// The recomputation.
    pub recompute: Recompute,
    /// Layers whose linear layers are in FP8.
    pub fp8: Range<usize>,
    /// FP8 copies of weights are kept for a whole step.
    pub fp8_weights: bool,
    /// Routed experts of FP8 layers are in FP8 too.
    pub fp8_experts: bool,
    /// Each block has a scale of its own.
    pub fp8_blocks: bool,
    /// Ranks are GPUs: gradients are accumulated and reduced in place, and the driver takes memory of its own.
    pub gpu: bool,
    /// Which GPUs, if they are; [`Plan::new`] takes it from the hardware.
    pub gpu_model: GpuModel,
    /// On GPUs tensor-parallel communication overlaps with GEMMs.
    pub overlap: bool,
    /// Average length of documents that attention is restricted to, if they are shorter than a sequence.
    pub documents: Option<usize>,
    /// Number of chunks that a rank's experts are split into to overlap communication; `None`: chosen by the sizes.
    pub expert_chunks: Option<usize>,
    /// With `context.dynamic`: maximum tokens per rank of a packed sequence.
    pub dynamic: Option<usize>,
    /// Maximum number of logits that a rank holds at a time
    /// ([`positions_at_once`](layouts::sizes::positions_at_once)).
    pub logits_at_once: usize,
    /// Adapters, next to which all other parameters are frozen.
    pub adapters: Option<Adapters>,
    /// Frozen parameters, a teacher, completions.
    pub post_training: PostTraining,
}

impl Job {
    /// Micro-batches of one sequence in bf16 with AdamW on GPUs, without recomputation, FP8 or adapters.
    pub fn new(
        decoder: Decoder,
        layout: ParallelLayout,
        schedule: ScheduleSpec,
        stages: StageLayout,
        seq: usize,
    ) -> Self {
        Self {
            decoder,
            layout,
            schedule,
            passes: None,
            stages,
            micro_batch: 1,
            ramp: None,
            seq,
            element: 2,
            bf16: true,
            moments: Moments::ADAMW,
            state_bytes: StateBytes::F32,
            offload: 0.0,
            newton_schulz: None,
            recompute: Recompute::default(),
            fp8: 0..0,
            fp8_weights: true,
            fp8_experts: true,
            fp8_blocks: false,
            gpu: true,
            gpu_model: gpus::GPUS[0],
            overlap: true,
            documents: None,
            expert_chunks: None,
            dynamic: None,
            logits_at_once: LOGITS_AT_ONCE,
            adapters: None,
            post_training: PostTraining::default(),
        }
    }

    /// The schedule in a word.
    pub fn schedule_name(&self) -> &'static str {
        if self.passes.is_some() { "passes of its own" } else { self.schedule.kind.name() }
    }

    /// What every pipeline rank does in a step.
    ///
    /// # Errors
    /// A schedule that does not exist.
    pub fn lists(&self) -> Result<Schedule, PipelineError> {
        PipelineConfig { passes: self.passes.clone(), ..PipelineConfig::default() }.schedule(self.schedule)
    }

    /// Number of ranks that hold the same weights.
    pub fn dp_ranks(&self) -> u64 {
        (self.layout.dp * self.layout.cp) as u64
    }

    /// Number of ranks that hold the same experts.
    pub fn expert_dp_ranks(&self) -> u64 {
        let ParallelLayout { tp, cp, dp, ep, .. } = self.layout;
        (tp * cp * dp / (ep * self.layout.expert_tp())) as u64
    }

    /// The number of ranks of a group, and the stride between them.
    pub fn ranks(&self, over: Over) -> (usize, usize) {
        let layout = &self.layout;
        match over {
            Over::Tensor => (layout.tp, 1),
            Over::Context => (layout.cp, layout.tp),
            Over::Experts => (layout.ep * layout.expert_tp(), 1),
        }
    }

    /// Bytes of main gradients, master weights and moments unless they are kept in less.
    pub fn wide(&self) -> u64 {
        self.element.max(4)
    }

    /// Bytes of a main gradient.
    pub fn main_grad(&self) -> u64 {
        if self.element > 4 { self.element } else { self.state_bytes.main_grads }
    }

    /// A rank's sizes of a micro-batch.
    pub fn local(&self) -> LocalSizes {
        let documents = self.documents.unwrap_or(self.seq).min(self.seq);
        self.decoder.local(&self.layout, self.micro_batch, self.seq, documents)
    }

    /// Sequences of a global batch.
    pub fn global_batch(&self) -> usize {
        self.micro_batch * self.schedule.micro_batches * self.layout.dp
    }

    /// Sequences of every global batch.
    pub fn batch_sizes(&self) -> BatchSizes {
        BatchSizes { global: self.global_batch(), ramp: self.ramp }
    }

    /// Number of chunks that a rank's experts are split into ([`is_worth_chunking`]).
    fn chunks_of_experts(&self, experts: &Experts) -> usize {
        let (local, (members, _)) = (self.local(), self.ranks(Over::Experts));
        let most = local.experts.count as usize;
        let bytes = (local.experts.rows * local.hidden * self.element) as usize / members * (members - 1);
        let features = [self.decoder.hidden, experts.intermediate];
        let own = || if most > 1 && is_worth_chunking(&self.gpu_model, bytes, features) { 2 } else { 1 };
        if members > 1 { self.expert_chunks.map_or_else(own, |chunks| chunks.min(most)) } else { 1 }
    }

    /// The job on GPUs.
    pub fn on_gpus(self) -> Self {
        Self { gpu: true, ..self }
    }

    fn units(&self, stage: &Stage) -> Vec<Unit> {
        let (local, again) = (self.local(), self.layout.zero_stage(GridKind::Dense) == 3 && !self.gpu);
        operations::units(self, &local, stage, again)
    }

    /// What a pipeline rank has of a teacher, whose layers are divided evenly (engine/rank_engine/teacher.rs); its head
    /// makes logits only.
    fn teacher_units(&self, rank: usize, placement: Placement) -> Vec<Unit> {
        let (stages, layers) = (placement.ranks(), self.decoder.layers);
        let at = match placement {
            Placement::Loop { .. } => rank,
            Placement::V { ranks } => ranks - 1 - rank,
        };
        let layers = at * layers / stages..(at + 1) * layers / stages;
        let stage = Stage { embedding: at == 0, layers, mtp_layers: 0..0, loss: at + 1 == stages };
        operations::units(self, &self.local(), &stage, false)
    }
}

/// Every kind of unit of the model once, with its buckets and how often the model has it.
fn samples(job: &Job) -> Vec<(Unit, Vec<Bucket>, usize)> {
    let (local, mut all) = (job.local(), Vec::new());
    for (index, kind) in job.decoder.layer_kinds().into_iter().enumerate() {
        let first = index == 0;
        let stage = Stage { embedding: first, layers: kind.example..kind.example + 1, mtp_layers: 0..0, loss: first };
        let units = job.units(&stage);
        let buckets = state::buckets(job, &local, &stage, &units);
        let times = |unit: &Unit| if unit.head || unit.layers.is_empty() { 1 } else { kind.count };
        all.extend(units.into_iter().zip(buckets).map(|(unit, buckets)| (times(&unit), unit, buckets)));
    }
    all.into_iter().map(|(times, unit, buckets)| (unit, buckets, times)).collect()
}

/// Bytes of weights, gradients and optimizer states on an average rank: the least that a rank needs.
fn state_bytes(job: &Job) -> u64 {
    let unit = |(_, buckets, times): (Unit, Vec<Bucket>, usize)| {
        times as u64 * buckets.iter().map(|bucket| States::of(bucket, job).total()).sum::<u64>()
    };
    samples(job).into_iter().map(unit).sum::<u64>() / job.layout.pp as u64
}
