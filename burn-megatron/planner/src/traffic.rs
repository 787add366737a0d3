//! Communication volume: bytes that a rank sends in a step, per axis of the layout.

use super::Job;
use super::collective::Collective;
use super::operations::{Over, Unit};
use super::state::{Bucket, buckets};
use host::schedule::{Action, Schedule};

/// Bytes that one rank sends in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Tensor parallelism.
    pub tp: u64,
    /// Pipeline parallelism: the stages before and after.
    pub pp: u64,
    /// Data parallelism: gradients and weights.
    pub dp: u64,
    /// Of these, gradients between groups of ZeRO.
    pub between_groups: u64,
    /// Context parallelism.
    pub cp: u64,
    /// Expert parallelism.
    pub ep: u64,
}

impl Traffic {
    /// All axes.
    pub fn total(&self) -> u64 {
        self.tp + self.pp + self.dp + self.cp + self.ep
    }
}

/// Bytes that a rank of a stage sends for one micro-batch, forward and backward, to tensor-, context- and
/// expert-parallel ranks.
pub fn of_micro_batch(job: &Job, units: &[Unit]) -> [[u64; 3]; 2] {
    let mut sent = [[0; 3]; 2];
    for unit in units {
        for (op, communication) in unit.ops.iter().filter_map(|op| Some((op, op.communication?))) {
            let (ranks, _) = job.ranks(communication.over);
            let bytes = |collective: Option<Collective>| collective.map_or(0, |c| c.sent(communication.bytes, ranks));
            let axis = match communication.over {
                Over::Tensor => 0,
                Over::Context => 1,
                Over::Experts => 2,
            };
            let again = u64::from(communication.again) + u64::from(unit.recomputed && unit.repeats(op));
            sent[0][axis] += bytes(communication.forward);
            sent[1][axis] += bytes(communication.backward) + again * bytes(communication.forward);
        }
    }
    sent
}

/// Bytes that the data-parallel collectives of a bucket send: for each forward and backward pass, and once per step
/// for gradients and weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replication {
    /// Weights gathered in a forward pass (ZeRO 3).
    pub forward: u64,
    /// Weights gathered and gradients scattered in a backward pass (ZeRO 2 and 3).
    pub backward: u64,
    /// Gradients after the last micro-batch (ZeRO 0 and 1).
    pub gradients: u64,
    /// Weights after the update (ZeRO 1 and 2).
    pub weights: u64,
    /// Gradients of a shard between groups, after the last micro-batch (hybrid sharding).
    pub between_groups: u64,
}

impl Replication {
    /// Of one bucket.
    pub fn of(bucket: &Bucket, job: &Job) -> Self {
        let (shards, groups) = (bucket.shards as usize, bucket.groups() as usize);
        let gather = Collective::AllGather.sent(bucket.bytes(job.element), shards);
        let scatter = Collective::ReduceScatter.sent(bucket.bytes(job.main_grad()), shards);
        let between_groups = Collective::AllReduce.sent(bucket.bytes(job.main_grad()) / bucket.shards, groups);
        match bucket.zero(job) {
            0 => Self { gradients: between_groups, ..Self::default() },
            1 => Self { gradients: scatter, weights: gather, between_groups, ..Self::default() },
            2 => Self { backward: scatter, weights: gather, between_groups, ..Self::default() },
            _ => Self { forward: gather, backward: gather + scatter, between_groups, ..Self::default() },
        }
    }
}

impl std::ops::AddAssign for Replication {
    fn add_assign(&mut self, other: Self) {
        self.forward += other.forward;
        self.backward += other.backward;
        self.gradients += other.gradients;
        self.weights += other.weights;
        self.between_groups += other.between_groups;
    }
}

/// Bytes that every pipeline rank sends in a step. A tied embedding's gradient is counted under `pp`.
pub fn traffic(job: &Job, schedule: &Schedule) -> Vec<Traffic> {
    let placement = schedule.placement();
    let local = job.local();
    let (micro_batches, boundary) =
        (schedule.spec.micro_batches as u64, local.stream_tokens * local.hidden * job.element);
    let stages = job.stages.stages();
    let tied_apart = job.shares_table() && stages.len() > 1;
    let rank = |rank: usize| {
        let mut sent = Traffic::default();
        for stage in (0..placement.chunks()).map(|chunk| &stages[placement.stage(rank, chunk)]) {
            let units = job.units(stage);
            let [forward, backward] = of_micro_batch(job, &units);
            sent.tp += micro_batches * (forward[0] + backward[0]);
            sent.cp += micro_batches * (forward[1] + backward[1]);
            sent.ep += micro_batches * (forward[2] + backward[2]);
            let mut copies = Replication::default();
            buckets(job, &local, stage, &units).iter().flatten().for_each(|b| copies += Replication::of(b, job));
            sent.dp += micro_batches * (copies.forward + copies.backward) + copies.gradients + copies.weights;
            sent.between_groups += copies.between_groups;
            sent.dp += copies.between_groups;
            if tied_apart && (stage.embedding || stage.loss) {
                sent.pp += Collective::AllReduce.sent(local.vocab * local.hidden * job.main_grad(), 2);
            }
        }
        let sends = schedule.ranks[rank].iter().filter(|action| matches!(action, Action::Send(_))).count();
        sent.pp += sends as u64 * boundary;
        sent
    };
    (0..placement.ranks()).map(rank).collect()
}
