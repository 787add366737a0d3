//! A plain Burn module under burn-train, as a file describes its training: steps, evaluations, checkpoints and a log.

mod every_epochs;
mod families;
mod loader;
mod log;
mod optimizer;
mod share;
mod told;

use std::path::{Path, PathBuf};

use backend_dist::comm::Group;
use backend_dist::mesh::{Nearest, ParallelLayout};
use burn::module::{Module, ModuleDisplay};
use burn::tensor::{Device, FloatDType};
use burn::train::checkpoint::FileCheckpointer;
use burn::train::logger::FileMetricLogger;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Interrupter, Learner, LearnerModel, SupervisedTraining, TrainStep,
    TrainingStrategy,
};
use models::Recompute;
use models::hf::HfModule;

use super::mesh::MeshStrategy;
use super::processes;
use super::stages::{Division, Sendable, Stages, Wanted};
use super::tensor_parallel::TensorParallel;
use crate::console::{LogRenderer, renderer};
use crate::lr::LrSchedule;
use crate::metrics::RunLog;
use crate::optim::AdamWConfig;
use crate::schedule::ScheduleKind;
use every_epochs::EveryEpochs;
use loader::Loader;
pub(crate) use loader::{ReadBatch, Steps};
pub(crate) use log::Means;
use log::StepLog;
use optimizer::{Rate, adamw};
use told::with_mean_loss;

/// The names of burn-train's files of a checkpoint: weights, moments, and the learning rate.
pub(crate) const CHECKPOINT_PARTS: [&str; 3] = ["model", "optim", "scheduler"];

/// A family as burn-train's learner takes it.
pub(crate) trait Trainable: HfModule + Sync + 'static {
    type Batch: Module + Sendable + std::fmt::Debug + 'static;
    type Training: LearnerModel
        + ModuleDisplay
        + Stages
        + TrainStep<Input = Self::Batch, Output = ClassificationOutput>
        + InferenceStep<Input = Self::Batch, Output = ClassificationOutput>;

    /// With gradients that are a share of those of its loss.
    fn training(self, share: f64) -> Self::Training;

    fn trained(training: Self::Training) -> Self;

    /// The target of what is not learned, which accuracy leaves out; none if everything is.
    fn no_target(&self) -> Option<usize> {
        Some(0)
    }

    /// With the weights of a checkpoint's file.
    fn with_weights(self, file: &Path) -> Self {
        Self::trained(self.training(1.0).load_file(file))
    }
}

/// Refuses a pipeline that the model cannot be divided over. Of a model whose parameters are not made yet none is.
pub(crate) fn check_stages<M: Trainable>(
    model: M,
    layout: &ParallelLayout,
    schedule: Option<ScheduleKind>,
    micro_batches: usize,
) -> Result<(), String> {
    if layout.pp == 1 {
        return Ok(());
    }
    let wanted = Wanted { schedule, micro_batches: Some(micro_batches), recompute: Recompute::default() };
    Division::of(&model.training(1.0), layout, &wanted).map(drop).map_err(|error| error.to_string())
}

/// Refuses tensor-parallel ranks that cannot share the model. Parameters that are not made yet remain so.
pub(crate) fn check_shards<M: Trainable>(model: &M, layout: &ParallelLayout) -> Result<(), String> {
    let fits = |tp: usize| {
        let layout = ParallelLayout { tp, ..layout.clone() };
        TensorParallel::new(&layout, &M::plan(), false).map_or(Ok(()), |tensor| tensor.check(model))
    };
    fits(layout.tp).map_err(|error| {
        // Every try reads the whole model.
        let most = layout.tp.saturating_mul(2).min(256);
        let nearest = Nearest::where_legal(layout.tp, most, |tp| fits(tp).is_ok());
        format!("tensor-parallel = {}: {error}; nearest legal: {nearest}", layout.tp)
    })
}

/// Checkpoints of a training.
pub(crate) struct ModuleCheckpoints {
    pub folder: PathBuf,
    /// Epochs between two; without it there is only that of the last.
    pub every: Option<usize>,
    pub keep: Option<usize>,
    /// Epochs that are there; the training begins after the last.
    pub saved: Vec<usize>,
}

/// A training, of which all processes have the same but for their devices and logs.
pub(crate) struct ModuleTraining<B> {
    pub layout: ParallelLayout,
    /// Of every rank of this process.
    pub devices: Vec<Device>,
    pub schedule: Option<ScheduleKind>,
    /// GEMMs in bf16.
    pub mixed: bool,
    pub steps: Steps,
    /// Samples of a micro-batch.
    pub micro_batch: usize,
    pub train: ReadBatch<B>,
    /// Samples of an evaluation, and how they are read.
    pub held_out: (usize, ReadBatch<B>),
    pub optimizer: AdamWConfig,
    pub rates: LrSchedule,
    pub clip: Option<f64>,
    pub seed: u64,
    /// Of burn-train's files; in each process another one.
    pub directory: PathBuf,
    /// In the first process.
    pub log: Option<RunLog>,
    pub checkpoints: Option<ModuleCheckpoints>,
}

/// How a training ended.
pub(crate) struct ModuleEnd {
    /// Means of the last evaluation, in the first process.
    pub held_out: Option<Means>,
    pub stopped: bool,
}

impl<B: Sendable + 'static> ModuleTraining<B> {
    /// Trains to the end, or until it is stopped. `None`: it failed, which was printed.
    pub fn launch<M: Trainable<Batch = B>>(self, model: M) -> Option<ModuleEnd> {
        let (strategy, micro_batches, outputs) = (self.strategy::<M>(), self.micro_batches(), self.outputs());
        let Self { steps, micro_batch, directory, .. } = self;
        let done = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.saved.last().copied()).unwrap_or(0);
        let epochs = steps.all.div_ceil(steps.epoch);
        let accuracy =
            model.no_target().map_or_else(AccuracyMetric::new, |none| AccuracyMetric::new().with_pad_token(none));
        let model = model.training(1.0 / micro_batches as f64);
        let taken = (done * steps.epoch).min(steps.all) as u64;
        let rate = Rate { schedule: self.rates, samples: steps.samples as u64, steps: taken };
        let interrupter = Interrupter::new();
        let log = self.log.map(|log| StepLog::new(log, rate.clone(), outputs, interrupter.clone()));
        let held_out = log.as_ref().map(|log| log.held_out.clone());
        let learner = Learner::new(model.clone(), adamw(&self.optimizer, &model), rate);
        let epoch = (done > 0).then_some(done);
        let mut supervised = SupervisedTraining::new(
            &directory,
            Loader::training(self.train, micro_batch, steps, done),
            Loader::first(self.held_out.1, micro_batch, self.held_out.0),
        )
        .metrics((LossMetric::new(), accuracy))
        .num_epochs(epochs)
        .with_training_strategy(strategy);
        supervised = match log {
            Some(log) => supervised
                .renderer(renderer(interrupter.clone(), epoch))
                .with_metric_logger(FileMetricLogger::new(&directory))
                .with_metric_logger(log),
            None => supervised.renderer(Box::new(LogRenderer::new(std::io::sink()))),
        };
        supervised = supervised.with_interrupter(interrupter);
        if let Some(ModuleCheckpoints { folder, every, keep, saved }) = self.checkpoints {
            let [weights, states, rates] = CHECKPOINT_PARTS.map(|part| FileCheckpointer::new(&folder, part));
            supervised = supervised
                .with_custom_checkpointers(weights, states, rates)
                .with_checkpointing_strategy(EveryEpochs { every, last: epochs, keep, saved: saved.into() });
        }
        if let Some(epoch) = epoch {
            supervised = supervised.checkpoint(epoch);
        }
        // The strategy draws the seed of all its random numbers.
        self.devices[0].seed(self.seed);
        let result = supervised.launch(learner);
        let held_out = held_out.and_then(|held_out| *held_out.lock());
        result.error.is_none().then(|| ModuleEnd { held_out, stopped: result.interrupted.is_some() })
    }

    /// Of a step on a data-parallel rank.
    fn micro_batches(&self) -> usize {
        self.steps.samples / (self.micro_batch * self.layout.dp)
    }

    /// Of all micro-batches of a step those that the metrics of the first process get: one of each data-parallel rank that it
    /// leads.
    fn outputs(&self) -> usize {
        let ParallelLayout { tp, pp, .. } = self.layout;
        let here = self.layout.world_size() / processes::count();
        self.micro_batches() * here.div_ceil(tp * pp)
    }

    fn strategy<M: Trainable<Batch = B>>(&self) -> TrainingStrategy<M::Training> {
        let mut mesh = MeshStrategy::new(self.layout.clone())
            .plan(M::plan())
            .devices(self.devices.clone())
            .micro_batches(self.micro_batches());
        if let Some(norm) = self.clip {
            mesh = mesh.max_grad_norm(norm);
        }
        if self.mixed {
            mesh = mesh.autocast(FloatDType::BF16);
        }
        let several = processes::count() > 1;
        let told: Option<fn(ClassificationOutput, &Group) -> ClassificationOutput> = several.then_some(with_mean_loss);
        if self.layout.pp == 1 {
            return mesh.seeded().telling(told);
        }
        if let Some(schedule) = self.schedule {
            mesh = mesh.schedule(schedule);
        }
        match several {
            true => mesh.stages().across_processes().telling(told),
            false => mesh.stages().into(),
        }
    }
}
