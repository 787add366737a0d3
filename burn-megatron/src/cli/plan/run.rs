//! Planning a run.

use anyhow::Result;
use backend_dist::mesh::ParallelLayout;
use models::ModelConfig;

use super::super::hints::slow_experts;
use super::{Args, Plan};
use crate::config::RunConfig;
use crate::engine::ContextConfig;
use crate::plan::gpus::Hardware;
use crate::plan::{self, Job, Report, SearchRequest, SearchResult, search};

/// The report, and the schedule for drawing.
pub(super) fn plan(args: &Args) -> Result<(String, Plan)> {
    let mut overrides = args.overrides.clone().with_layout(&args.layout);
    overrides.0.extend(args.stages.overrides(&args.pipeline));
    let ranks = |_: usize| args.machine.gpus.ok_or("plan needs --gpus for it".into());
    let config = RunConfig::load_on(args.config.as_deref(), &overrides.0, &ranks)?;
    let job = config.job()?.on_gpus();
    let (hardware, name) = args.machine.hardware(job.element)?;
    let plan = plan::Plan::new(plan::Job { documents: args.machine.documents, ..job }, &hardware)?;
    let gpus = args.machine.gpus.unwrap_or(plan.job.layout.world_size());
    let other = other_precision(&plan, &hardware, args.machine.has_fp8()?);
    // Both searches are independent, and each takes a moment.
    let layouts = |job: &Job| search_layouts(&config, job, gpus, &hardware);
    let (found, other) = std::thread::scope(|scope| {
        let layouts = &layouts;
        let other = other.as_ref().map(|job| scope.spawn(move || layouts(job)));
        (layouts(&plan.job), other.map(|search| search.join().expect("a search does not panic")))
    });
    let all_ranks = args.machine.all_ranks;
    let report =
        Report { plan: &plan, hardware: &hardware, name, all_ranks, gpus, found: &found, other: other.as_ref() };
    let family = config.model.config.family();
    let mut text = format!("model        {family}, {} parameters\n{report}", config.model.config.parameter_count());
    if let Some(hint) = slow_experts(&plan, &hardware, config.training.dtype) {
        text += &format!("hint         {hint}\n");
    }
    let stages = plan.job.stages.clone();
    let schedule = plan.job.lists()?;
    Ok((text, Plan::new(schedule, Some(stages), plan.costs)?))
}

/// The fastest layouts for the model, batch and precision of a job.
fn search_layouts(config: &RunConfig, job: &Job, gpus: usize, hardware: &Hardware) -> SearchResult {
    let dims = config.model.config.dims();
    let legal = |layout: &ParallelLayout| {
        let divides = layout.check().is_ok() && dims.check(layout, config.training.seq_length).is_ok();
        divides && (layout.cp == 1 || ContextConfig::default().check(layout, &dims).is_ok())
    };
    search(&SearchRequest { job, gpus, hardware, legal: &legal, zero: None, micro_batch: None })
}

/// Of a run without adapters: the run without FP8 if it has FP8, else with FP8 if the GPU has it and the run's precision allows it.
fn other_precision(plan: &plan::Plan, hardware: &Hardware, has_fp8: bool) -> Option<Job> {
    let job = &plan.job;
    if job.adapters.is_some() {
        return None;
    }
    if !job.fp8.is_empty() {
        return Some(Job { fp8: 0..0, ..job.clone() });
    }
    let in_fp8 = Job { fp8: 0..job.decoder.layers, ..job.clone() };
    let is_possible = has_fp8 && job.element == 2;
    let in_fp8 = is_possible.then(|| plan::Plan::new(in_fp8, hardware).ok()).flatten()?;
    let fp8_experts = in_fp8.faster_without_fp8_experts(hardware).is_none();
    Some(Job { fp8_experts, ..in_fp8.job })
}
