//! A plain Burn module under burn-train, as a file describes its training: steps, evaluations, checkpoints and a log.

mod every_epochs;
mod loader;
mod log;
mod optimizer;
mod share;

use std::path::{Path, PathBuf};

use backend_dist::mesh::ParallelLayout;
use burn::module::{Module, ModuleDisplay};
use burn::tensor::{Device, FloatDType};
use burn::train::checkpoint::FileCheckpointer;
use burn::train::logger::FileMetricLogger;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Interrupter, Learner, LearnerModel, SupervisedTraining, TrainStep,
    TrainingStrategy,
};
use models::hf::HfModule;
use models::{Bert, T5};

use super::bert::{BertBatch, BertTraining};
use super::mesh::MeshStrategy;
use super::stages::Stages;
use super::t5::{T5Batch, T5Training};
use crate::console::renderer;
use crate::lr::LrSchedule;
use crate::metrics::RunLog;
use crate::optim::AdamWConfig;
use crate::schedule::ScheduleKind;
use every_epochs::EveryEpochs;
use loader::Loader;
pub(crate) use loader::{ReadBatch, Steps};
use log::StepLog;
use optimizer::{Rate, adamw};
use share::Share;

/// The names of burn-train's files of a checkpoint: weights, moments, and the learning rate.
pub(crate) const CHECKPOINT_PARTS: [&str; 3] = ["model", "optim", "scheduler"];

/// A family as burn-train's learner takes it.
pub(crate) trait Trainable: HfModule + Sync + 'static {
    type Batch: Module + std::fmt::Debug + 'static;
    type Training: LearnerModel
        + ModuleDisplay
        + Stages
        + TrainStep<Input = Self::Batch, Output = ClassificationOutput>
        + InferenceStep<Input = Self::Batch, Output = ClassificationOutput>;

    /// With gradients that are a share of those of its loss.
    fn training(self, share: f64) -> Self::Training;

    fn trained(training: Self::Training) -> Self;

    /// With the weights of a checkpoint's file.
    fn with_weights(self, file: &Path) -> Self {
        Self::trained(self.training(1.0).load_file(file))
    }
}

impl Trainable for Bert {
    type Batch = BertBatch;
    type Training = Share<BertTraining>;

    fn training(self, share: f64) -> Self::Training {
        Share { model: BertTraining { bert: self }, share }
    }

    fn trained(training: Self::Training) -> Self {
        training.model.bert
    }
}

impl Trainable for T5 {
    type Batch = T5Batch;
    type Training = Share<T5Training>;

    fn training(self, share: f64) -> Self::Training {
        Share { model: T5Training { t5: self }, share }
    }

    fn trained(training: Self::Training) -> Self {
        training.model.t5
    }
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

/// A training.
pub(crate) struct ModuleTraining<B> {
    pub layout: ParallelLayout,
    /// Of every rank.
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
    /// Of burn-train's files.
    pub directory: PathBuf,
    pub log: RunLog,
    pub checkpoints: Option<ModuleCheckpoints>,
}

/// How a training ended.
pub(crate) struct ModuleEnd {
    /// Mean loss of the last evaluation.
    pub held_out: Option<f64>,
    pub stopped: bool,
}

impl<B: 'static> ModuleTraining<B> {
    /// Trains to the end, or until it is stopped. `None`: it failed, which was printed.
    pub fn launch<M: Trainable<Batch = B>>(self, model: M) -> Option<ModuleEnd> {
        let (strategy, micro_batches) = (self.strategy::<M>(), self.micro_batches());
        let Self { steps, micro_batch, directory, .. } = self;
        let done = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.saved.last().copied()).unwrap_or(0);
        let epochs = steps.all.div_ceil(steps.epoch);
        let model = model.training(1.0 / micro_batches as f64);
        let taken = (done * steps.epoch).min(steps.all) as u64;
        let rate = Rate { schedule: self.rates, samples: steps.samples as u64, steps: taken };
        let interrupter = Interrupter::new();
        let log = StepLog::new(self.log, rate.clone(), micro_batches * self.layout.dp, interrupter.clone());
        let held_out = log.held_out.clone();
        let learner = Learner::new(model.clone(), adamw(&self.optimizer, &model), rate);
        let epoch = (done > 0).then_some(done);
        let mut supervised = SupervisedTraining::new(
            &directory,
            Loader::training(self.train, micro_batch, steps, done),
            Loader::first(self.held_out.1, micro_batch, self.held_out.0),
        )
        .metrics((LossMetric::new(), AccuracyMetric::new().with_pad_token(0)))
        .num_epochs(epochs)
        .renderer(renderer(interrupter.clone(), epoch))
        .with_interrupter(interrupter)
        .with_metric_logger(FileMetricLogger::new(&directory))
        .with_metric_logger(log)
        .with_training_strategy(strategy);
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
        let held_out = *held_out.lock();
        result.error.is_none().then(|| ModuleEnd { held_out, stopped: result.interrupted.is_some() })
    }

    /// Of a step on a data-parallel rank.
    fn micro_batches(&self) -> usize {
        self.steps.samples / (self.micro_batch * self.layout.dp)
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
        if self.layout.pp == 1 {
            return mesh.seeded().into();
        }
        if let Some(schedule) = self.schedule {
            mesh = mesh.schedule(schedule);
        }
        mesh.stages().into()
    }
}
