//! Training strategies for burn-train's `SupervisedTraining`.
//!
//! [`MegatronStrategy::data_parallel`] trains any Burn module on several ranks; nothing else of a program changes:
//!
//! ```no_run
//! # use burn::train::{LearnerModel, SupervisedTraining};
//! # use burn_megatron::learner::MegatronStrategy;
//! # fn strategy<M: LearnerModel>(training: SupervisedTraining<M>) -> SupervisedTraining<M> {
//! training.with_training_strategy(MegatronStrategy::data_parallel(4))
//! # }
//! ```
//!
//! [`MegatronStrategy::zero`] does the same with the states of the optimizer sharded over the ranks, and
//! [`MegatronStrategy::mesh`] with the module itself.
//!
//! [`Pretraining`] trains this crate's own models in any layout of ranks.

mod bert;
mod data_parallel;
mod devices;
mod dp_rank;
mod frozen;
mod gather_outputs;
mod ids;
mod integers;
mod items;
mod llava;
mod loading;
mod mesh;
mod model_parallel;
mod module_steps;
mod module_training;
mod on_host;
mod on_mesh;
mod one_memory;
mod plain_fields;
mod processes;
mod rank_loop;
mod report;
mod rounds;
mod same;
mod shared;
mod shares;
mod signals;
mod stages;
mod stages_steps;
mod states;
mod t5;
mod tensor_parallel;
mod trained;
mod types;
mod vit;
mod zero;

use std::sync::Arc;

use backend_dist::fully_shard::Units;
use backend_dist::mesh::ParallelLayout;
use burn::tensor::Device;
use burn::train::{LearnerModel, TrainingStrategy};

pub use bert::{BertBatch, BertTraining};
use data_parallel::DataParallel;
pub use llava::{LlavaBatch, LlavaTraining};
pub use mesh::MeshStrategy;
pub use model_parallel::{
    BatchStream, CheckpointOptions, Description, ExitOptions, Faults, GlobalBatch, GrpoRun, LogOptions, Megatron,
    Pretraining, RestartOptions, Resume, global_weights, loss_over,
};
pub(crate) use model_parallel::{Tracer, Tracing};
pub(crate) use module_steps::{ModuleSteps, ModuleTrace, Named};
pub(crate) use module_training::{
    CHECKPOINT_PARTS, ModuleCheckpoints, ModuleEnd, ModuleTraining, ReadBatch, Steps, Trainable, check_shards,
    check_stages,
};
pub use on_host::OnHost;
pub(crate) use on_mesh::{for_any_module, for_stages};
use report::Reported;
pub(crate) use signals::limit_of_files_is_an_error;
pub use stages::{Activation, Part, ProcessesStrategy, Sendable, Stages, StagesError, StagesStrategy, TrainBatch};
pub(crate) use stages_steps::StagesSteps;
pub use t5::{T5Batch, T5Hidden, T5Training};
pub use vit::{VitBatch, VitTraining};

/// Ways to spread a training over ranks, as strategies for `SupervisedTraining::with_training_strategy`.
///
/// Under torchrun, srun or mpirun ([`ProcessWorld::from_variables`](backend_dist::process::ProcessWorld::from_variables))
/// the ranks are those of all processes, which share them out evenly:
///
/// - All processes run the same program. They begin with the first one's parameters, and end with the trained ones; the
///   devices that a strategy names are those of the ranks of one process.
/// - The first process alone feeds metrics, writes checkpoints, and decides on early stopping. Training metrics are those of all
///   ranks if outputs are of burn-train's own types and the first ones have at most 262,144 scores, else those of its ranks, as the
///   log says. Its ranks read the whole validation set.
/// - A process that fails or dies ends the training in all of them, with its message.
/// - The ranks of a pipeline must be in one process, unless [`StagesStrategy::across_processes`] says otherwise.
///
/// ```no_run
/// use burn::tensor::Device;
/// use burn::train::{LearnerModel, SupervisedTraining};
/// use burn_megatron::prelude::*;
///
/// /// Any model, one rank on each device, the optimizer's states sharded over the ranks (ZeRO 1).
/// fn spread<M: LearnerModel>(training: SupervisedTraining<M>, devices: Vec<Device>) -> SupervisedTraining<M> {
///     training.with_training_strategy(MegatronStrategy::zero_on(1, devices))
/// }
/// ```
pub struct MegatronStrategy;

impl MegatronStrategy {
    /// Data parallelism for any Burn module with `ranks` ranks: on GPUs 0 to `ranks` if the learner's model is on a GPU,
    /// else threads that share the model's device. With fewer GPUs than ranks the training fails before it starts.
    ///
    /// Every rank trains on its own share of the data with the batch size of the loader, so one step of `ranks` ranks
    /// equals one step of one device with a batch `ranks` times as large. See [`data_parallel_on`] for the details.
    ///
    /// # Panics
    /// If `ranks` is 0.
    ///
    /// [`data_parallel_on`]: MegatronStrategy::data_parallel_on
    pub fn data_parallel<M: LearnerModel>(ranks: usize) -> TrainingStrategy<M> {
        Self::zero(0, ranks)
    }

    /// Data parallelism for any Burn module with one rank on each of `devices`.
    ///
    /// - The training set is split into equal contiguous shares; the last `items % ranks` items are left out, so that
    ///   every rank takes the same number of equal steps. The validation set is split whole.
    /// - Gradients are averaged over the ranks in the order in which the module visits its parameters, then every
    ///   rank takes the same optimizer step. A parameter that no rank used in a step is not touched.
    /// - Running statistics (`nn::BatchNorm`) are each rank's own, and averaged over the ranks at the end of the training
    ///   epoch, before validation and checkpoints. Every rank normalizes by the statistics of its own batch, as under
    ///   PyTorch's DistributedDataParallel without SyncBatchNorm; [`MeshStrategy::sync_batch_norm`] is with it.
    /// - Gradient accumulation sums micro-steps on each rank and averages once, before the optimizer step.
    /// - Checkpoints, metrics, early stopping and the interrupter work as on one device; all ranks take every
    ///   decision to stop together.
    /// - If a rank fails, all stop, the terminal is restored, the failure is printed to stderr and is the `error` of
    ///   the `LearningResult`, whose model is then the one that the training began with.
    ///
    /// # Panics
    /// If `devices` is empty.
    pub fn data_parallel_on<M: LearnerModel>(devices: Vec<Device>) -> TrainingStrategy<M> {
        Self::zero_on(0, devices)
    }

    /// [`data_parallel`](Self::data_parallel) with ZeRO: every rank keeps only its part of the optimizer's states.
    ///
    /// See [`zero_on`](Self::zero_on) for the stages.
    ///
    /// # Panics
    /// If `ranks` is 0 or `stage` above 3.
    pub fn zero<M: LearnerModel>(stage: u8, ranks: usize) -> TrainingStrategy<M> {
        assert!(ranks > 0, "data parallelism needs at least 1 rank, not 0");
        custom(DataParallel::new(ranks, checked(stage), Units::auto()))
    }

    /// [`data_parallel_on`](Self::data_parallel_on) with ZeRO, for any Burn module and any of Burn's optimizers.
    ///
    /// | `stage` | optimizer states | accumulated gradients | gradients are reduced | parameters |
    /// |---|---|---|---|---|
    /// | 0 | whole on every rank | whole on every rank | once per step | whole on every rank |
    /// | 1 | on their owner | whole on every rank | once per step | whole on every rank |
    /// | 2 | on their owner | on their owner | after every micro-step | whole on every rank |
    /// | 3 | on their owner | on their owner | in the backward pass | on their owner; gathered for their use |
    ///
    /// Stage 3 is [`fully_shard`](backend_dist::fully_shard): see there what it asks of a model. It trains with gradient
    /// checkpointing. Parameters with fewer than 10,000 elements stay whole on every rank.
    ///
    /// - Whole parameters are assigned to ranks, each to the rank that has the fewest elements so far; so two ranks
    ///   differ by the largest parameter at most, and a single large one is the limit of what ZeRO saves. An owner steps
    ///   its parameters with the learner's optimizer and sends the new values to all.
    /// - The weights are those of stage 0. On CPU ranks they have the same bits, except that stage 2 adds up the
    ///   micro-steps of an accumulation in another order.
    /// - Checkpoints hold the states of all ranks: a run may resume with another stage or number of ranks, or without
    ///   this strategy. burn-train takes them from one learner only, so at the end of an epoch rank 0 has all states
    ///   for a moment, on the default device. Without a checkpointer nothing is collected.
    /// - The learner keeps the values that the training began with of the parameters that it does not step: one copy of
    ///   the model in host memory for all ranks, none on an accelerator.
    /// - A model that overrides `TrainStep::optimize` sees the gradients of its rank's parameters only. From stage 1 on one that
    ///   changes frozen ones, as moving averages, is refused when it does.
    ///
    /// # Panics
    /// If `devices` is empty or `stage` above 3.
    pub fn zero_on<M: LearnerModel>(stage: u8, devices: Vec<Device>) -> TrainingStrategy<M> {
        assert!(!devices.is_empty(), "data parallelism needs at least 1 device");
        let ranks = devices.len() * processes::count();
        custom(DataParallel { devices, ..DataParallel::new(ranks, checked(stage), Units::auto()) })
    }

    /// [`zero_on`](Self::zero_on) with stage 3, and a choice of what is gathered together and what stays whole.
    ///
    /// # Panics
    /// If `devices` is empty.
    pub fn fully_shard<M: LearnerModel>(devices: Vec<Device>, units: Units) -> TrainingStrategy<M> {
        assert!(!devices.is_empty(), "data parallelism needs at least 1 device");
        let ranks = devices.len() * processes::count();
        custom(DataParallel { devices, ..DataParallel::new(ranks, 3, units) })
    }

    /// Any layout with tensor, sequence and data parallelism and ZeRO 0 to 3, for any Burn module.
    ///
    /// - The tensor-parallel ranks of a data-parallel rank hold shards of the parameters that a
    ///   [`Plan`](crate::prelude::Plan) names, and compute one model together, on the same batch. The module does not
    ///   know: its tensors have the shapes of one device.
    /// - Data-parallel ranks each have their share of the items, and ZeRO is that of [`zero_on`](Self::zero_on).
    /// - With SP, activations `[batch, sequence, features]` between tensor-parallel layers are sharded by samples, or along the
    ///   sequence if the ranks divide that alone; a batch of which they divide neither stays whole. A plan without such a
    ///   layer is refused.
    /// - Random numbers, as of dropout, begin anew in every epoch: they follow from a number that is drawn from the
    ///   generator of the model's device, from the epoch, and from the data-parallel rank. It is drawn before parameters
    ///   that have no values yet, because a run that resumes draws none.
    /// - Checkpoints, metrics, early stopping and the interrupter work as on one device, and checkpoints are those of
    ///   one device. The trained model is in host memory.
    /// - A layout or plan that does not fit ends the training before it starts, with the nearest legal one.
    pub fn mesh(layout: ParallelLayout) -> MeshStrategy {
        MeshStrategy::new(layout)
    }

    /// [`mesh`](Self::mesh) with a device for each rank, tensor-parallel ranks next to each other.
    pub fn mesh_on(layout: ParallelLayout, devices: Vec<Device>) -> MeshStrategy {
        MeshStrategy::new(layout).devices(devices)
    }
}

fn checked(stage: u8) -> u8 {
    assert!(stage <= 3, "ZeRO has the stages 0, 1, 2 and 3, not {stage}; nearest: 3");
    stage
}

/// burn-train wants an `Arc`, but neither shares nor sends it.
#[allow(clippy::arc_with_non_send_sync)]
fn custom<M: LearnerModel, S: report::Fit<M> + 'static>(strategy: S) -> TrainingStrategy<M> {
    TrainingStrategy::Custom(Arc::new(Reported::new(strategy)))
}
