//! The fastest layouts of a run on a number of GPUs.

mod candidates;

use std::collections::{BTreeMap, HashMap};

use layouts::mesh::{Nearest, ParallelLayout};
use layouts::recompute::Granularity;

use super::gpus::Hardware;
use super::memory::{RankMemory, memory};
use super::time::{RoughTime, StepTime, step_time};
use super::{Job, state_bytes};
use candidates::candidates;
use host::schedule::{Schedule, ScheduleSpec};

/// What to search: other layouts for the model, global batch and optimizer of a job.
pub struct SearchRequest<'a> {
    /// The run as it was asked for.
    pub job: &'a Job,
    /// Number of GPUs.
    pub gpus: usize,
    /// Rates and memory of the GPUs.
    pub hardware: &'a Hardware,
    /// Whether the model and its sequences can be divided like this.
    pub legal: &'a dyn Fn(&ParallelLayout) -> bool,
    /// The only ZeRO stage to consider.
    pub zero: Option<u8>,
    /// The only micro-batch size to consider.
    pub micro_batch: Option<usize>,
}

/// A layout with its memory and time.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The run in this layout.
    pub job: Job,
    /// Memory of its fullest pipeline rank.
    pub memory: RankMemory,
    /// Time of a step.
    pub time: StepTime,
}

/// The outcome of a search.
#[derive(Clone, Debug, Default)]
pub struct SearchResult {
    /// The fastest that fit, the best of each combination of TP, PP and CP sizes, fastest first.
    pub best: Vec<Candidate>,
    /// The one that fits and differs least from the layout that was asked for.
    pub nearest: Option<Candidate>,
    /// Number of legal layouts.
    pub legal: usize,
    /// Where there are none, the nearest numbers of GPUs with some.
    pub legal_gpus: Vec<usize>,
}

/// Number of layouts that are simulated, the most promising ones.
const SIMULATED: usize = 96;
/// Passes of layers and stages in all of them. About a million take a second.
const SIMULATED_PASSES: usize = 1 << 20;
/// Most passes of a step: stages times micro-batches.
pub const PASSES: usize = 1 << 18;
/// How many GPUs more or less are tried where no layout is legal, besides powers of two: hundreds of thousands take minutes.
const NEAR: usize = 256;
/// Number of layouts that are shown.
const SHOWN: usize = 5;

/// Searches for the fastest layouts that fit, and for the nearest one.
pub fn search(request: &SearchRequest) -> SearchResult {
    let job = Job { gpu_model: request.hardware.model, ..request.job.clone() };
    let of = |gpus: usize, enough: usize| candidates(&SearchRequest { job: &job, gpus, ..*request }, enough);
    let candidates = of(request.gpus, usize::MAX);
    if candidates.is_empty() {
        let is_tried = |gpus: usize| gpus.abs_diff(request.gpus) <= NEAR || gpus.is_power_of_two();
        let is_legal = |gpus: usize| is_tried(gpus) && !of(gpus, 1).is_empty();
        let most = request.gpus.saturating_add(NEAR).max(request.gpus.next_power_of_two());
        let legal_gpus = Nearest::where_legal(request.gpus, most, is_legal).0;
        return SearchResult { legal_gpus, ..SearchResult::default() };
    }
    let most = request.hardware.memory;
    let mut costs = Costs::new(request.hardware);
    let mut rough: Vec<(f64, bool, &Job)> = candidates.iter().map(|job| costs.rough(job)).collect();
    rough.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut best, mut simulated, mut passes) = (Vec::new(), 0, 0);
    for (_, _, job) in rough.iter().filter(|(_, may_fit, _)| *may_fit) {
        if simulated == SIMULATED || passes > SIMULATED_PASSES {
            break;
        }
        passes += passes_of(job);
        let Some(memory) = costs.memory_if_fits(job, most) else { continue };
        simulated += 1;
        if let Ok(time) = step_time(job, costs.schedule(&job.schedule), request.hardware) {
            best.push(Candidate { job: (*job).clone(), memory, time });
        }
    }
    best.sort_by(|a, b| a.time.step.total_cmp(&b.time.step));
    let mut shown = Vec::new();
    best.retain(|candidate| {
        let layout = &candidate.job.layout;
        let sizes = (layout.tp, layout.pp, layout.cp);
        let is_new = !shown.contains(&sizes);
        shown.push(sizes);
        is_new
    });
    best.truncate(SHOWN);

    let may_fit = rough.iter().filter(|(_, may_fit, _)| *may_fit);
    let mut by_distance: Vec<(u64, &Job)> = may_fit.map(|(_, _, job)| (distance(job, request.job), *job)).collect();
    by_distance.sort_by_key(|(distance, _)| *distance);
    let nearest = by_distance.into_iter().find_map(|(_, job)| {
        let memory = costs.memory_if_fits(job, most)?;
        let time = step_time(job, costs.schedule(&job.schedule), request.hardware).ok()?;
        Some(Candidate { job: job.clone(), memory, time })
    });
    SearchResult { best, nearest, legal: candidates.len(), legal_gpus: Vec::new() }
}

fn passes_of(job: &Job) -> usize {
    let stages = job.schedule.placement().stages();
    stages.saturating_mul(job.schedule.micro_batches).saturating_add(job.decoder.layers)
}

/// What a layout's rough cost depends on: all but schedule and stages. The ranks of each axis, ZeRO and sequence
/// parallelism, the micro-batch, and the recomputation.
type CostKey = ([usize; 8], bool, (u8, bool));

/// Costs that several candidates share.
struct Costs<'a> {
    hardware: &'a Hardware,
    schedules: BTreeMap<(&'static str, usize, usize, usize), Schedule>,
    /// With the bytes of weights, gradients and optimizer on a rank.
    rough: HashMap<CostKey, (RoughTime, u64)>,
}

impl<'a> Costs<'a> {
    fn new(hardware: &'a Hardware) -> Self {
        Self { hardware, schedules: BTreeMap::new(), rough: HashMap::new() }
    }

    /// Rough seconds of a step, and whether weights, gradients and optimizer alone fit.
    fn rough<'b>(&mut self, job: &'b Job) -> (f64, bool, &'b Job) {
        let ParallelLayout { tp, cp, ep, pp, dp, zero, sp, .. } = job.layout;
        let etp = job.layout.expert_tp();
        let recompute = (job.recompute.granularity as u8, job.recompute.keep_attention);
        let key = ([tp, cp, ep, etp, pp, dp, zero.into(), job.micro_batch], sp, recompute);
        let new = || (RoughTime::new(job, self.hardware), state_bytes(job));
        let (time, states) = self.rough.entry(key).or_insert_with(new);
        (time.of(&job.schedule), *states <= self.hardware.memory, job)
    }

    fn schedule(&mut self, spec: &ScheduleSpec) -> &Schedule {
        let key = (spec.kind.name(), spec.pipeline_parallel, spec.virtual_pipeline, spec.micro_batches);
        self.schedules.entry(key).or_insert_with(|| Schedule::new(*spec).expect("only legal schedules are candidates"))
    }

    /// Memory of the fullest rank, if it fits.
    fn memory_if_fits(&mut self, job: &Job, most: u64) -> Option<RankMemory> {
        let fullest = memory(job, self.schedule(&job.schedule)).into_iter().max_by_key(RankMemory::peak)?;
        (fullest.peak() <= most).then_some(fullest)
    }
}

/// How much a layout differs from the one that was asked for: doubled and halved sizes, then settings that cost time.
fn distance(job: &Job, asked: &Job) -> u64 {
    let doublings = |a: usize, b: usize| (a as f64 / b as f64).log2().abs();
    let (layout, wanted) = (&job.layout, &asked.layout);
    let flag = |differs: bool, weight: f64| if differs { weight } else { 0.0 };
    let experts = |layout: &ParallelLayout| (layout.ep, layout.expert_tp());
    let ((ep, etp), (wanted_ep, wanted_etp)) = (experts(layout), experts(wanted));
    let sizes = doublings(layout.tp, wanted.tp) + doublings(layout.pp, wanted.pp);
    let sizes = sizes + doublings(layout.dp, wanted.dp) + doublings(layout.cp, wanted.cp);
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
