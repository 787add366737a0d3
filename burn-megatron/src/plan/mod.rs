//! What a run needs, before it starts: memory, traffic and time of a step, and the layouts that suit it best.
//! Arithmetic on sizes: no tensors, no GPU. docs/planning.md explains the numbers.

mod dealt;
mod decoder;
pub mod gpus;
pub mod ladder;
mod memory;
mod operations;
mod report;
mod search;
mod state;
#[cfg(test)]
mod tests;
mod time;
mod traffic;

use std::ops::Range;

use backend_dist::mesh::ParallelLayout;
use backend_dist::ops::is_worth_a_piece;
use models::recompute::Recompute;

pub use decoder::{Decoder, ExpertShare, Experts, Latent, LayerKind, Share};
pub use memory::{RankMemory, memory};
pub use report::{Report, bytes, describe};
pub use search::{Candidate, Found, Wish, search};
pub use state::{Moments, States};
pub use time::{StepTime, step_time};
pub use traffic::{Traffic, traffic};

use crate::schedule::stages::{Stage, StageLayout};
use crate::schedule::{Costs, Schedule, ScheduleError, ScheduleSpec};
use gpus::Hardware;
use operations::{Over, Unit};
use state::Bucket;

/// A run, as far as planning must know it.
#[derive(Clone, Debug)]
pub struct Job {
    /// The model.
    pub decoder: Decoder,
    /// How ranks are divided.
    pub layout: ParallelLayout,
    /// The pipeline schedule.
    pub schedule: ScheduleSpec,
    /// The layers of each stage.
    pub stages: StageLayout,
    /// Rows of a micro-batch.
    pub micro_batch: usize,
    /// Tokens of a row.
    pub seq: usize,
    /// Bytes of a weight and of an activation.
    pub element: u64,
    /// What the optimizer keeps.
    pub moments: Moments,
    /// What is computed again.
    pub recompute: Recompute,
    /// Layers whose linear layers are in FP8.
    pub fp8: Range<usize>,
    /// They keep their quantised weights.
    pub fp8_weights: bool,
    /// Routed experts of these layers are in FP8 too.
    pub fp8_experts: bool,
    /// Ranks are GPUs: gradients are summed up and reduced where they lie, and the driver takes memory of its own.
    pub gpu: bool,
    /// On GPUs exchanges of tensor parallelism run beside the matrix products.
    pub overlap: bool,
    /// Attention stays inside documents of about so many tokens, if they are shorter than a row.
    pub documents: Option<usize>,
    /// Into how many pieces a rank's experts are cut, so that exchanges run beside them; `None` where the sizes decide.
    pub expert_pieces: Option<usize>,
    /// Tokens that a rank may have of a row where documents are dealt out one by one (`context.dynamic`).
    pub dynamic: Option<usize>,
    /// Logits that a rank may hold at a time ([`positions_at_once`](backend_dist::ops::positions_at_once)).
    pub logits_at_once: usize,
}

impl Job {
    /// Ranks that hold the same weights.
    pub fn replicas(&self) -> u64 {
        (self.layout.dp * self.layout.cp) as u64
    }

    /// Ranks that hold the same experts.
    pub fn expert_replicas(&self) -> u64 {
        let ParallelLayout { tp, cp, dp, ep, .. } = self.layout;
        (tp * cp * dp / (ep * self.layout.expert_tp())) as u64
    }

    /// The ranks of an exchange, and how far one is from the next.
    pub fn ranks(&self, over: Over) -> (usize, usize) {
        let layout = &self.layout;
        match over {
            Over::Tensor => (layout.tp, 1),
            Over::Context => (layout.cp, layout.tp),
            Over::Experts => (layout.ep * layout.expert_tp(), 1),
        }
    }

    /// Bytes of a main gradient, a master weight and a moment.
    pub fn wide(&self) -> u64 {
        self.element.max(4)
    }

    /// A rank's share of a micro-batch.
    pub fn share(&self) -> Share {
        let documents = self.documents.unwrap_or(self.seq).min(self.seq);
        self.decoder.share(&self.layout, self.micro_batch, self.seq, documents)
    }

    /// Micro-batches of which tokens come to an expert together, one of each replica that divides a layer's experts.
    fn meeting(&self) -> u64 {
        (self.layout.ep * self.layout.expert_tp() / self.layout.tp).max(1) as u64
    }

    /// Rows of a global batch.
    pub fn global_batch(&self) -> usize {
        self.micro_batch * self.schedule.micro_batches * self.layout.dp
    }

    /// Into how many pieces a rank's experts are cut ([`is_worth_a_piece`]).
    fn pieces_of_experts(&self, experts: &Experts) -> usize {
        let (share, (members, _)) = (self.share(), self.ranks(Over::Experts));
        let most = share.experts.count as usize;
        let bytes = (share.experts.rows * share.hidden * self.element) as usize / members * (members - 1);
        let features = [self.decoder.hidden, experts.intermediate];
        let own = || if most > 1 && is_worth_a_piece(bytes, features) { 2 } else { 1 };
        if members > 1 { self.expert_pieces.map_or_else(own, |pieces| pieces.min(most)) } else { 1 }
    }

    /// The job on GPUs.
    pub fn on_gpus(self) -> Self {
        Self { gpu: true, ..self }
    }

    fn units(&self, stage: &Stage) -> Vec<Unit> {
        let (share, again) = (self.share(), self.layout.zero == 3 && self.replicas() > 1 && !self.gpu);
        operations::units(self, &share, stage, again)
    }
}

/// Every unit of the model once, with its buckets and how often it is there.
fn samples(job: &Job) -> Vec<(Unit, Vec<Bucket>, usize)> {
    let (share, mut all) = (job.share(), Vec::new());
    for (index, kind) in job.decoder.layer_kinds().into_iter().enumerate() {
        let first = index == 0;
        let stage = Stage { embedding: first, layers: kind.example..kind.example + 1, mtp_layers: 0..0, loss: first };
        let units = job.units(&stage);
        let buckets = state::buckets(job, &share, &stage, &units);
        let times = |unit: &Unit| if unit.head || unit.layers.is_empty() { 1 } else { kind.count };
        all.extend(units.into_iter().zip(buckets).map(|(unit, buckets)| (times(&unit), unit, buckets)));
    }
    all.into_iter().map(|(times, unit, buckets)| (unit, buckets, times)).collect()
}

/// Bytes of weights, gradients and optimizer on an average rank: what a rank needs at least.
fn state_bytes(job: &Job) -> u64 {
    let unit = |(_, buckets, times): (Unit, Vec<Bucket>, usize)| {
        times as u64 * buckets.iter().map(|bucket| States::of(bucket, job).total()).sum::<u64>()
    };
    samples(job).into_iter().map(unit).sum::<u64>() / job.layout.pp as u64
}

/// A step of a run: what it needs, rank by rank.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The run.
    pub job: Job,
    /// What every pipeline rank does.
    pub schedule: Schedule,
    /// Memory of each pipeline rank.
    pub memory: Vec<RankMemory>,
    /// What one rank of each pipeline stage sends.
    pub traffic: Vec<Traffic>,
    /// How long the passes of each stage take, in nanoseconds.
    pub costs: Costs,
    /// How long the step takes.
    pub time: StepTime,
}

impl Plan {
    /// Plans a step.
    ///
    /// # Errors
    /// A schedule that does not exist.
    pub fn new(job: Job, hardware: &Hardware) -> Result<Self, ScheduleError> {
        let dealt = job.dealt_out();
        let schedule = Schedule::new(dealt.schedule)?;
        let (memory, traffic) = (memory(&job.fullest_rows(), &schedule), traffic(&dealt, &schedule));
        let costs = time::costs(&dealt, hardware);
        let time = step_time(&dealt, &schedule, hardware).expect("schedules that are made do not deadlock");
        Ok(Self { job, schedule, memory, traffic, costs, time })
    }

    /// Seconds of the step with experts in the type of the model, where that is quicker than in FP8 and fits.
    pub fn quicker_without_fp8_experts(&self, hardware: &Hardware) -> Option<f64> {
        if self.job.fp8.is_empty() || !self.job.fp8_experts || self.job.decoder.experts.is_none() {
            return None;
        }
        let other = Self::new(Job { fp8_experts: false, ..self.job.clone() }, hardware).ok()?;
        let peak = |plan: &Self| plan.memory[plan.fullest()].peak();
        let fits = peak(&other) <= hardware.memory.max(peak(self));
        Some(other.time.step).filter(|step| fits && *step < self.time.step)
    }

    /// The pipeline rank that needs most memory.
    pub fn fullest(&self) -> usize {
        (0..self.memory.len()).max_by_key(|&rank| (self.memory[rank].peak(), std::cmp::Reverse(rank))).unwrap_or(0)
    }
}
