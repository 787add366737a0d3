//! Which layouts to repeat a run in. Pure.

use super::recipe;
use super::{Oracle, RecipeError};
use crate::schedule::PipelineConfig;
use backend_dist::mesh::ParallelLayout;
use models::ModelConfig;

/// Every mix of tensor, sequence, expert, pipeline and data parallelism and ZeRO on exactly `ranks` ranks that the
/// recorded model and its batch allow. Fails if the recorded run has something that does not run yet.
pub fn layouts(oracle: &Oracle, ranks: usize) -> Result<Vec<ParallelLayout>, RecipeError> {
    let (dims, engine) = (recipe::model(&oracle.model)?.dims(), recipe::engine(&oracle.training)?);
    let fits = |layout: &ParallelLayout| {
        let Ok(plan) = engine.plan(layout.dp) else { return false };
        dims.check(layout, oracle.model.seq_length).is_ok()
            && PipelineConfig::default().resolve(layout, dims.layers, plan.accumulation).is_ok()
    };
    let divisors = |count: usize| (1..=count).filter(move |part| count.is_multiple_of(*part));
    let mut list = Vec::new();
    for tp in divisors(ranks) {
        for pp in divisors(ranks / tp) {
            let dp = ranks / tp / pp;
            for (sp, vpp) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
                if (sp && tp == 1) || (vpp > 1 && pp == 1) {
                    continue;
                }
                let stages = if dp > 1 { 0..=3 } else { 0..=0 };
                let sizes = divisors(if dims.experts.is_some() { tp * dp } else { 1 });
                for ep in sizes.filter(|ep| (tp * dp).is_multiple_of(tp * ep)) {
                    let layout = |zero| ParallelLayout { tp, sp, ep, pp, vpp, dp, zero, ..Default::default() };
                    list.extend(stages.clone().map(layout));
                }
            }
        }
    }
    list.retain(fits);
    Ok(list)
}
