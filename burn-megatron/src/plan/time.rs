//! How long a step takes: a roofline per operation, the simulator for the pipeline, bytes over bandwidth for exchanges.

mod unit;

use super::gpus::{BESIDE, Hardware, LATENCY};
use super::state::buckets;
use super::traffic::Replication;
use super::{Job, samples};
use crate::flops::AttentionCount;
use crate::schedule::{Action, Costs, Fault, Link, Pass, Schedule, ScheduleKind, Ticks, simulate};
use unit::{Clock, PassTime};

/// Seconds of a step, and where they go on the slowest pipeline rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// The whole step.
    pub step: f64,
    /// Matrix products and attention at their rates, without recomputation.
    pub compute: f64,
    /// What is computed again.
    pub recompute: f64,
    /// Operations that wait for memory rather than arithmetic.
    pub memory: f64,
    /// Exchanges with tensor and context parallel ranks.
    pub tensor: f64,
    /// Tokens on their way to experts and back.
    pub experts: f64,
    /// Waiting for other stages.
    pub bubble: f64,
    /// Exchanges with replicas that no pass hides.
    pub data: f64,
    /// The update.
    pub optimizer: f64,
    /// Share of the step in which pipeline ranks do nothing, all together.
    pub idle_share: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_second: f64,
    /// Model FLOPs utilisation, attention counted once as in Megatron.
    pub mfu: f64,
}

/// Forward, input gradient, weight gradient of a stage, and its exchanges with replicas.
struct StageTime {
    passes: [PassTime; 3],
    copies: Replication,
    /// Seconds of the update.
    update: f64,
}

impl Clock<'_> {
    fn stages(&self) -> Vec<StageTime> {
        let share = self.job.share();
        let stage = |stage| {
            let units = self.job.units(stage);
            let mut passes = [PassTime::default(); 3];
            for unit in &units {
                let times = self.unit(unit);
                passes.iter_mut().zip(times).for_each(|(sum, time)| sum.add(time));
            }
            let (mut copies, mut moved) = (Replication::default(), 0);
            for bucket in buckets(self.job, &share, stage, &units).iter().flatten() {
                copies += Replication::of(bucket, self.job);
                let shard = if bucket.zero(self.job) >= 1 { bucket.replicas } else { 1 };
                // Gradient read, weight, master and moments read and written.
                let values = 3 + 2 * self.job.moments.others + if self.job.element < 4 { 2 } else { 0 };
                moved += bucket.elements / shard * values * self.job.wide();
            }
            moved += units.iter().flat_map(|unit| &unit.ops).map(|op| self.quantised_once(op)).sum::<u64>();
            StageTime { passes, copies, update: moved as f64 / self.hardware.bandwidth }
        };
        self.job.stages.stages().iter().map(stage).collect()
    }

    fn replicas(&self, bytes: u64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        let layout = &self.job.layout;
        let (ranks, stride) = if layout.cp > 1 { (layout.dp * layout.cp, layout.tp) } else { (layout.dp, layout.tp) };
        bytes as f64 / self.hardware.between(ranks, stride) + LATENCY
    }

    /// What an exchange adds to a pass: what the pass does not hide, and by how much that is slower meanwhile.
    fn beside(&self, exchange: f64, pass: f64) -> f64 {
        let hidden = if self.hardware.overlap { exchange.min(pass) } else { 0.0 };
        exchange - hidden * BESIDE
    }

    /// What the exchanges of ZeRO 2 and 3 add to the forward and backward passes of each stage.
    fn exposed(&self, stages: &[StageTime]) -> Vec<[f64; 2]> {
        let stage = |stage: &StageTime| {
            let [forward, input, weight] = stage.passes.map(|pass| pass.total());
            let (sent, returned) = (self.replicas(stage.copies.forward), self.replicas(stage.copies.backward));
            [self.beside(sent, forward), self.beside(returned, input + weight)]
        };
        stages.iter().map(stage).collect()
    }

    fn costs(&self, stages: &[StageTime], exposed: &[[f64; 2]]) -> Costs {
        let ticks = |seconds: f64| (seconds * TICKS).round() as Ticks;
        let pass = |index: usize| -> Vec<Ticks> {
            let seconds = |(stage, exposed): (&StageTime, &[f64; 2])| {
                stage.passes[index].total() + exposed.get(index).copied().unwrap_or(0.0)
            };
            stages.iter().zip(exposed).map(|stage| ticks(seconds(stage)).max(1)).collect()
        };
        let (forward, backward_input, backward_weight) = (pass(0), pass(1), pass(2));
        Costs { forward, backward_input, backward_weight, transfer: ticks(self.boundary()) }
    }

    fn boundary(&self) -> f64 {
        let (layout, share) = (&self.job.layout, self.job.share());
        if layout.pp == 1 {
            return 0.0;
        }
        let stride = layout.tp * layout.cp * layout.dp;
        let speed = if stride * layout.pp <= self.hardware.host { self.hardware.link } else { self.hardware.network };
        (share.stream_tokens * share.hidden * self.job.element) as f64 / speed + LATENCY
    }
}

/// Seconds of a step by formula, good enough to say which layouts are worth simulating: the passes of an average rank,
/// the bubble of the papers, what is exchanged with replicas.
pub fn rough_time(job: &Job, hardware: &Hardware) -> f64 {
    let clock = Clock { job, hardware };
    let pp = job.layout.pp as f64;
    let (mut pass, mut copies) = (0.0, Replication::default());
    for (unit, buckets, times) in samples(job) {
        let times = times as f64 / pp;
        pass += times * clock.unit(&unit).iter().map(PassTime::total).sum::<f64>();
        for bucket in buckets {
            let mut of = Replication::of(&bucket, job);
            let scaled = |bytes: u64| (bytes as f64 * times) as u64;
            of = Replication {
                forward: scaled(of.forward),
                backward: scaled(of.backward),
                gradients: scaled(of.gradients),
                weights: scaled(of.weights),
            };
            copies += of;
        }
    }
    let spec = &job.schedule;
    let (micro_batches, before) = (spec.micro_batches as f64, pp - 1.0);
    let bubble = match spec.kind {
        ScheduleKind::ZbH1 => before / 3.0,
        ScheduleKind::ZbV => before / 6.0,
        _ => before / spec.virtual_pipeline as f64,
    };
    let each = clock.beside(clock.replicas(copies.forward + copies.backward), pass);
    let once = clock.beside(clock.replicas(copies.gradients + copies.weights), pass);
    (micro_batches + bubble) * (pass + each + 2.0 * clock.boundary()) + once
}

/// Resolution of the simulation.
const TICKS: f64 = 1e9;

/// Nanoseconds of the passes of each stage.
pub fn costs(job: &Job, hardware: &Hardware) -> Costs {
    let clock = Clock { job, hardware };
    let stages = clock.stages();
    clock.costs(&stages, &clock.exposed(&stages))
}

/// Simulates a step.
///
/// # Errors
/// A schedule that cannot run.
pub fn step_time(job: &Job, schedule: &Schedule, hardware: &Hardware) -> Result<StepTime, Fault> {
    let clock = Clock { job, hardware };
    let stages = clock.stages();
    let placement = schedule.placement();
    let exposed = clock.exposed(&stages);
    let costs = clock.costs(&stages, &exposed);
    let timeline = simulate(schedule, &costs, Link::Overlapped)?;
    let makespan = timeline.makespan() as f64 / TICKS;
    let busiest = (0..placement.ranks()).max_by_key(|&rank| timeline.busy(rank)).unwrap_or(0);

    let mut time = StepTime { idle_share: timeline.idle_share(), ..StepTime::default() };
    for action in &schedule.ranks[busiest] {
        let Action::Compute(work) = action else { continue };
        let at = placement.stage(busiest, work.chunk);
        let passes = match work.pass {
            Pass::Forward => 0..1,
            Pass::Backward => 1..3,
            Pass::BackwardInput => 1..2,
            Pass::BackwardWeight => 2..3,
        };
        for index in passes {
            let pass = &stages[at].passes[index];
            time.compute += pass.compute;
            time.recompute += pass.recompute;
            time.memory += pass.memory;
            time.tensor += pass.exchange;
            time.experts += pass.experts;
            time.data += if index < 2 { exposed[at][index] } else { 0.0 };
        }
    }
    time.bubble = (makespan - timeline.busy(busiest) as f64 / TICKS).max(0.0);
    // Once per step: gradients beside the last backward pass, weights beside the first forward pass.
    let once = |rank: usize| -> (f64, f64) {
        let chunks = (0..placement.chunks()).map(|chunk| &stages[placement.stage(rank, chunk)]);
        chunks.fold((0.0, 0.0), |(exchanges, update), stage| {
            let [forward, input, weight] = stage.passes.map(|pass| pass.total());
            let gradients = clock.beside(clock.replicas(stage.copies.gradients), input + weight);
            let weights = clock.beside(clock.replicas(stage.copies.weights), forward);
            (exchanges + gradients + weights, update + stage.update)
        })
    };
    let slowest = (0..placement.ranks()).map(once).max_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1)));
    let (exchanges, update) = slowest.unwrap_or_default();
    time.data += exchanges;
    time.optimizer = update;
    time.step = makespan + exchanges + update;
    let tokens = (job.global_batch() * job.seq) as f64;
    time.tokens_per_second = tokens / time.step;
    let per_rank = time.tokens_per_second / job.layout.world_size() as f64;
    time.mfu = job.decoder.flop_shape(job.seq).mfu(per_rank, hardware.peak, AttentionCount::Causal);
    Ok(time)
}
