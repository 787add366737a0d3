//! What commands say of a run before it starts: that it would be quicker otherwise.

use backend_dist::gpu;

use crate::config::{Precision, RunConfig};
use crate::plan::Plan;
use crate::plan::gpus::{GPUS, Gpu, Hardware};

/// Of a run on this machine's GPUs, or on the first that plans know where it has none.
pub(super) fn of(config: &RunConfig) -> Option<String> {
    config.fp8.format?;
    let job = config.job().ok()?.on_gpus();
    let here = gpu::gpus().ok().and_then(|gpus| Gpu::named(&gpus.first()?.name));
    let hardware = Hardware::of(here.unwrap_or(&GPUS[0]), job.element);
    slow_experts(&Plan::new(job, &hardware).ok()?, &hardware, config.training.dtype)
}

/// That experts had better stay out of FP8, in a run of type `dtype`.
pub(super) fn slow_experts(plan: &Plan, hardware: &Hardware, dtype: Precision) -> Option<String> {
    let without = plan.quicker_without_fp8_experts(hardware)?;
    let (fp8, dtype) = (plan.time.step, format!("{dtype:?}").to_lowercase());
    Some(format!(
        "experts are quicker in {dtype}: {without:.3} s a step planned, not {fp8:.3}, with fp8.experts = false"
    ))
}
