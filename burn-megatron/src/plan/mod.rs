//! What a run needs, before it starts: memory, traffic and time of a step, and the layouts that suit it best. Arithmetic
//! on sizes: no tensors, no GPU. docs/planning.md explains the numbers.

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
use models::recompute::Recompute;

pub use decoder::{Decoder, Share};
pub use memory::{RankMemory, memory};
pub use report::{Report, bytes, describe};
pub use search::{Candidate, Found, Wish, search};
pub use state::{Moments, States};
pub use time::{StepTime, step_time};
pub use traffic::{Traffic, traffic};

use crate::schedule::stages::{Stage, StageLayout};
use crate::schedule::{Costs, Schedule, ScheduleError, ScheduleSpec};
use gpus::Hardware;
use operations::Unit;

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
    /// Ranks are GPUs: gradients are summed up and reduced where they lie, and the driver takes memory of its own.
    pub gpu: bool,
    /// On GPUs exchanges of tensor parallelism run beside the matrix products.
    pub overlap: bool,
}

impl Job {
    /// Ranks that hold the same weights.
    pub fn replicas(&self) -> u64 {
        (self.layout.dp * self.layout.cp) as u64
    }

    /// The ZeRO stage; with nobody to share with there is none.
    pub fn zero(&self) -> u8 {
        if self.replicas() == 1 { 0 } else { self.layout.zero }
    }

    /// Bytes of a main gradient, a master weight and a moment.
    pub fn wide(&self) -> u64 {
        self.element.max(4)
    }

    /// A rank's share of a micro-batch.
    pub fn share(&self) -> Share {
        self.decoder.share(&self.layout, self.micro_batch, self.seq)
    }

    /// Rows of a global batch.
    pub fn global_batch(&self) -> usize {
        self.micro_batch * self.schedule.micro_batches * self.layout.dp
    }

    /// The job on GPUs.
    pub fn on_gpus(self) -> Self {
        Self { gpu: true, ..self }
    }

    fn units(&self, stage: &Stage) -> Vec<Unit> {
        let (share, again) = (self.share(), self.zero() == 3 && !self.gpu);
        operations::units(self, &share, stage, again)
    }
}

/// Bytes of weights, gradients and optimizer on an average rank: what a rank needs at least.
fn state_bytes(job: &Job) -> u64 {
    let share = job.share();
    let whole = Stage { embedding: true, layers: 0..1, mtp_layers: 0..0, loss: true };
    let units = job.units(&whole);
    let mut bytes = 0;
    for (unit, buckets) in units.iter().zip(state::buckets(job, &share, &whole, &units)) {
        let times = if unit.layers > 0 { job.decoder.layers as u64 } else { 1 };
        bytes += times * buckets.iter().map(|bucket| States::of(bucket, job).total()).sum::<u64>();
    }
    bytes / job.layout.pp as u64
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
        let schedule = Schedule::new(job.schedule)?;
        let (memory, traffic) = (memory(&job, &schedule), traffic(&job, &schedule));
        let costs = time::costs(&job, hardware);
        let time = step_time(&job, &schedule, hardware).expect("schedules that are made do not deadlock");
        Ok(Self { job, schedule, memory, traffic, costs, time })
    }

    /// The pipeline rank that needs most memory.
    pub fn fullest(&self) -> usize {
        (0..self.memory.len()).max_by_key(|&rank| (self.memory[rank].peak(), std::cmp::Reverse(rank))).unwrap_or(0)
    }
}
