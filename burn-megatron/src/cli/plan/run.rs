//! The plan of a run.

use anyhow::Result;
use models::ModelConfig;

use super::super::hints::slow_experts;
use super::{Args, Plan};
use crate::config::RunConfig;
use crate::plan::{self, Report, Wish, search};

/// The report, and the schedule for drawing.
pub(super) fn plan(args: &Args) -> Result<(String, Plan)> {
    let mut overrides = args.overrides.clone().with_layout(&args.layout);
    overrides.0.extend(args.stages.overrides(&args.pipeline));
    let config = RunConfig::load(args.config.as_deref(), &overrides.0)?;
    let job = config.job()?.on_gpus();
    let (hardware, name) = args.machine.hardware(job.element)?;
    let plan = plan::Plan::new(plan::Job { documents: args.machine.documents, ..job }, &hardware)?;
    let dims = config.model.config.dims();
    let legal = |layout: &backend_dist::mesh::ParallelLayout| {
        layout.check().is_ok() && dims.check(layout, config.training.seq_length).is_ok()
    };
    let gpus = args.machine.gpus.unwrap_or(plan.job.layout.world_size());
    let found = search(&Wish { job: &plan.job, gpus, hardware: &hardware, legal: &legal });
    let all_ranks = args.machine.all_ranks;
    let report = Report { plan: &plan, hardware: &hardware, name, all_ranks, gpus, found: Some(&found) };
    let family = config.model.config.family();
    let mut text = format!("model        {family}, {} parameters\n{report}", config.model.config.parameter_count());
    if let Some(hint) = slow_experts(&plan, &hardware, config.training.dtype) {
        text += &format!("hint         {hint}\n");
    }
    let stages = plan.job.stages.clone();
    Ok((text, Plan::new(plan.job.schedule, Some(stages), plan.costs)?))
}
