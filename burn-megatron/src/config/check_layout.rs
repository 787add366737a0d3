//! Whether a run can have its layout, or another one.

use backend_dist::mesh::ParallelLayout;
use models::ModelConfig;

use super::check::demand;
use super::problem::Problem;
use super::run::RunConfig;
use crate::engine::LossMean;

impl RunConfig {
    /// Whether the model, sequences, heads and frozen weights in few bits can be divided like this.
    ///
    /// # Errors
    /// The key, with the nearest legal value.
    pub(crate) fn divides(&self, layout: &ParallelLayout) -> Result<(), String> {
        let model = &self.model.config;
        let dims = model.dims();
        dims.check(layout, self.training.seq_length).map_err(|error| format!("model and parallel: {error}"))?;
        self.context.check(layout, &dims).map_err(|error| error.to_string())?;
        match self.lora.base.filter(|_| self.lora.rank.is_some()) {
            Some(base) => base.check(&model.hf_names(), [layout.tp, layout.expert_tp()]),
            None => Ok(()),
        }
        .map_err(|error| format!("lora.{error}"))
    }

    /// Problems of model, layout, batch and pipeline.
    pub(super) fn layout_problems(&self) -> Vec<Problem> {
        let mut problems = self.size_problems();
        if !problems.is_empty() {
            return problems;
        }
        let mut note = |result: Result<(), String>| problems.extend(result.err().map(Problem::new));
        let (training, layout) = (&self.training, &self.parallel);
        let sizes = self.model.config.check().map_err(|error| format!("model: {error}"));
        let model_is_sound = sizes.is_ok();
        note(sizes);
        let dtype = self.model.config.check_dtype(training.dtype.into());
        note(dtype.map_err(|error| format!("training.dtype: model.{error}")));
        let layout_runs = layout.check().map_err(|error| format!("parallel: {error}"));
        let both = model_is_sound && layout_runs.is_ok();
        note(layout_runs);
        if both {
            note(self.divides(layout));
            let documents = self.data.reset_attention_mask && self.data.reset_position_ids || self.has_conversations();
            let alone = !self.context.dynamic || documents;
            note(demand(alone && !(self.context.dynamic && training.loss != LossMean::PerToken), || {
                "context.dynamic assigns documents to ranks one by one: it needs data.reset-attention-mask and \
                 data.reset-position-ids = true, and training.loss = per-token"
                    .into()
            }));
            note(demand(!self.context.dynamic || self.pipeline.passes.is_none(), || {
                "pipeline.passes has one number of micro-batches, which changes from step to step with context.dynamic; \
                 nearest legal: pipeline.passes = none"
                    .into()
            }));
        }
        if both && self.fp8.format.is_some() {
            let layers = self.model.config.dims().layers;
            let (start, end) = (self.fp8.num_layers_at_start_in_bf16, self.fp8.num_layers_at_end_in_bf16);
            note(demand(!self.fp8.layers(layers).is_empty(), || {
                format!(
                    "fp8.num-layers-at-start-in-bf16 = {start} and fp8.num-layers-at-end-in-bf16 = {end} leave none of {layers} \
                     layers in FP8; their sum must be below {layers}, or fp8.format = none"
                )
            }));
        }
        let batches = self.engine().plan_at(0, layout.dp).and(self.engine().plan(layout.dp));
        let batches = batches.map_err(|error| format!("training: {error}"));
        if let (true, Ok(batches)) = (both, &batches) {
            let layers = self.model.config.dims().layers;
            let pipeline = self.pipeline.resolve(layout, layers, batches.accumulation);
            let pipeline = pipeline.map_err(|error| format!("pipeline: {error}"));
            let fits = pipeline.is_ok();
            note(pipeline.map(drop));
            if fits {
                let ramp = self.engine().check_ramp(layout, layers);
                note(ramp.map_err(|error| format!("training.rampup-batch-size and pipeline: {error}")));
            }
        }
        note(batches.map(drop));
        problems
    }
}
