//! Step time: a roofline per operation, a simulation of the pipeline, bytes over bandwidth for communication.

mod draws;
mod unit;

use super::gpus::Hardware;
use super::muon::newton_schulz;
use super::state::{BLOCK, States, buckets};
use super::traffic::Replication;
use super::{Job, samples};
pub use draws::{DrawTime, draw_time};
use host::flops::{AttentionCount, FlopShape};
use host::schedule::stages::Stage;
use host::schedule::{Action, Costs, Fault, Link, Pass, Schedule, ScheduleKind, ScheduleSpec, Ticks, simulate};
use layouts::mesh::GridKind;
use unit::{CostModel, PassTime};

/// Seconds of a step, and their parts on the slowest pipeline rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// The whole step.
    pub step: f64,
    /// GEMMs and attention at their rates, without recomputation.
    pub compute: f64,
    /// Recomputation.
    pub recompute: f64,
    /// Time of operations beyond their arithmetic, because memory bandwidth limits them.
    pub memory: f64,
    /// Exposed communication of tensor and context parallelism.
    pub tensor: f64,
    /// Exposed communication of expert parallelism.
    pub experts: f64,
    /// Pipeline bubble.
    pub bubble: f64,
    /// Exposed communication of data parallelism.
    pub data: f64,
    /// Optimizer step.
    pub optimizer: f64,
    /// Share of the step in which pipeline ranks are idle, over all ranks.
    pub idle_share: f64,
    /// Tokens of all ranks per second.
    pub tokens_per_second: f64,
    /// Model FLOPs utilisation, attention counted once as in Megatron.
    pub mfu: f64,
}

/// Forward, input-gradient and weight-gradient pass of a stage, and its data-parallel communication.
struct StageTime {
    passes: [PassTime; 3],
    copies: Replication,
    /// Seconds of the update.
    update: f64,
}

impl CostModel<'_> {
    fn stages(&self) -> Vec<StageTime> {
        let (local, teaching) = (self.job.local(), self.teaching());
        let stage = |stage: &Stage| {
            let units = self.job.units(stage);
            let mut passes = [teaching, PassTime::default(), PassTime::default()];
            for unit in &units {
                let times = self.unit(unit);
                passes.iter_mut().zip(times).for_each(|(sum, time)| sum.add(time));
            }
            let (mut copies, mut moved, mut hosted) = (Replication::default(), 0, 0);
            for bucket in buckets(self.job, &local, stage, &units).iter().flatten() {
                copies += Replication::of(bucket, self.job);
                hosted += States::of(bucket, self.job).host;
                // The gradient is read; weights, master weights and moments are read and written.
                let states = self.job.state_bytes.moments(self.job.moments.others, self.job.wide()) / BLOCK;
                let narrow = self.job.element < 4;
                let master = if narrow { 2 * self.job.state_bytes.main_params } else { 0 };
                let weights = if narrow { 2 * self.job.element } else { 2 * self.job.wide() };
                moved += bucket.elements / bucket.shards * (self.job.main_grad() + 2 * states + master + weights);
            }
            moved += units.iter().flat_map(|unit| &unit.ops).map(|op| self.quantised_once(op)).sum::<u64>();
            let orthogonalise = |layers| newton_schulz(self.job, layers, self.hardware);
            let (layers, mtp) = (self.job.decoder.layers, if stage.loss { self.job.decoder.mtp } else { 0 });
            let orthogonalised = orthogonalise(stage.layers.clone()) + orthogonalise(layers..layers + mtp);
            // Loads, updates and stores of states in host memory overlap.
            let update =
                (moved as f64 / self.hardware.bandwidth).max(hosted as f64 / self.hardware.model.steps.host_link);
            StageTime { passes, copies, update: update + orthogonalised }
        };
        self.job.stages.stages().iter().map(stage).collect()
    }

    /// A stage's share of the teacher's forward pass.
    fn teaching(&self) -> PassTime {
        let Some(teacher) = self.job.teacher() else { return PassTime::default() };
        let (cost, placement) = (CostModel { job: &teacher, ..*self }, self.job.schedule.placement());
        let mut all = PassTime::default();
        for unit in (0..placement.ranks()).flat_map(|rank| teacher.teacher_units(rank, placement)) {
            all.add(cost.unit(&unit)[0]);
        }
        all.divided(placement.stages() as f64)
    }

    /// Seconds of a collective of the ranks that shard the weights; of all data-parallel ranks where nothing is sharded.
    fn dp_ranks(&self, bytes: u64) -> f64 {
        let shards = self.job.layout.zero_shards(GridKind::Dense);
        self.between_dp_ranks(bytes, if shards == 1 { self.job.dp_ranks() as usize } else { shards }, 1)
    }

    /// Seconds of a collective of the ranks that hold the same shard, one of each group.
    fn between_groups(&self, bytes: u64) -> f64 {
        let shards = self.job.layout.zero_shards(GridKind::Dense);
        self.between_dp_ranks(bytes, self.job.dp_ranks() as usize / shards, shards)
    }

    /// Seconds for bytes that `ranks` data-parallel ranks send, every `step`-th of them.
    fn between_dp_ranks(&self, bytes: u64, ranks: usize, step: usize) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        bytes as f64 / self.hardware.between(ranks, self.job.layout.tp * step) + self.hardware.model.steps.latency
    }

    /// Seconds that communication adds to a pass: its exposed part, and the slow-down of the pass while they
    /// overlap.
    fn exposed_part(&self, communication: f64, pass: f64) -> f64 {
        let hidden = if self.hardware.overlap { communication.min(pass) } else { 0.0 };
        communication - hidden * self.hardware.model.steps.overlapped_gemm
    }

    /// Seconds that the communication of ZeRO 2 and 3 adds to the forward and backward passes of each stage.
    fn exposed(&self, stages: &[StageTime]) -> Vec<[f64; 2]> {
        let stage = |stage: &StageTime| {
            let [forward, input, weight] = stage.passes.map(|pass| pass.total());
            let (sent, returned) = (self.dp_ranks(stage.copies.forward), self.dp_ranks(stage.copies.backward));
            [self.exposed_part(sent, forward), self.exposed_part(returned, input + weight)]
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
        let (layout, local) = (&self.job.layout, self.job.local());
        if layout.pp == 1 {
            return 0.0;
        }
        let stride = layout.tp * layout.cp * layout.dp;
        let speed = if stride * layout.pp <= self.hardware.host { self.hardware.link } else { self.hardware.network };
        (local.stream_tokens * local.hidden * self.job.element) as f64 / speed + self.hardware.model.steps.latency
    }
}

/// A step by formula, good enough to say which layouts are worth simulating: the passes of an average rank, the bubble
/// of the papers, and the communication with data-parallel ranks. Schedule and stages do not matter but for the bubble.
#[derive(Clone, Copy, Debug)]
pub struct RoughTime {
    /// Forward and backward pass of a micro-batch on a rank, with its communication.
    pass: f64,
    /// Communication and update once per step.
    once: f64,
    pipeline_parallel: f64,
}

impl RoughTime {
    /// Of a job's layout, micro-batch and recomputation.
    pub fn new(job: &Job, hardware: &Hardware) -> Self {
        let cost = CostModel { job, hardware };
        let pp = job.layout.pp as f64;
        let (mut pass, mut copies) = (0.0, Replication::default());
        for (unit, buckets, times) in samples(job) {
            let times = times as f64 / pp;
            pass += times * cost.unit(&unit).iter().map(PassTime::total).sum::<f64>();
            for bucket in buckets {
                let of = Replication::of(&bucket, job);
                let scaled = |bytes: u64| (bytes as f64 * times) as u64;
                copies += Replication {
                    forward: scaled(of.forward),
                    backward: scaled(of.backward),
                    gradients: scaled(of.gradients),
                    weights: scaled(of.weights),
                    between_groups: scaled(of.between_groups),
                };
            }
        }
        let each = cost.exposed_part(cost.dp_ranks(copies.forward + copies.backward), pass);
        let once = cost.dp_ranks(copies.gradients + copies.weights) + cost.between_groups(copies.between_groups);
        let once = cost.exposed_part(once, pass);
        let orthogonalised = newton_schulz(job, 0..job.decoder.layers + job.decoder.mtp, hardware) / pp;
        Self { pass: pass + each + 2.0 * cost.boundary(), once: once + orthogonalised, pipeline_parallel: pp }
    }

    /// Seconds of a step in a schedule.
    pub fn of(&self, spec: &ScheduleSpec) -> f64 {
        let before = self.pipeline_parallel - 1.0;
        let bubble = match spec.kind {
            ScheduleKind::ZbH1 => before / 3.0,
            ScheduleKind::ZbV => before / 6.0,
            _ => before / spec.virtual_pipeline as f64,
        };
        (spec.micro_batches as f64 + bubble) * self.pass + self.once
    }
}

/// Resolution of the simulation.
const TICKS: f64 = 1e9;

/// Nanoseconds of the passes of each stage.
pub fn costs(job: &Job, hardware: &Hardware) -> Costs {
    let cost = CostModel { job, hardware };
    let stages = cost.stages();
    cost.costs(&stages, &cost.exposed(&stages))
}

/// Simulates a step.
///
/// # Errors
/// A schedule that cannot run.
pub fn step_time(job: &Job, schedule: &Schedule, hardware: &Hardware) -> Result<StepTime, Fault> {
    let cost = CostModel { job, hardware };
    let stages = cost.stages();
    let placement = schedule.placement();
    let exposed = cost.exposed(&stages);
    let costs = cost.costs(&stages, &exposed);
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
            time.tensor += pass.communication;
            time.experts += pass.experts;
            time.data += if index < 2 { exposed[at][index] } else { 0.0 };
        }
    }
    time.bubble = (makespan - timeline.busy(busiest) as f64 / TICKS).max(0.0);
    // Once per step: gradients overlap with the last backward pass, weights with the first forward pass.
    let once = |rank: usize| -> (f64, f64) {
        let chunks = (0..placement.chunks()).map(|chunk| &stages[placement.stage(rank, chunk)]);
        chunks.fold((0.0, 0.0), |(communications, update), stage| {
            let [forward, input, weight] = stage.passes.map(|pass| pass.total());
            let gradients = cost.dp_ranks(stage.copies.gradients) + cost.between_groups(stage.copies.between_groups);
            let gradients = cost.exposed_part(gradients, input + weight);
            let weights = cost.exposed_part(cost.dp_ranks(stage.copies.weights), forward);
            (communications + gradients + weights, update + stage.update)
        })
    };
    let slowest = (0..placement.ranks()).map(once).max_by(|a, b| (a.0 + a.1).total_cmp(&(b.0 + b.1)));
    let (communications, update) = slowest.unwrap_or_default();
    time.data += communications;
    time.optimizer = update;
    time.step = makespan + communications + update;
    let tokens = (job.global_batch() * job.seq) as f64;
    time.tokens_per_second = tokens / time.step;
    let per_rank = time.tokens_per_second / job.layout.world_size() as f64;
    let shape = FlopShape { frozen: job.adapters.is_some(), ..job.decoder.flop_shape(job.seq) };
    time.mfu = shape.mfu(per_rank, hardware.peak, AttentionCount::Causal);
    Ok(time)
}
