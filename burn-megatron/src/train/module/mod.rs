//! `train` of a plain Burn module (BERT, T5, ViT, LLaVA) under burn-train, in the layout of its file.

mod adapters;
mod check;
mod checkpoints;
mod family;
mod images;
mod llava;
mod masked;
mod vit;

use std::path::Path;
use std::time::Instant;

use backend_dist::process::Cluster;
use burn::module::{ModuleMapper, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use models::hf::HfError;

use super::TrainError;
use crate::checkpoint::{SaveEvery, lock_output};
use crate::config::{ModuleConfig, Precision};
use crate::console::say;
use crate::element::Element;
use crate::hf::{ModuleExport, ModuleFolder, freeze, write_module_adapter};
use crate::learner::{ModuleCheckpoints, ModuleEnd, ModuleTraining, Steps};
use crate::metrics::{LogFiles, RunInfo, RunLog};
use adapters::adapted;
pub use check::{check_module, check_module_data, new_head};
pub use checkpoints::ModuleRun;
use checkpoints::{begin, same_data};
use family::{Family, ModuleData, of_family};

/// How a training ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModuleReport {
    /// Mean loss of the last evaluation, if there was one.
    pub held_out: Option<f64>,
    /// Its share of targets that are the likeliest class or token.
    pub accuracy: Option<f64>,
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
    train_module_among(config, &Cluster::from([]), devices)
}

/// The same in each process of a cluster, with a device for each rank of this process. The first process writes logs and
/// checkpoints, and all read them.
///
/// # Errors
/// As [`train_module`].
pub fn train_module_among(
    config: &ModuleConfig,
    cluster: &Cluster,
    devices: Vec<Device>,
) -> Result<ModuleReport, TrainError> {
    check_module(config)?;
    let _lock = cluster.is_first().then(|| lock_output(&config.output.directory)).transpose()?;
    of_family!(config, M => train::<M>(config, cluster, devices))
}

fn wrong(error: HfError) -> TrainError {
    TrainError::Module(format!("model: {error}"))
}

fn train<M: Family>(
    config: &ModuleConfig,
    cluster: &Cluster,
    devices: Vec<Device>,
) -> Result<ModuleReport, TrainError> {
    let reads_f64 = config.training.dtype != Precision::F64 || moments_in_f64();
    let (started, training, evaluation) = (Instant::now(), &config.training, &config.evaluation);
    let (sizes, folder) = sizes::<M>(config)?;
    // What is wrong with the data is said before there are weights, and before the folder of the checkpoints is another.
    let ModuleData { train, valid, held_out, notes, digest } = M::data(config, &sizes)?;
    let rates =
        config.lr.schedule(training.global_batch).map_err(|error| TrainError::Module(format!("[lr]: {error}")))?;
    let model = adapted(config, model::<M>(config, &sizes, folder.as_ref())?, true)?;
    notes.iter().filter(|_| cluster.is_first()).for_each(|note| say(format_args!("{:<12} {note}", "images")));
    let steps =
        Steps { all: training.steps, epoch: evaluation.every.min(training.steps), samples: training.global_batch };
    let epochs = steps.all.div_ceil(steps.epoch);
    let saved = match &config.checkpoint.directory {
        Some(folder) => {
            let saved = begin(folder, config, cluster.is_first())?;
            if let Some(digest) = &digest {
                same_data(folder, digest, !saved.is_empty(), cluster.is_first())?;
            }
            saved
        }
        None => Vec::new(),
    };
    let done = saved.last().copied().unwrap_or(0);
    let from = (done * steps.epoch).min(steps.all);
    if done >= epochs {
        let seconds = started.elapsed().as_secs_f64();
        return Ok(ModuleReport { held_out: None, accuracy: None, from, stopped: false, seconds });
    }
    if done > 0 && !reads_f64 {
        let what =
            "training.dtype = f64: this process has f32 as its default type already, in which moments would be read";
        return Err(TrainError::Module(format!("{what}; nearest legal: f32, or to resume in a process of its own")));
    }

    let in_output = |cause| io(&config.output.directory, cause);
    let log = cluster.is_first().then(|| RunLog::open(&files(config), from as u64)).transpose();
    let log = log.map_err(|named| TrainError::Module(format!("[log]: {named}")))?;
    // What burn-train writes in another process than the first is nothing that anybody reads.
    let unread = if cluster.is_first() { None } else { Some(tempfile::tempdir().map_err(in_output)?) };
    let directory = unread.as_ref().map_or(config.output.directory.clone(), |folder| folder.path().into());
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
        held_out: (held_out, valid),
        optimizer: config.optimizer,
        rates,
        clip: training.clip,
        seed: training.seed,
        directory,
        log,
        checkpoints,
    };
    // The ranks meet anew: who would wait there for a process that has failed hears of it.
    cluster.all_gather(())?;
    let end = run.launch(model);
    // A signal, or a log that cannot be written, may be the first process's alone.
    let ends = cluster.all_gather(end.as_ref().map(|end| end.stopped))?;
    let stopped = ends.into_iter().collect::<Option<Vec<bool>>>().ok_or(TrainError::Failed)?.contains(&true);
    let held_out = end.and_then(|ModuleEnd { held_out, .. }| held_out);
    let seconds = started.elapsed().as_secs_f64();
    let (loss, accuracy) = (held_out.map(|means| means.loss), held_out.and_then(|means| means.accuracy));
    Ok(ModuleReport { held_out: loss, accuracy, from, stopped, seconds })
}

/// Whether burn-optim reads the moments of a checkpoint in f64: it does in the default type of the default device, which a
/// process chooses once, before it has tensors.
fn moments_in_f64() -> bool {
    let mut device = Device::default();
    device.configure(FloatDType::F64).is_ok() || device.settings().float_dtype == FloatDType::F64
}

/// The sizes of the model, and the folder that it begins with.
fn sizes<M: Family>(config: &ModuleConfig) -> Result<(M::Config, Option<ModuleFolder>), TrainError> {
    let sizes = M::from_hf(&config.model.config).map_err(wrong)?;
    let Some(folder) = config.model.hf.as_ref().map(ModuleFolder::open).transpose()? else { return Ok((sizes, None)) };
    Ok((M::present(sizes, &|name| folder.has(name)), Some(folder)))
}

/// The model, with the weights of its folder or random ones of the run's seed.
fn model<M: Family>(config: &ModuleConfig, sizes: &M::Config, folder: Option<&ModuleFolder>) -> Result<M, TrainError> {
    let dtype = if config.training.dtype == Precision::F64 { FloatDType::F64 } else { FloatDType::F32 };
    let device = Device::flex();
    device.seed(config.training.seed);
    let model = match folder {
        Some(folder) => M::read(folder, sizes, dtype, &device.autodiff())?,
        None => M::init(sizes, &device.autodiff()),
    };
    Ok(freeze(model.map(&mut Typed(dtype)), &config.param_groups.frozen))
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
    /// Writes the model of the last checkpoint as a Hugging Face folder, adapters merged into it, with `element` weights in files
    /// of at most `shard_bytes`. Gives the step and the number of files.
    ///
    /// # Errors
    /// If there is no checkpoint, or the folder cannot be written.
    pub fn export(&self, to: &Path, element: Option<Element>, shard_bytes: u64) -> Result<(usize, usize), TrainError> {
        of_family!(self.config, M => self.export_as::<M>(to, element, shard_bytes))
    }

    /// Writes the adapters of the last checkpoint as peft does. Gives the step and the number of layers.
    ///
    /// # Errors
    /// If there is no checkpoint, the run has no adapters, or the folder cannot be written.
    pub fn export_adapter(&self, to: &Path) -> Result<(usize, usize), TrainError> {
        of_family!(self.config, M => self.export_adapter_as::<M>(to))
    }

    fn export_as<M: Family>(
        &self,
        to: &Path,
        element: Option<Element>,
        shard_bytes: u64,
    ) -> Result<(usize, usize), TrainError> {
        let (step, sizes, trained) = self.trained::<M>()?;
        let own = if self.config.training.dtype == Precision::F64 { Element::F64 } else { Element::F32 };
        let what =
            ModuleExport { original: Some(&self.config.model.config), element: element.unwrap_or(own), shard_bytes };
        let files = what.write(to, &trained, &sizes)?;
        M::complete(&self.config, &sizes, to)?;
        Ok((step, files))
    }

    fn export_adapter_as<M: Family>(&self, to: &Path) -> Result<(usize, usize), TrainError> {
        let (step, _, trained) = self.trained::<M>()?;
        let plan = adapters::plan(&self.config, &trained)?.ok_or_else(|| {
            let what = format!("{} has no adapters: its run had no [lora]; give --hf", self.folder.display());
            TrainError::Module(what)
        })?;
        let base = self.config.model.hf.as_ref().map(|folder| folder.display().to_string());
        write_module_adapter(to, &trained, &plan, base.as_deref())?;
        Ok((step, plan.len()))
    }

    /// Step, sizes and model of the last checkpoint.
    fn trained<M: Family>(&self) -> Result<(usize, M::Config, M), TrainError> {
        let Some(epoch) = self.epochs().last().copied() else {
            return Err(TrainError::Module(format!("{} has no checkpoint yet", self.folder.display())));
        };
        let (sizes, folder) = sizes::<M>(&self.config)?;
        let model = model::<M>(&self.config, &sizes, folder.as_ref())?;
        let trained = adapted(&self.config, model, false)?.with_weights(&self.weights(epoch));
        Ok(((epoch * self.config.evaluation.every).min(self.config.training.steps), sizes, trained))
    }
}
