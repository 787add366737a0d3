//! The strategy of a model of stages for burn-train.

use std::sync::Arc;

use burn::train::{TrainStep, TrainingStrategy};

use super::StagesModel;
use super::division::{Division, Wanted};
use super::pipeline::Pipeline;
use super::wire::{Sendable, Wire};
use crate::learner::custom;
use crate::learner::data_parallel::DataParallel;
use crate::learner::devices::drawn;
use crate::learner::mesh::MeshStrategy;
use crate::learner::on_mesh::for_stages;
use crate::learner::report::{Fit, Fitted, Told, Training};
use crate::learner::tensor_parallel::TensorParallel;
use crate::learner::zero::Units;

/// A layout for a model that implements [`Stages`](super::Stages), as a strategy for
/// `SupervisedTraining::with_training_strategy`: [`MeshStrategy::stages`] makes it.
///
/// ```no_run
/// use burn::module::ModuleDisplay;
/// use burn::train::{InferenceStep, LearnerModel, SupervisedTraining, TrainStep};
/// use burn_megatron::prelude::*;
///
/// fn spread<M>(training: SupervisedTraining<M>) -> Result<SupervisedTraining<M>, BoxError>
/// where
///     M: LearnerModel + ModuleDisplay + Stages,
///     M: InferenceStep<Input = <M as TrainStep>::Input, Output = <M as TrainStep>::Output>,
/// {
///     let strategy: StagesStrategy = MegatronStrategy::mesh("PP2 DP2".parse()?).micro_batches(8).stages();
///     Ok(training.with_training_strategy(strategy.into()))
/// }
/// ```
#[derive(Clone)]
pub struct StagesStrategy(MeshStrategy);

impl MeshStrategy {
    /// For a model that implements [`Stages`](super::Stages): layouts may have pipelines (PP, VPP), and
    /// [`recompute`](Self::recompute) has blocks to recompute.
    ///
    /// - Batches are read once, on the first rank of each pipeline; a step takes [`micro_batches`](Self::micro_batches)
    ///   of them at a time. The last stage's outputs are those of the metrics.
    /// - Each rank has the parameters of its stages on its device, and steps them. The values that the training began with
    ///   of the others are in host memory, once for all ranks.
    /// - Random numbers, as of dropout, follow from the epoch, the data-parallel rank, the micro-batch and the block: they
    ///   are the same in every pipeline, and with recomputation.
    /// - ZeRO is that of [`zero_on`](crate::learner::MegatronStrategy::zero_on), 0 to 3, among the ranks with the same stages. From 2
    ///   on gradients are reduced after each backward pass of a stage, and only their owners keep sums. With 3 a pass gathers
    ///   the values of its stage, and with gradient checkpointing nothing of them waits for the backward pass.
    /// - The ranks of a pipeline are next to each other (Megatron-LM's `--use-tp-pp-dp-mapping`), in one process unless
    ///   [`across_processes`](StagesStrategy::across_processes) follows, and activations go through host memory.
    pub fn stages(self) -> StagesStrategy {
        StagesStrategy(self)
    }
}

impl StagesStrategy {
    /// The ranks of a pipeline may be in several processes, as torchrun or srun starts them, if batches and outputs are
    /// [`Sendable`](super::Sendable). Batches are read in the process of each pipeline's first rank, and the last stage's
    /// outputs go there.
    pub fn across_processes(self) -> ProcessesStrategy {
        ProcessesStrategy(self.0)
    }
}

#[allow(private_bounds, reason = "the name of bounds that the documentation of `StagesStrategy` writes out")]
impl<M: StagesModel> From<StagesStrategy> for TrainingStrategy<M> {
    fn from(strategy: StagesStrategy) -> Self {
        custom(OnStages { mesh: strategy.0, wire: None, told: None })
    }
}

/// A [`StagesStrategy`] whose pipelines may have ranks in several processes: [`StagesStrategy::across_processes`] makes it.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// // Of four processes with a rank each, as torchrun starts them.
/// let strategy: ProcessesStrategy = MegatronStrategy::mesh("PP2 DP2".parse()?).stages().across_processes();
/// // For `SupervisedTraining::with_training_strategy`, into a strategy.
/// drop(strategy);
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone)]
pub struct ProcessesStrategy(MeshStrategy);

#[allow(private_bounds, reason = "as of `StagesStrategy`, with batches and outputs that are `Sendable`")]
impl<M: StagesModel> From<ProcessesStrategy> for TrainingStrategy<M>
where
    M: TrainStep<Input: Sendable, Output: Sendable>,
{
    fn from(strategy: ProcessesStrategy) -> Self {
        strategy.telling(None)
    }
}

impl ProcessesStrategy {
    /// As a strategy whose ranks tell each other something of their outputs.
    #[allow(private_bounds, reason = "as of `StagesStrategy`, with batches and outputs that are `Sendable`")]
    pub(in crate::learner) fn telling<M>(self, told: Option<Told<M>>) -> TrainingStrategy<M>
    where
        M: StagesModel + TrainStep<Input: Sendable, Output: Sendable>,
    {
        custom(OnStages { mesh: self.0, wire: Some(Wire::new()), told })
    }
}

struct OnStages<M: TrainStep> {
    mesh: MeshStrategy,
    wire: Option<Wire<M>>,
    told: Option<Told<M>>,
}

impl<M: StagesModel> OnStages<M> {
    /// How the model is divided, or why the training cannot start.
    fn divided(&self, model: &M, accumulation: Option<usize>) -> Result<Division, String> {
        let MeshStrategy { layout, plan, micro_batches, schedule, recompute, .. } = &self.mesh;
        for_stages(layout)?;
        self.mesh.check_states(model)?;
        self.mesh.check_types(model)?;
        self.mesh.check()?;
        let micro_batches = micro_batches.or(accumulation);
        let wanted = Wanted { schedule: *schedule, micro_batches, recompute: recompute.clone() };
        let division = Division::of(model, layout, &wanted).map_err(|error| error.to_string())?;
        let tensor = TensorParallel::new(layout, plan, false);
        tensor.map_or(Ok(()), |tensor| tensor.check(model)).map_err(|error| error.to_string())?;
        Ok(division)
    }
}

impl<M: StagesModel> Fit<M> for OnStages<M> {
    fn fit(&self, mut training: Training<M>) -> Fitted<M> {
        let computes = self.mesh.computes();
        let MeshStrategy { layout, plan, devices, micro_batches, units, max_grad_norm, .. } = self.mesh.clone();
        let accumulation = micro_batches.or(training.components.grad_accumulation);
        training.components.grad_accumulation = accumulation;
        training.told = self.told;
        let overlap = self.mesh.overlap.then_some(self.mesh.bucket);
        let sync_batch_norm = self.mesh.sync_batch_norm;
        let seed = drawn(&devices, &training.learner.model());
        match self.divided(&training.learner.model(), accumulation) {
            Ok(division) => {
                let tensor = TensorParallel::new(&layout, &plan, false);
                let pipeline = Pipeline::new(division, &layout, plan, units).clipping(max_grad_norm);
                let pipeline = pipeline.overlapping(overlap).in_step(sync_batch_norm).over(self.wire);
                let pipeline = Some(Arc::new(pipeline) as Arc<_>);
                let inner = DataParallel::new(layout.dp, layout.zero, Units::auto());
                let keeps_gathered = self.mesh.keeps_gathered;
                let inner = DataParallel { keeps_gathered, ..inner };
                DataParallel { devices, tensor, computes, pipeline, overlap, sync_batch_norm, seed, ..inner }
                    .fit(training)
            }
            Err(message) => training.fail(message),
        }
    }
}
