//! Hints before a run starts: settings that would make it faster, and what its checkpoints lack.

use backend_dist::gpu;

use crate::config::{Precision, RunConfig};
use crate::data::readable_tokenizer;
use crate::plan::Plan;
use crate::plan::gpus::{GPUS, Hardware};

/// Why the checkpoints of a run have no tokenizer although the model's folder or who wrote its tokens has one.
pub(super) fn lacks_tokenizer(config: &RunConfig) -> Option<String> {
    if config.data.tokenizer.is_some() || config.checkpoint.directory.is_none() {
        return None;
    }
    let of_folder = config.model.hf.as_ref().and_then(|folder| readable_tokenizer(folder).err());
    let why = match of_folder {
        Some(error) => format!(": {error}"),
        None if config.data.prefixes.is_empty() => return None,
        None => "; name it in data.tokenizer".to_string(),
    };
    Some(format!("checkpoints are without a tokenizer{why}"))
}

/// The hint for a run on this machine's GPUs, or on the first GPU that the planner knows if it has none.
pub(super) fn of(config: &RunConfig) -> Option<String> {
    config.fp8.format?;
    let job = config.job().ok()?.on_gpus();
    let here = gpu::gpus().ok().and_then(|gpus| Some(gpus.first()?.model()));
    let hardware = Hardware::of(&here.unwrap_or(GPUS[0]), job.element);
    slow_experts(&Plan::new(job, &hardware).ok()?, &hardware, config.training.dtype)
}

/// The hint to keep experts out of FP8, in a run of type `dtype`.
pub(super) fn slow_experts(plan: &Plan, hardware: &Hardware, dtype: Precision) -> Option<String> {
    let without = plan.faster_without_fp8_experts(hardware)?;
    let (fp8, dtype) = (plan.time.step, format!("{dtype:?}").to_lowercase());
    Some(format!(
        "experts are faster in {dtype} than in FP8: {without:.3} s instead of {fp8:.3} s per step by plan, with \
         fp8.experts = false"
    ))
}
