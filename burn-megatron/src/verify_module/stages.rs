//! Proof that a model of stages trains in a pipeline as on one device.

use std::ops::Range;
use std::sync::Arc;

use backend_dist::mesh::ParallelLayout;
use burn::module::ModuleDisplay;
use burn::tensor::Device;

use super::compare::compare;
use super::{ITEMS, ModuleError, ModuleReport, Proof, SEED, STEPS, all_double, double_precision, lcm};
use crate::learner::{ModuleSteps, Stages, StagesSteps, TrainBatch, for_stages};
use crate::schedule::PipelineConfig;
use crate::verify::{Candidate, Line};

/// [`verify_module`](super::verify_module) of a model of [`Stages`]: layouts may have pipelines too.
///
/// `batch` makes the batch of some items of a data set, by number, on a device; its loss is a mean over the items.
/// One device computes the items of a step at once, a data-parallel rank its share of them in micro-batches.
/// `layouts` may have pipeline, tensor, sequence and data parallelism and ZeRO 0 to 3.
///
/// # Errors
/// As [`verify_module`](super::verify_module). A model that does not fit a layout, such as one with fewer blocks than
/// stages, is a layout that fails.
///
/// # Panics
/// If the model does on one device.
pub fn verify_stages<M: Stages + ModuleDisplay + 'static>(
    make_model: impl FnOnce(&Device) -> M,
    batch: impl Fn(Range<usize>, &Device) -> TrainBatch<M> + Send + Sync + 'static,
    layouts: &[ParallelLayout],
) -> Result<ModuleReport, ModuleError> {
    verify_stages_as(make_model, batch, layouts, &Proof::default())
}

/// [`verify_stages`] with a plan, an optimizer, a schedule, a number of micro-batches, and recomputation.
///
/// # Panics
/// If the model does on one device.
pub fn verify_stages_as<M: Stages + ModuleDisplay + 'static>(
    make_model: impl FnOnce(&Device) -> M,
    batch: impl Fn(Range<usize>, &Device) -> TrainBatch<M> + Send + Sync + 'static,
    layouts: &[ParallelLayout],
    proof: &Proof,
) -> Result<ModuleReport, ModuleError> {
    layouts.iter().try_for_each(|layout| for_stages(layout).map_err(ModuleError::Layout))?;
    let device = double_precision(proof)?.autodiff();
    device.seed(SEED);
    let module = make_model(&device).fork(&device);
    all_double(&module)?;
    let micro_batches = |layout: &ParallelLayout| {
        let twice = if layout.pp > 1 { 2 * layout.pp } else { 1 };
        proof.micro_batches.unwrap_or(twice).max(1)
    };
    let parts = layouts.iter().map(|layout| layout.dp * micro_batches(layout)).fold(1, lcm);
    let items = ITEMS.next_multiple_of(parts);
    let batch = Arc::new(batch);
    let whole = batch.clone();
    let loss = Arc::new(move |model: &M, items: Range<usize>, device: &Device| model.run(&whole(items, device)).0);
    let one = ModuleSteps { loss, steps: STEPS, items, optimizer: proof.optimizer, overlap: false };
    let one = one.one_device(&module);
    let bound = proof.bound(&module);
    let line = |layout: &ParallelLayout| {
        let (schedule, recompute, accumulation) = (proof.schedule, proof.recompute.clone(), micro_batches(layout));
        let steps = StagesSteps {
            batch: batch.clone(),
            steps: STEPS,
            items,
            optimizer: proof.optimizer,
            micro_batches: accumulation,
            schedule,
            recompute: recompute.clone(),
            overlap: proof.overlap,
        };
        let ranks = steps.over_ranks(&module, layout, &proof.plan, &proof.devices);
        let pipeline = PipelineConfig { schedule, ..PipelineConfig::default() };
        let candidate = Candidate { layout: layout.clone(), accumulation, pipeline, recompute, ..Candidate::default() };
        Line { candidate, outcome: ranks.map(|ranks| compare(&one, &ranks, bound)), rerouted: 0.0 }
    };
    let report = ModuleReport { lines: layouts.iter().map(line).collect() };
    if report.lines.iter().all(Line::passes) { Ok(report) } else { Err(ModuleError::Different(report)) }
}
