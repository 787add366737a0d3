//! Memory per pipeline rank: what is there all the time, and the most that a step adds, found by walking through the
//! rank's list of actions with what each operation keeps.

mod stage;
mod unit;
mod walk;

use super::Job;
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
}

impl RankMemory {
    /// The most that is allocated at once.
    pub fn peak(&self) -> u64 {
        self.states.total() + self.activations + self.loss + self.working + self.communication
    }
}

/// Memory of every pipeline rank.
pub fn memory(job: &Job, schedule: &Schedule) -> Vec<RankMemory> {
    let placement = schedule.placement();
    let stages: Vec<StageMemory> = job.stages.stages().iter().map(|stage| StageMemory::new(job, stage)).collect();
    let rank = |rank: usize| {
        let chunks = (0..placement.chunks()).map(|chunk| &stages[placement.stage(rank, chunk)]).collect();
        Walk::new(job, chunks).run(schedule, rank)
    };
    (0..placement.ranks()).map(rank).collect()
}

/// What an update adds to what is there: the shard and the gathered weights of a bucket, or narrow copies of wide ones.
fn update(bucket: &Bucket, job: &Job) -> u64 {
    let whole = bucket.elements.next_multiple_of(job.replicas()) * job.element;
    match job.zero() {
        0 if job.element == job.wide() => 0,
        0 => whole,
        1 | 2 => whole + whole / job.replicas(),
        _ => 0,
    }
}
