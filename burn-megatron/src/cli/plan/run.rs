//! Planning a run.

use anyhow::{Error, Result};
use backend_dist::mesh::ParallelLayout;
use models::ModelConfig;

use super::{Args, Plan};
use crate::config::RunConfig;
use crate::plan::gpus::Hardware;
use crate::plan::{self, Job, Report, SearchRequest, SearchResult, StateBytes, search};
use crate::train::fp8_possible;

/// The report, and the schedule for drawing.
pub(super) fn plan(args: &Args) -> Result<(String, Plan)> {
    let overrides = args.overrides();
    let ranks = |_: usize| args.machine.gpus.ok_or("plan needs --gpus for it".into());
    let config = RunConfig::load_on(args.config.as_deref(), &overrides, &ranks)?;
    config.check_storage()?;
    let gpu = args.machine.gpu()?;
    fp8_possible(&config.fp8, config.training.dtype, &[(gpu.name.into(), gpu.capability)]).map_err(Error::msg)?;
    let job = config.job()?.on_gpus();
    let (hardware, name) = args.machine.hardware(job.element)?;
    let plan = plan::Plan::new(plan::Job { documents: args.machine.documents, ..job }, &hardware)?;
    let gpus = args.machine.gpus.unwrap_or(plan.job.layout.world_size());
    let other = other_precision(&plan, &hardware, gpu.has_fp8());
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
    let text = format!("model        {family}, {} parameters\n{report}", config.model.config.parameter_count());
    let stages = plan.job.stages.clone();
    let schedule = plan.job.lists()?;
    Ok((text, Plan::new(schedule, Some(stages), plan.costs)?))
}

/// The fastest layouts for the model, batch and precision of a job.
fn search_layouts(config: &RunConfig, job: &Job, gpus: usize, hardware: &Hardware) -> SearchResult {
    let least = config.training.min_data_parallel.unwrap_or(1);
    let legal =
        |layout: &ParallelLayout| least <= layout.dp && layout.check().is_ok() && config.divides(layout).is_ok();
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
    // Gradients of FP8 layers are accumulated in fp32.
    let state_bytes = StateBytes { main_grads: StateBytes::F32.main_grads, ..job.state_bytes };
    let in_fp8 = Job { fp8: 0..job.decoder.layers, state_bytes, ..job.clone() };
    let is_possible = has_fp8 && job.element == 2;
    (is_possible && plan::Plan::new(in_fp8.clone(), hardware).is_ok()).then_some(in_fp8)
}

#[cfg(test)]
mod tests {
    use backend_dist::ops::fp8::Fp8Format;

    use super::*;
    use crate::optim::{MainParamsDtype, OptimizerConfig, StateDtype};
    use crate::plan::{gpus, ladder};
    use crate::schedule::PipelineConfig;

    /// A run with the keys of a planned one.
    fn written(config: &RunConfig, job: &Job) -> RunConfig {
        let mut config = config.clone();
        let is_pipeline = job.layout.pp > 1;
        config.parallel = job.layout.clone();
        config.recompute = job.recompute.clone();
        config.training.micro_batch = job.micro_batch;
        config.pipeline = PipelineConfig {
            schedule: is_pipeline.then_some(job.schedule.kind),
            layout: is_pipeline.then(|| job.stages.to_string()),
            ..PipelineConfig::default()
        };
        config.fp8.format = (!job.fp8.is_empty()).then_some(Fp8Format::Hybrid);
        let OptimizerConfig::AdamW(adamw) = &mut config.optimizer else { panic!("another optimizer") };
        let of = |bytes: u64| match bytes {
            1024 => StateDtype::F32,
            512 => StateDtype::Bf16,
            _ => StateDtype::Bits8,
        };
        (adamw.exp_avg_dtype, adamw.exp_avg_sq_dtype) = (of(job.state_bytes.exp_avg), of(job.state_bytes.exp_avg_sq));
        adamw.main_grads_dtype = of(256 * job.state_bytes.main_grads);
        adamw.main_params_dtype =
            if job.state_bytes.main_params == 4 { MainParamsDtype::F32 } else { MainParamsDtype::Bf16Remainder };
        config
    }

    /// Layouts were proposed that the ramp of the batch, the attention over ranks or the base of adapters forbids, f16 runs
    /// with remainders, and FP8 next to main gradients in bf16.
    #[test]
    fn whatever_is_proposed_can_be_trained() {
        let llama = "[data]\nprefixes = [\"a\"]\n[model]\npreset = \"llama3-8b\"\n";
        let keys = "lr.warmup 0 training.dtype bf16 training.seq-length 8192 training.global-batch 64 ";
        for (gpus, more) in [
            (64, "training.global-batch 256 training.rampup-batch-size [32,32,100000]"),
            (8, "training.max-restarts 1 training.min-data-parallel 8 parallel.data-parallel 8"),
            (
                16,
                "context.comm-type a2a+p2p context.hierarchical-sizes 4,2 training.seq-length 131072 \
                  model.max-position-embeddings 131072 training.global-batch 8",
            ),
            (8, "lora.rank 16 lora.base fp8-block model.intermediate-size 14464 training.global-batch 2"),
            (8, "training.dtype f16"),
            (8, "optimizer.main-grads-dtype bf16"),
        ] {
            let words: Vec<String> = format!("{keys}{more}").split_whitespace().map(String::from).collect();
            let overrides: Vec<(String, String)> = words.chunks(2).map(|of| (of[0].clone(), of[1].clone())).collect();
            let config = RunConfig::parse("run.toml", llama, &overrides).unwrap();
            config.check().unwrap();
            let hardware = Hardware::of(gpus::find("h200").unwrap(), 2);
            let plan = plan::Plan::new(config.job().unwrap().on_gpus(), &hardware).unwrap();
            let other = other_precision(&plan, &hardware, true);
            assert_eq!(other.is_some(), config.lora.rank.is_none());
            let found = [&plan.job].into_iter().chain(&other).map(|job| search_layouts(&config, job, gpus, &hardware));
            let found: Vec<SearchResult> = found.collect();
            assert!(found.iter().all(|found| !found.best.is_empty()), "{more}");
            let rows = found.into_iter().flat_map(|found| found.best.into_iter().chain(found.nearest));
            let small = ladder::with_small_states(&plan.job, hardware.memory).map(|(job, _)| job);
            for job in rows.map(|row| row.job).chain(small) {
                let said = written(&config, &job).check().map_err(|error| error.to_string());
                assert_eq!(said, Ok(()), "{more}: {}", plan::describe(&job));
            }
        }
    }
}
