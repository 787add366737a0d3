//! What is known of a run before it has weights or data.

use burn::tensor::Device;

use super::family::{Family, of_family};
use super::{adapters, moments_in_f64, sizes, wrong};
use crate::config::{ModuleConfig, Precision};
use crate::hf::names;
use crate::learner::{check_shards, check_stages, for_any_module, for_stages};
use crate::train::TrainError;

/// Whether the model can be trained in the layout of its file, with the adapters of it and its frozen parameters.
///
/// # Errors
/// Names the layout, and the nearest that is possible; or what is no layer or parameter of the model.
pub fn check_module(config: &ModuleConfig) -> Result<(), TrainError> {
    // The first tensor decides which floats a process has, and a check may make one.
    if config.training.dtype == Precision::F64 {
        moments_in_f64();
    }
    let layout = &config.parallel;
    let legal = if layout.pp > 1 { for_stages(layout) } else { for_any_module(layout) };
    legal.map_err(|what| TrainError::Module(format!("[parallel]: {what}")))?;
    if let Some(schedule) = config.pipeline.schedule.filter(|_| layout.pp == 1) {
        let what = format!("pipeline.schedule = {schedule} with pipeline-parallel 1; nearest legal: none");
        return Err(TrainError::Module(what));
    }
    of_family!(config, M => check_parameters::<M>(config))
}

/// Whether the data of a run can be read, before weights are made. Gives what there is to say of it, in lines.
///
/// # Errors
/// Names what is wrong with it, or with its keys.
pub fn check_module_data(config: &ModuleConfig) -> Result<Vec<String>, TrainError> {
    of_family!(config, M => Ok(M::data(config, &sizes::<M>(config)?.0)?.notes))
}

/// What there is to say of a head that a run does not begin with, though its folder has the rest of the model.
///
/// # Errors
/// If a `config.json` cannot be read.
pub fn new_head(config: &ModuleConfig) -> Result<Option<String>, TrainError> {
    of_family!(config, M => new_head_of::<M>(config))
}

fn new_head_of<M: Family>(config: &ModuleConfig) -> Result<Option<String>, TrainError> {
    let Some(folder) = &config.model.hf else { return Ok(None) };
    M::new_head(folder, &M::from_hf(&config.model.config).map_err(wrong)?)
}

fn check_parameters<M: Family>(config: &ModuleConfig) -> Result<(), TrainError> {
    let sizes = M::from_hf(&config.model.config).map_err(wrong)?;
    // No parameter is made: a layout is refused in seconds whatever the model's size.
    let model = M::init(&sizes, &Device::flex());
    let groups = config.param_groups.check(&names(&model));
    groups.map_err(|what| TrainError::Module(format!("param-groups.{what}")))?;
    adapters::plan(config, &model)?;
    let (layout, training) = (&config.parallel, &config.training);
    check_shards(&model, layout).map_err(|what| TrainError::Module(format!("parallel.{what}")))?;
    let micro_batches = training.global_batch / (training.micro_batch * layout.dp);
    check_stages(model, layout, config.pipeline.schedule, micro_batches)
        .map_err(|what| TrainError::Module(format!("[parallel]: {what}")))
}
