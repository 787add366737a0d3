//! The layouts that suit a run best on a number of GPUs.

use std::collections::BTreeMap;

use backend_dist::mesh::ParallelLayout;
use models::recompute::{Granularity, Module, Recompute};

use super::gpus::Hardware;
use super::memory::{RankMemory, memory};
use super::time::{StepTime, rough_time, step_time};
use super::{Decoder, Job, state_bytes};
use crate::schedule::stages::{PartCosts, Split, StageLayout};
use crate::schedule::{Placement, Schedule, ScheduleKind, ScheduleSpec};

/// What is looked for: the job's model, batch and optimizer in another layout.
pub struct Wish<'a> {
    /// The run as it was asked for.
    pub job: &'a Job,
    /// GPUs.
    pub gpus: usize,
    /// What they can do.
    pub hardware: &'a Hardware,
    /// Whether the model and its sequences can be laid out like this.
    pub legal: &'a dyn Fn(&ParallelLayout) -> bool,
}

/// A layout with what it needs.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The run in this layout.
    pub job: Job,
    /// Memory of its fullest pipeline rank.
    pub memory: RankMemory,
    /// Its step.
    pub time: StepTime,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The fastest that fit, the best of each tensor and pipeline parallel size, fastest first.
    pub best: Vec<Candidate>,
    /// The one that fits and differs least from what was asked for.
    pub nearest: Option<Candidate>,
    /// Layouts that are legal.
    pub legal: usize,
}

/// Layouts that are simulated, the most promising ones.
const SIMULATED: usize = 96;
/// Passes of layers and stages in all of them, of which about a million are looked at in a second.
const PASSES: usize = 1 << 20;
/// Layouts that are shown.
const SHOWN: usize = 5;

/// Looks for the fastest layouts that fit, and for the nearest.
pub fn search(wish: &Wish) -> Found {
    let candidates = candidates(wish);
    let mut schedules = Schedules::default();
    let mut found = Found { legal: candidates.len(), ..Found::default() };
    let mut rough: Vec<(f64, &Job)> = candidates.iter().map(|job| (rough_time(job, wish.hardware), job)).collect();
    rough.sort_by(|a, b| a.0.total_cmp(&b.0));
    let fits = |memory: &RankMemory| memory.peak() <= wish.hardware.memory;
    let (mut simulated, mut passes) = (0, 0);
    for (_, job) in rough {
        if simulated == SIMULATED || passes > PASSES {
            break;
        }
        passes += passes_of(job);
        let Some(memory) = schedules.memory_if_fits(job, wish.hardware.memory) else { continue };
        simulated += 1;
        let schedule = schedules.of(&job.schedule);
        if let Ok(time) = step_time(job, schedule, wish.hardware) {
            found.best.push(Candidate { job: job.clone(), memory, time });
        }
    }
    found.best.sort_by(|a, b| a.time.step.total_cmp(&b.time.step));
    let mut seen = Vec::new();
    found.best.retain(|candidate| {
        let sizes = (candidate.job.layout.tp, candidate.job.layout.pp);
        let new = !seen.contains(&sizes);
        seen.push(sizes);
        new
    });
    found.best.truncate(SHOWN);

    let mut by_distance: Vec<(u64, &Job)> = candidates.iter().map(|job| (distance(job, wish.job), job)).collect();
    by_distance.sort_by_key(|(distance, _)| *distance);
    found.nearest = by_distance.into_iter().find_map(|(_, job)| {
        let memory = schedules.memory_if_fits(job, wish.hardware.memory).filter(fits)?;
        let time = step_time(job, schedules.of(&job.schedule), wish.hardware).ok()?;
        Some(Candidate { job: job.clone(), memory, time })
    });
    found
}

fn passes_of(job: &Job) -> usize {
    let stages = job.schedule.placement().stages();
    stages.saturating_mul(job.schedule.micro_batches).saturating_add(job.decoder.layers)
}

/// Schedules that were made already.
#[derive(Default)]
struct Schedules(BTreeMap<(&'static str, usize, usize, usize), Schedule>);

impl Schedules {
    fn of(&mut self, spec: &ScheduleSpec) -> &Schedule {
        let key = (spec.kind.name(), spec.pipeline_parallel, spec.virtual_pipeline, spec.micro_batches);
        self.0.entry(key).or_insert_with(|| Schedule::new(*spec).expect("only legal schedules are candidates"))
    }

    /// Memory of the fullest rank, if it fits. States alone decide most cases.
    fn memory_if_fits(&mut self, job: &Job, most: u64) -> Option<RankMemory> {
        if state_bytes(job) > most {
            return None;
        }
        let fullest = memory(job, self.of(&job.schedule)).into_iter().max_by_key(RankMemory::peak)?;
        (fullest.peak() <= most).then_some(fullest)
    }
}

/// Every legal layout of the wish.
fn candidates(wish: &Wish) -> Vec<Job> {
    let (job, decoder) = (wish.job, &wish.job.decoder);
    let rows = job.global_batch();
    let mut divisions = Divisions::new(job);
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut found = Vec::new();
    for tp in divisors(wish.gpus).filter(|tp| *tp <= wish.hardware.host) {
        for pp in divisors(wish.gpus / tp).filter(|pp| *pp <= decoder.layers) {
            let dp = wish.gpus / tp / pp;
            if !rows.is_multiple_of(dp) {
                continue;
            }
            for sp in [false, true].into_iter().filter(|sp| !sp || tp > 1) {
                for vpp in [1, 2, 4, 8].into_iter().filter(|vpp| *vpp == 1 || pp > 1 && pp * vpp <= decoder.layers) {
                    for (ep, etp) in expert_sizes(decoder, tp, dp) {
                        let layout = ParallelLayout { tp, pp, dp, sp, vpp, ep, etp, ..ParallelLayout::default() };
                        if (wish.legal)(&layout) {
                            variants(wish, layout, rows / dp, &mut divisions, &mut found);
                        }
                    }
                }
            }
        }
    }
    found
}

/// Ways to divide experts over the ranks of a stage: whole ones, or cut as the rest of the layer is.
fn expert_sizes(decoder: &Decoder, tp: usize, dp: usize) -> Vec<(usize, Option<usize>)> {
    let Some(experts) = &decoder.experts else { return vec![(1, None)] };
    let sizes = |etp: usize| {
        let ranks = tp * dp / etp;
        (1..=ranks.min(experts.count)).filter(move |ep| ranks.is_multiple_of(*ep) && experts.count.is_multiple_of(*ep))
    };
    let cut = sizes(tp).map(|ep| (ep, None));
    let whole = sizes(1).filter(|_| tp > 1).map(|ep| (ep, Some(1)));
    cut.chain(whole).collect()
}

/// A layout with every micro-batch, schedule, ZeRO stage and recomputation.
fn variants(wish: &Wish, layout: ParallelLayout, rows: usize, divisions: &mut Divisions, found: &mut Vec<Job>) {
    let selective = Recompute::selective(&[Module::CoreAttention, Module::MlpActivation, Module::Norms]);
    let full = Recompute { granularity: Granularity::Full, ..Recompute::default() };
    let attention_kept = Recompute { keep_attention: true, ..full.clone() };
    let recomputes = [Recompute::default(), selective, attention_kept, full];
    for micro_batch in [1, 2, 4, 8, 16].into_iter().filter(|size| rows.is_multiple_of(*size)) {
        for spec in schedules(&layout, rows / micro_batch) {
            if spec.placement().stages().saturating_mul(spec.micro_batches) > PASSES {
                continue;
            }
            for stages in divisions.of(spec.placement()) {
                for zero in 0..=if layout.dp > 1 { 3 } else { 0 } {
                    for recompute in &recomputes {
                        found.push(Job {
                            layout: ParallelLayout { zero, ..layout },
                            schedule: spec,
                            stages: stages.clone(),
                            micro_batch,
                            recompute: recompute.clone(),
                            decoder: wish.job.decoder.clone(),
                            fp8: wish.job.fp8.clone(),
                            dynamic: None,
                            ..*wish.job
                        });
                    }
                }
            }
        }
    }
}

fn schedules(layout: &ParallelLayout, micro_batches: usize) -> Vec<ScheduleSpec> {
    use ScheduleKind::{Interleaved, NoPipeline, OneFOneB, ZbH1, ZbV};
    let kinds: &[ScheduleKind] = match (layout.pp, layout.vpp) {
        (1, _) => &[NoPipeline],
        (_, 1) => &[OneFOneB, ZbH1],
        (_, 2) => &[Interleaved, ZbV],
        _ => &[Interleaved],
    };
    let spec = |kind: &ScheduleKind| {
        let spec = ScheduleSpec::new(*kind, layout.pp, micro_batches);
        ScheduleSpec { virtual_pipeline: layout.vpp, ..spec }
    };
    kinds.iter().map(spec).filter(|spec| spec.check().is_ok()).collect()
}

/// Ways to divide the layers over ranks: equal stages where the layers allow, and those that cost the same.
struct Divisions {
    costs: PartCosts,
    made: Vec<(Placement, Vec<StageLayout>)>,
}

impl Divisions {
    fn new(job: &Job) -> Self {
        Self { costs: job.decoder.part_costs(job.seq), made: Vec::new() }
    }

    fn of(&mut self, placement: Placement) -> &[StageLayout] {
        let index = self.made.iter().position(|(made, _)| *made == placement).unwrap_or_else(|| {
            let equal = Split::equal(self.costs.layers.len(), placement).layout();
            let by_cost = (placement.ranks() > 1).then(|| StageLayout::by_cost(&self.costs, placement));
            let mut found: Vec<_> = equal.into_iter().chain(by_cost.flatten()).collect();
            found.dedup();
            self.made.push((placement, found));
            self.made.len() - 1
        });
        &self.made[index].1
    }
}

/// How much a layout differs from the one asked for: doubled and halved sizes, then what costs time.
fn distance(job: &Job, asked: &Job) -> u64 {
    let doublings = |a: usize, b: usize| (a as f64 / b as f64).log2().abs();
    let (layout, wanted) = (&job.layout, &asked.layout);
    let flag = |differs: bool, weight: f64| if differs { weight } else { 0.0 };
    let experts = |layout: &ParallelLayout| (layout.ep, layout.expert_tp());
    let ((ep, etp), (wanted_ep, wanted_etp)) = (experts(layout), experts(wanted));
    let sizes = doublings(layout.tp, wanted.tp) + doublings(layout.pp, wanted.pp) + doublings(layout.dp, wanted.dp);
    let sizes = sizes
        + 0.5 * doublings(ep, wanted_ep)
        + if job.decoder.experts.is_some() { 0.5 * doublings(etp, wanted_etp) } else { 0.0 };
    let rest = 0.5 * doublings(job.micro_batch, asked.micro_batch)
        + 0.5 * doublings(layout.vpp, wanted.vpp)
        + 0.4 * f64::from(layout.zero.abs_diff(wanted.zero))
        + flag(job.recompute != asked.recompute, 0.7)
        + flag(job.recompute.granularity == Granularity::Full && job.recompute != asked.recompute, 0.5)
        + flag(layout.sp != wanted.sp, 0.3)
        + flag(job.schedule.kind != asked.schedule.kind, 0.2);
    ((sizes + rest) * 1000.0) as u64
}
