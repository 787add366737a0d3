//! Adapters of a run of a BERT or a T5.

use burn::tensor::Device;
use models::LoraPlan;
use models::hf::HfModule;
use models::lora::with_adapters;

use crate::config::{LoraSection, ModuleConfig};
use crate::hf::read_module_adapter;
use crate::train::TrainError;
use crate::train::initial_adapter::as_configured;

/// Which layers of a model have adapters, if `[lora]` asks for some.
pub(super) fn plan<M: HfModule>(config: &ModuleConfig, model: &M) -> Result<Option<LoraPlan>, TrainError> {
    let wrong = |error| TrainError::Module(LoraSection::problem(&error));
    config.lora.config().map(|lora| lora.module_plan(model)).transpose().map_err(wrong)
}

/// The model with the adapters of the run: at its start those of `lora.adapter`, or new ones of its seed.
pub(super) fn adapted<M: HfModule>(config: &ModuleConfig, model: M, is_start: bool) -> Result<M, TrainError> {
    let Some(plan) = plan(config, &model)? else { return Ok(model) };
    let wrong = |what: String| TrainError::Module(what);
    let start = match config.lora.adapter.as_deref().filter(|_| is_start) {
        Some(folder) => {
            let read = read_module_adapter(folder, &model).map_err(|error| wrong(format!("lora.adapter: {error}")))?;
            Some(as_configured(folder, read, Some(&plan)).map_err(wrong)?)
        }
        None => None,
    };
    Device::flex().seed(config.training.seed);
    with_adapters(model, &plan, start.as_ref().map(|start| &start.tensors))
        .map_err(|error| wrong(LoraSection::problem(&error)))
}
