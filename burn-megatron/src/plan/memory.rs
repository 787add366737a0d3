//! Memory per pipeline rank: what is there all the time, and the most that a step adds, found by walking through the
//! rank's list of actions with what each operation keeps.

use std::collections::BTreeMap;

use super::Job;
use super::operations::{Activation, Op, Unit};
use super::state::{Bucket, States};
use crate::schedule::{Action, Input, Pass, Schedule};

/// Bytes of one pipeline rank; its tensor and data parallel neighbours need the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// What is there all the time.
    pub states: States,
    /// What forward passes keep for their backward passes, at the fullest moment.
    pub activations: u64,
    /// The same of the head: logits and what the loss keeps.
    pub loss: u64,
    /// What the pass of that moment works with: gradients of activations, and of a unit's weights.
    pub working: u64,
    /// Gathered weights, received tensors, gradients on their way.
    pub communication: u64,
}

impl RankMemory {
    /// The most that is allocated at once.
    pub fn peak(&self) -> u64 {
        self.states.total() + self.step()
    }

    /// What a step adds.
    pub fn step(&self) -> u64 {
        self.activations + self.loss + self.working + self.communication
    }
}

/// What a unit needs in its passes.
#[derive(Clone, Copy, Debug, Default)]
struct UnitMemory {
    /// Kept between forward and backward.
    kept: u64,
    /// Kept between the two halves of a backward.
    deferred: u64,
    /// The most in a forward, of which `kept` remains.
    forward: u64,
    /// The most in a backward, with `kept`.
    backward: u64,
    /// The same in the first half of a backward.
    backward_input: u64,
    /// Gradients of its weights, as autodiff gives them.
    gradients: u64,
}

/// A stage's units, and its buckets.
pub struct StageMemory {
    units: Vec<UnitMemory>,
    head: Option<UnitMemory>,
    /// The flat buffer that a unit's gradients are reduced in.
    reduced: Vec<u64>,
    /// Gathered weights of a unit and the next.
    gathered: u64,
}

impl StageMemory {
    /// What the stage's passes need.
    pub fn new(job: &Job, units: &[Unit], buckets: &[Vec<Bucket>]) -> Self {
        let bytes = |buckets: &[Bucket], element: u64| -> u64 {
            buckets.iter().map(|bucket| bucket.elements.next_multiple_of(job.replicas()) * element).sum()
        };
        let largest = |buckets: &Vec<Bucket>| {
            buckets.iter().map(|bucket| bucket.elements.next_multiple_of(job.replicas()) * job.wide()).max()
        };
        let sharded = job.zero() >= 2;
        let reduced = buckets.iter().map(|of| if sharded { largest(of).unwrap_or(0) } else { 0 }).collect();
        let weights: Vec<u64> = buckets.iter().map(|buckets| bytes(buckets, job.element)).collect();
        let pairs = weights.windows(2).map(|pair| pair[0] + pair[1]);
        let gathered = pairs.chain(weights.iter().copied()).max().unwrap_or(0);
        let gathered = if job.zero() == 3 { gathered } else { 0 };
        let memories = units.iter().map(|unit| UnitMemory::new(unit, job.element)).collect::<Vec<_>>();
        let head = units.iter().zip(&memories).find(|(unit, _)| unit.head).map(|(_, memory)| *memory);
        Self { units: memories, head, reduced, gathered }
    }

    /// Bytes kept per micro-batch from a forward to the end of its backward.
    pub fn kept(&self) -> u64 {
        self.units.iter().map(|unit| unit.kept).sum()
    }

    fn deferred(&self) -> u64 {
        self.units.iter().map(|unit| unit.deferred).sum()
    }

    /// Bytes of [`StageMemory::kept`] in the head.
    fn loss(&self) -> u64 {
        self.head.map_or(0, |head| head.kept)
    }

    fn forward(&self) -> u64 {
        let (mut kept, mut peak) = (0, 0);
        for unit in &self.units {
            peak = peak.max(kept + unit.forward);
            kept += unit.kept;
        }
        peak
    }

    fn backward(&self, split: bool) -> u64 {
        let (mut kept, mut deferred, mut peak) = (self.kept(), 0, 0);
        for (unit, reduced) in self.units.iter().zip(&self.reduced).rev() {
            kept -= unit.kept;
            let (pass, end) = match split {
                true => (unit.backward_input, 0),
                false => (unit.backward, unit.gradients + reduced),
            };
            peak = peak.max(kept + deferred + pass.max(end));
            deferred += if split { unit.deferred } else { 0 };
        }
        peak
    }

    fn weights(&self) -> u64 {
        let ends = self.units.iter().zip(&self.reduced).map(|(unit, reduced)| unit.gradients + reduced);
        self.deferred() + ends.max().unwrap_or(0)
    }
}

impl UnitMemory {
    fn new(unit: &Unit, element: u64) -> Self {
        let lives = Lives::of(unit);
        let first = unit.ops[0].input.bytes;
        let gradients = unit.ops.iter().map(|op| op.weight).sum::<u64>() * element;
        let deferred = unit.ops.iter().map(put_off).sum();
        let recorded = lives.forward(unit, false);
        let (kept, forward) = match unit.recomputed {
            true => (first, lives.forward(unit, true)),
            false => (lives.kept(), recorded),
        };
        let again = if unit.recomputed { recorded } else { 0 };
        let backward = |split| lives.backward(unit, element, split).max(again);
        Self { kept, deferred, forward, backward: backward(false), backward_input: backward(true), gradients }
    }
}

/// What a linear layer holds until its weight gradient is computed: its input and the gradient of its output.
fn put_off(op: &Op) -> u64 {
    if op.linear { op.output.bytes + op.keeps.iter().map(|input| input.bytes).sum::<u64>() } else { 0 }
}

/// Which operations keep a tensor.
struct Lives {
    tensors: Vec<Life>,
}

struct Life {
    tensor: Activation,
    first: usize,
    last: usize,
    dropped: bool,
}

impl Lives {
    fn of(unit: &Unit) -> Self {
        let mut lives: BTreeMap<usize, Life> = BTreeMap::new();
        for (at, op) in unit.ops.iter().enumerate() {
            for &tensor in &op.keeps {
                let dropped = tensor.module.is_some_and(|module| unit.dropped.contains(&module));
                lives.entry(tensor.id).or_insert(Life { tensor, first: at, last: at, dropped }).last = at;
            }
        }
        Self { tensors: lives.into_values().collect() }
    }

    fn sum(&self, alive: impl Fn(&Life) -> bool) -> u64 {
        self.tensors.iter().filter(|life| alive(life)).map(|life| life.tensor.bytes).sum()
    }

    fn kept(&self) -> u64 {
        self.sum(|life| !life.dropped)
    }

    /// The most in a forward pass: what is kept so far, what an operation reads and what it makes.
    fn forward(&self, unit: &Unit, unrecorded: bool) -> u64 {
        let during = |(at, op): (usize, &Op)| {
            let hands = |id: usize| id == op.input.id || id == op.output.id;
            let own = op.input.bytes + if op.output.id == op.input.id { 0 } else { op.output.bytes };
            let keeps = |life: &Life| if unrecorded { life.tensor.stream } else { !life.dropped };
            own + self.sum(|life| keeps(life) && life.first <= at && !hands(life.tensor.id))
        };
        unit.ops.iter().enumerate().map(during).max().unwrap_or(0)
    }

    /// The most in a backward pass: what earlier operations keep, the gradient that comes in and the one that goes out,
    /// the residual stream's, and the gradients of weights so far.
    fn backward(&self, unit: &Unit, element: u64, split: bool) -> u64 {
        let residual = unit.ops[0].input;
        let residual = if residual.stream && !unit.head { residual.bytes } else { 0 };
        let (mut peak, mut behind) = (0, 0);
        for (at, op) in unit.ops.iter().enumerate().rev() {
            let alive = |life: &Life| life.first <= at && (!life.dropped || at <= life.last);
            let own = if op.output.id == op.input.id { op.input.bytes } else { op.input.bytes + op.output.bytes };
            let later = split && op.linear;
            behind += if later { 0 } else { op.weight * element };
            peak = peak.max(self.sum(alive) + own + residual + behind);
            behind += if later { put_off(op) } else { 0 };
        }
        peak
    }
}

/// Bytes that a unit keeps from its forward to its backward pass.
#[cfg(test)]
pub(super) fn kept(unit: &Unit) -> u64 {
    UnitMemory::new(unit, 1).kept
}

/// Memory of every pipeline rank.
pub fn memory(job: &Job, schedule: &Schedule) -> Vec<RankMemory> {
    let placement = schedule.placement();
    let share = job.share();
    let boundary = share.stream_tokens * share.hidden * job.element;
    let stages: Vec<(StageMemory, States, u64)> = (job.stages.stages().iter())
        .map(|stage| {
            let units = job.units(stage);
            let buckets = super::state::buckets(job, &share, stage, &units);
            let mut states = States::default();
            buckets.iter().flatten().for_each(|bucket| states += States::of(bucket, job));
            let update = buckets.iter().flatten().map(|bucket| update(bucket, job)).max().unwrap_or(0);
            (StageMemory::new(job, &units, &buckets), states, update)
        })
        .collect();
    let rank = |rank: usize| {
        let of = |chunk: usize| &stages[placement.stage(rank, chunk)];
        let mut walk = Walk::default();
        for action in &schedule.ranks[rank] {
            walk.step(schedule, rank, action, boundary, |chunk| &of(chunk).0);
        }
        let mut memory = walk.fullest;
        let update = (0..placement.chunks()).map(|chunk| of(chunk).2).max().unwrap_or(0);
        if update > memory.step() {
            memory = RankMemory { communication: update, ..RankMemory::default() };
        }
        (0..placement.chunks()).for_each(|chunk| memory.states += of(chunk).1);
        memory
    };
    (0..placement.ranks()).map(rank).collect()
}

/// What an update adds to what is there: a bucket's gathered weights, or its gradients while they are reduced.
fn update(bucket: &Bucket, job: &Job) -> u64 {
    let whole = bucket.elements.next_multiple_of(job.replicas());
    match (job.replicas(), job.zero()) {
        (1, _) | (_, 3) => 0,
        (_, 0) => whole * job.wide(),
        (_, 1) => whole * job.wide().max(job.element),
        _ => whole * job.element,
    }
}

#[derive(Default)]
struct Walk {
    activations: u64,
    loss: u64,
    received: u64,
    fullest: RankMemory,
}

impl Walk {
    fn step<'a>(
        &mut self,
        schedule: &Schedule,
        rank: usize,
        action: &Action,
        boundary: u64,
        stage: impl Fn(usize) -> &'a StageMemory,
    ) {
        match action {
            Action::Recv(_) => self.received += boundary,
            Action::Compute(work) => {
                let stage = stage(work.chunk);
                if matches!(schedule.input(rank, *work), Some(Input::Remote(_))) {
                    self.received -= boundary;
                }
                let (kept, loss) = (stage.kept() - stage.loss(), stage.loss());
                let deferred_loss = stage.head.map_or(0, |head| head.deferred);
                let deferred = stage.deferred() - deferred_loss;
                let recorded = !schedule.spec.forward_only;
                // What the pass begins with of its micro-batch, the most it needs, and what is left of it.
                let (before, most, after) = match work.pass {
                    Pass::Forward if recorded => ([0, 0], stage.forward(), [kept, loss]),
                    Pass::Forward => ([0, 0], stage.forward(), [0, 0]),
                    Pass::Backward => ([kept, loss], stage.backward(false), [0, 0]),
                    Pass::BackwardInput => ([kept, loss], stage.backward(true), [deferred, deferred_loss]),
                    Pass::BackwardWeight => ([deferred, deferred_loss], stage.weights(), [0, 0]),
                };
                // What a pass ends with is counted as kept as soon as it begins, the rest is its working memory.
                let during = if work.pass == Pass::Forward { after } else { before };
                let activations = self.activations - before[0] + during[0];
                let loss = self.loss - before[1] + during[1];
                let working = most.saturating_sub(during[0] + during[1]);
                let communication = self.received + stage.gathered;
                let now = RankMemory { states: States::default(), activations, loss, working, communication };
                if now.step() > self.fullest.step() {
                    self.fullest = now;
                }
                self.activations = self.activations - before[0] + after[0];
                self.loss = self.loss - before[1] + after[1];
            }
            _ => {}
        }
    }
}
