//! Memory of a stage's passes.

use super::unit::UnitMemory;
use super::{staged, update};
use crate::Job;
use crate::operations::{Op, Unit};
use crate::post_training::TABLE;
use crate::state::{Bucket, States, buckets};
use host::schedule::stages::Stage;
use layouts::mesh::GridKind;
use layouts::sizes::size_class;
use std::collections::BTreeMap;

/// The units of a stage in their passes.
pub(super) struct StageMemory {
    units: Vec<StageUnit>,
    /// The stage's states, without gradients under ZeRO 1.
    pub states: States,
    /// The largest buffer of the passes, or weight.
    pub largest: u64,
    /// Weights that are not in buffers of their own: frozen ones, and those in FP8 that change with every step.
    pub in_pages: u64,
    /// All weights of the stage, not sharded.
    pub whole: u64,
    /// Maximum additional bytes of a bucket's update.
    pub update: u64,
    /// GPU memory that pieces of states in host memory pass through.
    pub staged: u64,
    /// Maximum additional bytes of a bucket's gradient reduction.
    pub reduce: u64,
    /// A tied embedding's gradient buffer, which lives from the head to the embedding under ZeRO 2 and 3.
    open: u64,
}

struct StageUnit {
    memory: UnitMemory,
    head: bool,
    /// Gathered weights under ZeRO 3 on CPU ranks; on GPUs states count them.
    gathered: u64,
    /// Buffers of the gradient reduction after each micro-batch, under ZeRO 2 and 3.
    reduced: u64,
    /// Under ZeRO 1: bytes that the first gradients of a step add, the whole bucket instead of the shard.
    grows: u64,
}

/// The peak of a pass, with the saved tensors of its micro-batch, and its communication buffers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peak {
    pub bytes: u64,
    pub communication: u64,
    /// Growth of ZeRO 1's gradients up to then.
    pub grown: u64,
}

impl Peak {
    fn total(&self) -> u64 {
        self.bytes + self.communication + self.grown
    }

    pub fn max(self, other: Peak) -> Peak {
        if other.total() > self.total() { other } else { self }
    }
}

impl StageMemory {
    pub fn new(job: &Job, stage: &Stage) -> Self {
        let (units, local) = (job.units(stage), job.local());
        let owned = buckets(job, &local, stage, &units);
        let main_grad = job.main_grad();
        let table = Bucket::new(job, GridKind::Dense, local.vocab * local.hidden, 0);
        // A frozen table has no gradient.
        let shared = job.shares_table() && stage.embedding && stage.loss;
        let piece = |(unit, owned): (&Unit, &Vec<Bucket>)| {
            let open = Some(&table).filter(|_| unit.head && shared);
            let on_host = |of: &dyn Fn(&Bucket, u8) -> u64, buckets: &mut dyn Iterator<Item = &Bucket>| {
                if job.gpu { 0 } else { buckets.map(|bucket| of(bucket, bucket.zero(job))).sum() }
            };
            let gathered = |bucket: &Bucket, zero| if zero == 3 { bucket.bytes(job.element) } else { 0 };
            let reduced = |bucket: &Bucket, zero| if zero >= 2 { bucket.bytes(main_grad) } else { 0 };
            let whole_but_the_shard =
                |bucket: &Bucket| bucket.bytes(main_grad) - bucket.bytes(main_grad) / bucket.shards;
            let grows = |bucket: &Bucket, zero| if zero == 1 { whole_but_the_shard(bucket) } else { 0 };
            StageUnit {
                memory: UnitMemory::new(unit, job),
                head: unit.head,
                gathered: on_host(&gathered, &mut owned.iter().chain(open)),
                reduced: on_host(&reduced, &mut owned.iter().chain(open)),
                grows: on_host(&grows, &mut owned.iter()),
            }
        };
        let mut states = States::default();
        owned.iter().flatten().for_each(|bucket| states += States::of(bucket, job));
        let tied = job.decoder.tied && stage.embedding && stage.loss && job.is_frozen(TABLE);
        let twice = if tied { table.elements * job.element } else { 0 };
        let ops = || units.iter().flat_map(|unit| &unit.ops);
        let frozen = ops().map(|op| op.frozen).sum::<u64>() - twice;
        states.weights += frozen;
        let whole = owned.iter().flatten().map(|bucket| bucket.elements).sum::<u64>() * job.element + frozen;
        let zero = table.zero(job);
        // Weights that are gathered for a pass are cast whenever they are used.
        let quantised = |op: &Op| if job.fp8_weights { op.fp8.map_or(0, |fp8| fp8.weight) } else { 0 };
        let (constant, changing): (Vec<&Op>, Vec<&Op>) = ops().partition(|op| op.frozen > 0);
        let changing = if zero < 3 { changing.into_iter().map(quantised).sum() } else { 0 };
        states.quantised = constant.into_iter().map(quantised).sum::<u64>() + changing;
        let most = |of: &dyn Fn(&Bucket) -> u64| owned.iter().flatten().map(of).max().unwrap_or(0);
        let reduce = |bucket: &Bucket| match (bucket.dp_ranks, bucket.zero(job)) {
            (1, _) => 0,
            _ if job.gpu => 0,
            (_, 2..) if bucket.groups() == 1 => 0,
            // What a collective gives, before what it was given is freed.
            _ => bucket.bytes(main_grad) / bucket.shards,
        };
        let pieces: Vec<StageUnit> = units.iter().zip(&owned).map(piece).collect();
        states.gradients -= pieces.iter().map(|piece| piece.grows).sum::<u64>();
        let cut = |bucket: &&Bucket, stage: u8| job.gpu && bucket.zero(job) >= stage;
        let open = owned.iter().flatten().filter(|bucket| cut(bucket, 2));
        states.gradients += double_buffered(open.map(|bucket| (bucket.bytes(main_grad), 1)));
        if zero == 3 && job.gpu {
            let of_unit = |unit: &Vec<Bucket>| -> Vec<(u64, u64)> {
                let size = |bucket: &Bucket| bucket.bytes(job.element);
                let alike = |one: &Bucket| unit.iter().filter(|bucket| size(bucket) == size(one)).count() as u64;
                unit.iter().filter(|bucket| cut(bucket, 3)).map(|bucket| (size(bucket), alike(bucket))).collect()
            };
            states.weights += double_buffered(owned.iter().flat_map(of_unit));
        }
        Self {
            units: pieces,
            states,
            whole,
            largest: ops().map(|op| largest(op, job.element)).max().unwrap_or(0),
            in_pages: frozen + changing,
            update: most(&|bucket| update(bucket, job)),
            staged: most(&|bucket| staged(bucket, job)),
            reduce: most(&reduce),
            open: if zero >= 2 && shared && !job.gpu { table.bytes(main_grad) } else { 0 },
        }
    }

    /// Whether the losses are computed here.
    pub fn has_head(&self) -> bool {
        self.units.iter().any(|unit| unit.head)
    }

    /// Bytes saved for backward per micro-batch: outside of the head, and in it.
    pub fn kept(&self) -> [u64; 2] {
        self.split(|memory| memory.kept)
    }

    /// The same between the two halves of a backward.
    pub fn deferred(&self) -> [u64; 2] {
        self.split(|memory| memory.deferred)
    }

    /// Bytes per micro-batch that wait for the backward pass in host memory.
    pub fn host(&self) -> u64 {
        self.units.iter().map(|unit| unit.memory.host).sum()
    }

    fn split(&self, of: impl Fn(&UnitMemory) -> u64) -> [u64; 2] {
        let sum = |head: bool| self.units.iter().filter(|unit| unit.head == head).map(|unit| of(&unit.memory)).sum();
        [sum(false), sum(true)]
    }

    /// Bytes that the gradients of a step add under ZeRO 1.
    pub fn grows(&self) -> u64 {
        self.units.iter().map(|unit| unit.grows).sum()
    }

    pub fn forward(&self) -> Peak {
        let (mut kept, mut peak) = (0, Peak::default());
        for unit in &self.units {
            peak = peak.max(unit.gathering(kept, 0, 0));
            peak = peak.max(Peak { bytes: kept + unit.memory.forward, communication: unit.gathered, grown: 0 });
            kept += unit.memory.kept;
        }
        peak
    }

    /// A backward pass, or with `split` its first half; `first` of the step.
    pub fn backward(&self, split: bool, first: bool) -> Peak {
        let (mut kept, mut deferred, mut peak) = (self.kept().iter().sum::<u64>(), 0, Peak::default());
        let (mut grown, mut open) = (0, 0);
        for unit in self.units.iter().rev() {
            let StageUnit { memory, gathered, reduced, grows, .. } = *unit;
            peak = peak.max(unit.gathering(kept + deferred, open, grown));
            kept -= memory.kept;
            let pass = if split { memory.backward_input } else { memory.backward };
            peak = peak.max(Peak { bytes: kept + deferred + pass, communication: gathered + open, grown });
            if split {
                deferred += memory.deferred;
                continue;
            }
            grown += if first { grows } else { 0 };
            let communication = gathered + reduced.max(open);
            peak = peak.max(Peak { bytes: kept + memory.gradients, communication, grown });
            open = if unit.head { self.open } else { open };
        }
        peak
    }

    /// The second half of a backward pass.
    pub fn weights(&self, first: bool) -> Peak {
        let deferred: u64 = self.deferred().iter().sum();
        let grown = if first { self.grows() } else { 0 };
        let peak = |unit: &StageUnit| Peak {
            bytes: deferred + unit.memory.gradients,
            communication: unit.reduced.max(self.open),
            grown,
        };
        self.units.iter().map(peak).fold(Peak::default(), Peak::max)
    }
}

/// On GPUs whole buckets are double-buffered, by size: of gradients one buffer that backward passes write and one
/// that is being reduced; of ZeRO 3's weights those that a pass uses and as many that are being gathered. Given the
/// size of each bucket and how many a pass uses at once.
fn double_buffered(buckets: impl Iterator<Item = (u64, u64)>) -> u64 {
    let mut kinds: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for (size, at_once) in buckets {
        let (count, most) = kinds.entry(size).or_default();
        (*count, *most) = (*count + 1, at_once.max(*most));
    }
    kinds.into_iter().map(|(size, (count, most))| size * count.min(2 * most)).sum()
}

/// The largest buffer of an operation: its output, or its weight, which is initialised as large as it is.
fn largest(op: &Op, element: u64) -> u64 {
    (size_class(op.output.bytes as usize) as u64).max(op.weight * element).max(op.frozen)
}

impl StageUnit {
    /// While weights are gathered they exist twice: as received and in their parameters.
    fn gathering(&self, bytes: u64, open: u64, grown: u64) -> Peak {
        Peak { bytes, communication: 2 * self.gathered + open, grown }
    }
}
