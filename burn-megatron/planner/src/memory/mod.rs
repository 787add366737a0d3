//! Memory per pipeline rank: the states that are always allocated, and the peak that a step adds, found by going
//! through the rank's list of actions with the tensors that each operation saves for backward.

mod frozen;
mod pages;
mod stage;
mod tracker;
mod unit;

use super::Job;
use super::operations::Over;
use super::state::{Bucket, States};
use frozen::{FrozenModels, drawing};
use host::schedule::Schedule;
use layouts::mesh::GridKind;
use layouts::sizes::{PIECE, SLOTS};
use pages::fragmentation;
use stage::StageMemory;
use tracker::MemoryTracker;
#[cfg(test)]
pub(super) use unit::UnitMemory;

/// Bytes of one pipeline rank at its peak; its tensor- and data-parallel neighbours need the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Weights, gradients, master weights and optimizer states.
    pub states: States,
    /// Tensors that forward passes save for backward, without those of the head.
    pub activations: u64,
    /// The same for the head: logits and the loss's saved tensors.
    pub loss: u64,
    /// Tensors of the running pass: gradients of activations, and of a unit's weights.
    pub working: u64,
    /// Gathered weights, buffers of gradient reductions, a tensor in transfer to another stage, pieces of states from the
    /// host.
    pub communication: u64,
    /// A teacher, and its activations that wait for the head; a reference model.
    pub frozen: u64,
    /// Keys and values of completions.
    pub cache: u64,
    /// Fragmentation: bytes of the GPU allocator's pages that no tensor uses.
    pub pages: u64,
    /// GPU memory of driver and libraries.
    pub libraries: u64,
    /// Inputs of recomputed layers that wait in host memory, which the peak does not count.
    pub host: u64,
}

impl RankMemory {
    /// The peak.
    pub fn peak(&self) -> u64 {
        self.states.total() + self.in_passes() + self.pages + self.libraries
    }

    /// What is no state.
    fn in_passes(&self) -> u64 {
        self.activations + self.loss + self.working + self.communication + self.frozen + self.cache
    }
}

/// Bytes of all ranks together; `None` where the schedule does not exist.
pub fn total_memory(job: &Job) -> Option<u64> {
    let job = job.longest_sequences();
    let schedule = job.lists().ok()?;
    let ranks = (job.layout.world_size() / job.layout.pp) as u64;
    Some(memory(&job, &schedule).iter().fold(0, |sum: u64, rank| sum.saturating_add(rank.peak().saturating_mul(ranks))))
}

/// Memory of every pipeline rank.
pub fn memory(job: &Job, schedule: &Schedule) -> Vec<RankMemory> {
    let placement = schedule.placement();
    let stages: Vec<StageMemory> = job.stages.stages().iter().map(|stage| StageMemory::new(job, stage)).collect();
    let rank = |rank: usize| {
        let chunks: Vec<_> = (0..placement.chunks()).map(|chunk| &stages[placement.stage(rank, chunk)]).collect();
        let largest = chunks.iter().map(|stage| stage.largest).max().unwrap_or(0);
        let in_pages: u64 = chunks.iter().map(|stage| stage.in_pages).sum();
        let FrozenModels { bytes: frozen, teaching } = FrozenModels::of(job, &chunks, (placement, rank));
        let drawing = drawing(job, &chunks, (placement, rank));
        let staged = chunks.iter().map(|stage| stage.staged).max().unwrap_or(0);
        let step = MemoryTracker::new(job, chunks, teaching).run(schedule, rank);
        let most = drawing.filter(|drawing| drawing.peak() > step.peak() + staged);
        let staged = if most.is_some() { 0 } else { staged };
        let most = RankMemory { frozen, ..most.unwrap_or(step) };
        let pages = if job.gpu { fragmentation(in_pages + most.in_passes(), largest) } else { 0 };
        RankMemory { communication: most.communication + staged, pages, libraries: libraries(job), ..most }
    };
    (0..placement.ranks()).map(rank).collect()
}

/// A CUDA context with the kernels of a run, and the memory that the driver always reserves: 1.2 GiB as measured.
const CONTEXT: u64 = 6 * (1 << 30) / 5;
/// The same of other GPUs that reach this one: an estimate.
const PEERS: u64 = 460 << 20;
/// Buffers and channels of an NCCL communicator between GPUs of a host: an estimate.
const COMMUNICATOR: u64 = 3 << 27;
/// The workspace of cuBLASLt (backend-dist/gpu/src/cuda/lt_plan/mod.rs).
const CUBLAS_LT: u64 = 64 << 20;

/// Memory of driver and libraries on each GPU: one communicator for each kind of group (those that shard and those
/// that hold the same shard, of experts too, one for FP8 scales with context parallelism), two for each neighbour in a
/// pipeline.
fn libraries(job: &Job) -> u64 {
    let neighbours = if job.layout.pp > 2 { 2 } else { job.layout.pp as u64 - 1 };
    let copies = |grid| {
        let bucket = Bucket::new(job, grid, 0, 0);
        u64::from(bucket.shards > 1) + u64::from(bucket.groups() > 1)
    };
    let experts = u64::from(job.ranks(Over::Experts).0 > 1) + copies(GridKind::Expert);
    let experts = if job.decoder.experts.is_some() { experts } else { 0 };
    let scales = u64::from(job.layout.cp > 1 && !job.fp8.is_empty());
    let communicators = u64::from(job.layout.tp > 1) + copies(GridKind::Dense) + experts + scales + 2 * neighbours;
    let peers = if job.layout.world_size() > 1 { PEERS } else { 0 };
    if job.gpu { CONTEXT + CUBLAS_LT + peers + communicators * COMMUNICATOR } else { 0 }
}

/// GPU memory that pieces of a bucket's states pass through, where these are in host memory.
fn staged(bucket: &Bucket, job: &Job) -> u64 {
    let host = States::of(bucket, &Job { offload: 1.0, ..job.clone() }).host;
    let elements = bucket.elements.div_ceil(bucket.shards).max(1);
    let piece = SLOTS as u64 * elements.min(PIECE as u64);
    if job.gpu && job.offload > 0.0 { piece * host.div_ceil(elements) } else { 0 }
}

/// Additional bytes of an update: the shard and the gathered weights of a bucket, or narrow copies of wide weights.
fn update(bucket: &Bucket, job: &Job) -> u64 {
    let whole = bucket.bytes(job.element);
    match bucket.zero(job) {
        // One kernel writes narrow and wide weights; they are gathered in place.
        _ if job.gpu => 0,
        0 if job.element == job.wide() => 0,
        0 => whole,
        1 | 2 => whole + whole / bucket.shards,
        _ => 0,
    }
}
