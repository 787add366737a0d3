//! A training of any Burn module with the settings of a [`MeshStrategy`], and which of them cannot be.

use backend_dist::mesh::{Axis, ParallelLayout};
use burn::module::{Module, ModuleDisplay};
use burn::tensor::FloatDType;
use burn::train::{LearnerModel, TrainStep, TrainingStrategy};
use models::recompute::Granularity;

use super::data_parallel::DataParallel;
use super::devices::drawn;
use super::mesh::MeshStrategy;
use super::report::{Fit, Fitted, Told, Training};
use super::tensor_parallel::TensorParallel;
use super::zero::running_states;
use super::{custom, processes};

impl<M: LearnerModel + ModuleDisplay> From<MeshStrategy> for TrainingStrategy<M> {
    fn from(strategy: MeshStrategy) -> Self {
        strategy.telling(None)
    }
}

impl MeshStrategy {
    /// As a strategy whose ranks tell each other something of their outputs.
    pub(super) fn telling<M: LearnerModel + ModuleDisplay>(self, told: Option<Told<M>>) -> TrainingStrategy<M> {
        let is_logical = self.autocast.is_some() || self.fp8 || self.sync_batch_norm || self.seeded;
        let tensor = TensorParallel::new(&self.layout, &self.plan, is_logical);
        custom(OnMesh { tensor, strategy: self, told })
    }
}

struct OnMesh<M: TrainStep> {
    strategy: MeshStrategy,
    tensor: Option<TensorParallel<M>>,
    told: Option<Told<M>>,
}

impl<M: LearnerModel> OnMesh<M> {
    /// Why the training cannot start.
    fn check(&self, model: &M) -> Result<(), String> {
        for_any_module(&self.strategy.layout)?;
        self.strategy.check()?;
        self.strategy.check_without_stages()?;
        self.strategy.check_states(model)?;
        self.strategy.check_types(model)?;
        self.tensor.as_ref().map_or(Ok(()), |tensor| tensor.check(model)).map_err(|error| error.to_string())
    }
}

impl<M: LearnerModel> Fit<M> for OnMesh<M> {
    fn fit(&self, mut training: Training<M>) -> Fitted<M> {
        let seed = self.tensor.as_ref().map_or(0, |_| drawn(&self.strategy.devices, &training.learner.model()));
        if let Err(message) = self.check(&training.learner.model()) {
            return training.fail(message);
        }
        let strategy = self.strategy.clone();
        let computes = strategy.computes();
        let MeshStrategy { layout, devices, micro_batches, units, max_grad_norm, .. } = strategy;
        training.components.grad_accumulation = micro_batches.or(training.components.grad_accumulation);
        training.told = self.told;
        let inner = DataParallel {
            devices,
            tensor: self.tensor.clone(),
            seed,
            computes,
            sync_batch_norm: self.strategy.sync_batch_norm,
            overlap: self.strategy.overlap.then_some(self.strategy.bucket),
            max_grad_norm,
            keeps_gathered: self.strategy.keeps_gathered,
            ..DataParallel::new(layout.dp, layout.zero, units)
        };
        inner.fit(training)
    }
}

/// Refuses what is not for any module.
pub(crate) fn for_any_module(layout: &ParallelLayout) -> Result<(), String> {
    let dp = layout.dp.max(1);
    let zero = if dp > 1 { layout.zero.min(3) } else { 0 };
    let tp = layout.tp.max(1);
    let nearest = ParallelLayout { tp, sp: layout.sp && tp > 1, dp, zero, ..ParallelLayout::default() };
    if *layout == nearest {
        return Ok(());
    }
    Err(format!(
        "layout {layout}: any module can have tensor, sequence and data parallelism with ZeRO 0 to 3 over all data-parallel ranks, \
         and one that implements `Stages` pipelines; nearest legal: {nearest}"
    ))
}

/// Refuses what is not for a model of stages.
pub(crate) fn for_stages(layout: &ParallelLayout) -> Result<(), String> {
    let zero = if layout.dp > 1 { layout.zero.min(3) } else { 0 };
    let ParallelLayout { tp, sp, pp, vpp, dp, .. } = *layout;
    let nearest = ParallelLayout { tp, sp: sp && tp > 1, pp, vpp, dp, zero, ..ParallelLayout::default() };
    if *layout == nearest {
        return Ok(());
    }
    Err(format!(
        "layout {layout}: a model of stages can have pipeline, tensor, sequence and data parallelism with ZeRO 0 to 3 over all \
         data-parallel ranks; nearest legal: {nearest}"
    ))
}

impl MeshStrategy {
    /// Why no training can start with these settings, whatever the model.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { layout, devices, micro_batches, plan, autocast, .. } = self;
        if let Some(half) = autocast.filter(|half| !matches!(half, FloatDType::BF16 | FloatDType::F16)) {
            return Err(format!("autocast({half:?}): no half precision type; nearest legal: BF16, F16"));
        }
        if let Some(norm) = self.max_grad_norm.filter(|norm| !norm.is_finite() || *norm <= 0.0) {
            return Err(format!("max_grad_norm {norm} is not above 0; nearest legal: none, or a norm such as 1.0"));
        }
        if plan.axis() != Axis::Tp {
            return Err(format!("the plan shards along axis {}; nearest legal: tp, without .along(..)", plan.axis()));
        }
        let (ranks, given, processes) = (layout.world_size(), devices.len(), processes::count());
        let here = ranks / processes;
        if given > 0 && given != here && ranks.is_multiple_of(processes) {
            let each = if processes > 1 { format!(", {here} in each of {processes} processes") } else { String::new() };
            return Err(format!(
                "layout {layout} has {ranks} ranks{each}, and there are {given} devices; nearest legal: {here}"
            ));
        }
        if self.overlap && (layout.dp < 2 || layout.zero > 2) {
            let why = match layout.zero {
                0..=2 => "no other rank has gradients of the same parameters",
                _ => "ZeRO 3 reduces gradients during the backward pass by itself",
            };
            return Err(format!("overlap_grad_reduce with layout {layout}: {why}; nearest legal: without it"));
        }
        if self.keeps_gathered && layout.zero < 3 {
            return Err(format!(
                "reshard_after_forward(false) with layout {layout}: only ZeRO 3 gathers parameters; nearest legal: without it"
            ));
        }
        if *micro_batches == Some(0) {
            return Err("micro_batches 0: a step takes at least 1 batch; nearest legal: 1".into());
        }
        Ok(())
    }

    /// Refuses to synchronize what the model does not have.
    pub(super) fn check_states<M: Module>(&self, model: &M) -> Result<(), String> {
        if self.sync_batch_norm && running_states(model).is_empty() {
            return Err(
                "sync_batch_norm: the model has no running statistics, so no `nn::BatchNorm`; nearest legal: none"
                    .into(),
            );
        }
        Ok(())
    }

    /// Refuses what only a model of stages has.
    fn check_without_stages(&self) -> Result<(), String> {
        let end = "blocks are those of a model that implements `Stages`: end the strategy with .stages()";
        if let Some(schedule) = self.schedule {
            return Err(format!("schedule {schedule}: {end}; nearest legal without: none"));
        }
        if self.recompute.granularity != Granularity::None {
            return Err(format!("recompute: {end}; nearest legal without: Recompute::default()"));
        }
        Ok(())
    }
}
