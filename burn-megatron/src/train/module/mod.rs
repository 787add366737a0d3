//! `train` of a BERT or a T5: a plain Burn module under burn-train, in the layout of its file.

mod checkpoints;
mod family;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use burn::module::{ModuleMapper, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use models::hf::HfModule;
use models::{Bert, T5};

use super::TrainError;
use crate::checkpoint::{SaveEvery, lock_output};
use crate::config::{ModuleConfig, Precision};
use crate::data::indexed::IndexedDataset;
use crate::element::Element;
use crate::hf::{ModuleExport, ModuleFolder};
use crate::learner::{
    ModuleCheckpoints, ModuleEnd, ModuleTraining, ReadBatch, Steps, Trainable, for_any_module, for_stages,
};
use crate::metrics::{LogFiles, RunInfo, RunLog};
pub use checkpoints::ModuleRun;
use checkpoints::begin;
use family::Family;

/// How a training ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModuleReport {
    /// Mean loss of the last evaluation, if there was one.
    pub held_out: Option<f64>,
    /// The step of the checkpoint that it began from; 0 without one.
    pub from: usize,
    /// A signal or a key has stopped it before its last step.
    pub stopped: bool,
    /// Wall time.
    pub seconds: f64,
}

/// Trains the model of a file, rank `r` on `devices[r]`, in one process.
///
/// # Errors
/// If the layout is not for such a model, data or weights cannot be read, the checkpoints are of another run, or a rank fails.
pub fn train_module(config: &ModuleConfig, devices: Vec<Device>) -> Result<ModuleReport, TrainError> {
    check_module(config)?;
    let _lock = lock_output(&config.output.directory)?;
    match config.model.model_type() {
        "bert" => train::<Bert>(config, devices),
        _ => train::<T5>(config, devices),
    }
}

/// Whether the model can be trained in the layout of its file.
///
/// # Errors
/// Names the layout, and the nearest that is possible.
pub fn check_module(config: &ModuleConfig) -> Result<(), TrainError> {
    let layout = &config.parallel;
    let legal = if layout.pp > 1 { for_stages(layout) } else { for_any_module(layout) };
    legal.map_err(|what| TrainError::Module(format!("[parallel]: {what}")))?;
    if let Some(schedule) = config.pipeline.schedule.filter(|_| layout.pp == 1) {
        let what = format!("pipeline.schedule = {schedule} with pipeline-parallel 1; nearest legal: none");
        return Err(TrainError::Module(what));
    }
    Ok(())
}

fn train<M: Family>(config: &ModuleConfig, devices: Vec<Device>) -> Result<ModuleReport, TrainError> {
    let reads_f64 = config.training.dtype != Precision::F64 || moments_in_f64();
    let (started, training, evaluation) = (Instant::now(), &config.training, &config.evaluation);
    let (sizes, model) = model::<M>(config)?;
    let [train, valid] = data::<M>(config, &sizes)?;
    let steps =
        Steps { all: training.steps, epoch: evaluation.every.min(training.steps), samples: training.global_batch };
    let epochs = steps.all.div_ceil(steps.epoch);
    let saved = match &config.checkpoint.directory {
        Some(folder) => begin(folder, config)?,
        None => Vec::new(),
    };
    let done = saved.last().copied().unwrap_or(0);
    let from = (done * steps.epoch).min(steps.all);
    if done >= epochs {
        let seconds = started.elapsed().as_secs_f64();
        return Ok(ModuleReport { held_out: None, from, stopped: false, seconds });
    }
    if done > 0 && !reads_f64 {
        let what =
            "training.dtype = f64: this process has f32 as its default type already, in which moments would be read";
        return Err(TrainError::Module(format!("{what}; nearest legal: f32, or to resume in a process of its own")));
    }

    let rates =
        config.lr.schedule(training.global_batch).map_err(|error| TrainError::Module(format!("[lr]: {error}")))?;
    let log = RunLog::open(&files(config), from as u64).map_err(|cause| io(&config.output.directory, cause))?;
    let checkpoints = config.checkpoint.directory.clone().map(|folder| ModuleCheckpoints {
        folder,
        every: match config.checkpoint.every {
            SaveEvery::Auto => Some(1),
            SaveEvery::Steps(every) => Some(every as usize / steps.epoch),
            SaveEvery::Never => None,
        },
        keep: config.checkpoint.keep_last,
        saved,
    });
    let run = ModuleTraining {
        layout: config.parallel.clone(),
        devices,
        schedule: config.pipeline.schedule,
        mixed: training.dtype == Precision::Bf16,
        steps,
        micro_batch: training.micro_batch,
        train,
        held_out: (evaluation.batches * training.global_batch, valid),
        optimizer: config.optimizer,
        rates,
        clip: training.clip,
        seed: training.seed,
        directory: config.output.directory.clone(),
        log,
        checkpoints,
    };
    let ModuleEnd { held_out, stopped } = run.launch(model).ok_or(TrainError::Failed)?;
    Ok(ModuleReport { held_out, from, stopped, seconds: started.elapsed().as_secs_f64() })
}

/// Whether burn-optim reads the moments of a checkpoint in f64: it does in the default type of the default device, which a
/// process chooses once, before it has tensors.
fn moments_in_f64() -> bool {
    let mut device = Device::default();
    device.configure(FloatDType::F64).is_ok() || device.settings().float_dtype == FloatDType::F64
}

/// The sizes and the model, with the weights of its folder or random ones of the run's seed.
fn model<M: HfModule>(config: &ModuleConfig) -> Result<(M::Config, M), TrainError> {
    let wrong = |error| TrainError::Module(format!("model: {error}"));
    let dtype = if config.training.dtype == Precision::F64 { FloatDType::F64 } else { FloatDType::F32 };
    let device = Device::flex();
    if let Some(folder) = &config.model.hf {
        let folder = ModuleFolder::open(folder)?;
        let sizes = M::present(M::from_hf(&config.model.config).map_err(wrong)?, &|name| folder.has(name));
        let model = folder.read(&sizes, dtype, &device.autodiff())?;
        return Ok((sizes, model));
    }
    let sizes = M::from_hf(&config.model.config).map_err(wrong)?;
    device.seed(config.training.seed);
    Ok((sizes.clone(), M::init(&sizes, &device.autodiff()).map(&mut Typed(dtype))))
}

/// Makes all parameters, in a type.
struct Typed(FloatDType);

impl ModuleMapper for Typed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let leaf = Tensor::from_inner(tensor.inner().cast(DType::from(self.0))).require_grad();
        Param::from_mapped_value(id, leaf, mapper)
    }
}

type Data<M> = [ReadBatch<<M as Trainable>::Batch>; 2];

/// Samples of training and of validation.
fn data<M: Family>(config: &ModuleConfig, sizes: &M::Config) -> Result<Data<M>, TrainError> {
    let (training, evaluation) = (&config.training, &config.evaluation);
    let opened =
        IndexedDataset::open(&config.data.prefixes[0]).map_err(|error| TrainError::Module(error.to_string()))?;
    let sentences = Arc::new(opened);
    let [train, valid, _] = config.data.split.ranges(sentences.num_documents());
    let part = |documents: Option<std::ops::Range<usize>>, name: &str, steps: usize| match documents {
        Some(documents) if !documents.is_empty() => {
            M::samples(config, sizes, &sentences, documents, steps * training.global_batch)
        }
        _ => Err(TrainError::Module(format!("data.split leaves no document for {name}; give it a larger share"))),
    };
    let train = part(train, "training", training.steps)?;
    let valid = if evaluation.batches == 0 { train.clone() } else { part(valid, "validation", evaluation.batches)? };
    Ok([train, valid])
}

fn files(config: &ModuleConfig) -> LogFiles {
    let (folder, log) = (&config.output.directory, &config.log);
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let within = LogFiles::within(folder);
    LogFiles {
        jsonl: log.jsonl.clone().unwrap_or(within.jsonl),
        tensorboard: log.tensorboard.clone(),
        wandb: log.wandb.clone(),
        mlflow: log.mlflow.clone(),
        run: RunInfo { name, config: serde_json::to_value(config).unwrap_or_default() },
    }
}

fn io(path: &Path, cause: std::io::Error) -> TrainError {
    TrainError::Io { path: path.into(), cause }
}

impl ModuleRun {
    /// Writes the model of the last checkpoint as a Hugging Face folder, with `element` weights in files of at most
    /// `shard_bytes`. Gives the step and the number of files.
    ///
    /// # Errors
    /// If there is no checkpoint, or the folder cannot be written.
    pub fn export(&self, to: &Path, element: Option<Element>, shard_bytes: u64) -> Result<(usize, usize), TrainError> {
        match self.config.model.model_type() {
            "bert" => self.export_as::<Bert>(to, element, shard_bytes),
            _ => self.export_as::<T5>(to, element, shard_bytes),
        }
    }

    fn export_as<M: Family>(
        &self,
        to: &Path,
        element: Option<Element>,
        shard_bytes: u64,
    ) -> Result<(usize, usize), TrainError> {
        let Some(epoch) = self.epochs().last().copied() else {
            return Err(TrainError::Module(format!("{} has no checkpoint yet", self.folder.display())));
        };
        let (sizes, model) = model::<M>(&self.config)?;
        let trained = model.with_weights(&self.weights(epoch));
        let own = if self.config.training.dtype == Precision::F64 { Element::F64 } else { Element::F32 };
        let what =
            ModuleExport { original: Some(&self.config.model.config), element: element.unwrap_or(own), shard_bytes };
        let files = what.write(to, &trained, &sizes)?;
        Ok(((epoch * self.config.evaluation.every).min(self.config.training.steps), files))
    }
}
