//! Memory per pipeline rank: what is there all the time, and the most that a step adds, found by walking through the
//! rank's list of actions with what each operation keeps.

mod stage;
mod unit;
mod walk;

use super::Job;
use super::operations::Over;
use super::state::{Bucket, States};
use crate::schedule::Schedule;
use stage::StageMemory;
#[cfg(test)]
pub(super) use unit::UnitMemory;
use walk::Walk;

/// Bytes of one pipeline rank; its tensor and data parallel neighbours need the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Weights, gradients, master and moments; of the gradients what is there at the fullest moment.
    pub states: States,
    /// What forward passes keep for their backward passes, at the fullest moment.
    pub activations: u64,
    /// The same of the head: logits and what the loss keeps.
    pub loss: u64,
    /// What the pass of that moment works with: gradients of activations, and of a unit's weights.
    pub working: u64,
    /// Gathered weights, buffers that gradients are reduced in, a tensor on its way to another stage.
    pub communication: u64,
    /// What the allocator of a GPU takes for its pages beyond the tensors in them.
    pub pages: u64,
    /// What driver and libraries take of a GPU for themselves.
    pub libraries: u64,
}

impl RankMemory {
    /// The most that is allocated at once.
    pub fn peak(&self) -> u64 {
        self.states.total()
            + self.activations
            + self.loss
            + self.working
            + self.communication
            + self.pages
            + self.libraries
    }
}

/// Memory of every pipeline rank.
pub fn memory(job: &Job, schedule: &Schedule) -> Vec<RankMemory> {
    let placement = schedule.placement();
    let stages: Vec<StageMemory> = job.stages.stages().iter().map(|stage| StageMemory::new(job, stage)).collect();
    let rank = |rank: usize| {
        let chunks: Vec<_> = (0..placement.chunks()).map(|chunk| &stages[placement.stage(rank, chunk)]).collect();
        let (pages, libraries) = (if job.gpu { gaps(&chunks) } else { 0 }, libraries(job));
        RankMemory { pages, libraries, ..Walk::new(job, chunks).run(schedule, rank) }
    };
    (0..placement.ranks()).map(rank).collect()
}

/// What pages take beyond the tensors in them. CubeCL cuts tensors from pages as large as the largest; one that fills
/// more than half of a page finds none with room for it while small ones lie everywhere, so that a pass needs as many
/// more pages as it has large tensors at a time. By measurement, docs/planning.md.
fn gaps(chunks: &[&StageMemory]) -> u64 {
    let units = || chunks.iter().flat_map(|stage| &stage.sizes);
    let page = units().flat_map(|(_, sizes)| sizes).copied().max().unwrap_or(0);
    let large = |(is_head, sizes): &(bool, Vec<u64>)| {
        let count = sizes.iter().filter(|size| 2 * **size >= page).count() as u64;
        // The gradient of the logits takes their place.
        if *is_head { count } else { 2 * count }
    };
    page * units().map(large).max().unwrap_or(0)
}

/// What a CUDA context with the kernels of a run takes, with what the driver keeps of a GPU in any case: about so much.
const CONTEXT: u64 = 1 << 30;
/// Buffers and channels of an NCCL communicator between GPUs of a host: about so much.
const COMMUNICATOR: u64 = 3 << 27;
/// The workspace of cuBLASLt (backend-dist/src/cuda/lt_plan.rs).
const CUBLAS_LT: u64 = 64 << 20;

/// What driver and libraries take of each GPU: one communicator for each kind of group (experts have two of their own,
/// scales of FP8 one where ranks share sequences), two for each neighbour in a pipeline.
fn libraries(job: &Job) -> u64 {
    let neighbours = if job.layout.pp > 2 { 2 } else { job.layout.pp as u64 - 1 };
    let experts = job
        .decoder
        .experts
        .as_ref()
        .map_or(0, |_| u64::from(job.ranks(Over::Experts).0 > 1) + u64::from(job.expert_replicas() > 1));
    let scales = u64::from(job.layout.cp > 1 && !job.fp8.is_empty());
    let communicators =
        u64::from(job.layout.tp > 1) + u64::from(job.replicas() > 1) + experts + scales + 2 * neighbours;
    if job.gpu { CONTEXT + CUBLAS_LT + communicators * COMMUNICATOR } else { 0 }
}

/// What an update adds to what is there: the shard and the gathered weights of a bucket, or narrow copies of wide ones.
fn update(bucket: &Bucket, job: &Job) -> u64 {
    let whole = bucket.bytes(job.element);
    match bucket.zero(job) {
        // One kernel writes narrow and wide weights; they are gathered where they lie.
        _ if job.gpu => 0,
        0 if job.element == job.wide() => 0,
        0 => whole,
        1 | 2 => whole + whole / bucket.replicas,
        _ => 0,
    }
}
