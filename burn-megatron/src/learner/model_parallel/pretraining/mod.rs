//! A training run of one of this crate's models, up to the point where burn-train takes over.

mod supervised;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Mesh;
use backend_dist::process::Processes;
use burn::tensor::Device;
use models::layout::ModelDims;
use models::{CausalLm, Part};
use parking_lot::Mutex;

use super::exit::ExitOptions;
use super::faults::Faults;
use super::logs::LogOptions;
use super::restarts::RestartOptions;
use super::rollouts::GrpoRun;
use super::saving::{CheckpointOptions, Description, Resume};
use super::settings::{Build, Finish, Settings};
use super::worker::Data;
use crate::data::TokenDataset;
use crate::engine::{EngineConfig, RankEngine, Teacher};
use crate::eval::TrainingTasks;
use crate::metrics::{MetricsSink, Sinks};

/// A language model, a layout and the data, ready to train under burn-train's `SupervisedTraining`.
///
/// `M` is the model and `R` what [`finish`](Pretraining::finish) makes of the trained one.
///
/// ```no_run
/// use std::sync::Arc;
/// use burn::tensor::FloatDType;
/// use burn_megatron::{data::TokensInMemory, prelude::*};
///
/// let config = LlamaConfig::tiny();
/// let tokens: Vec<i64> = (0..100_000).map(|i| i * i % 97).collect();
/// let data = Arc::new(TokensInMemory::new(tokens, 64));
/// let mesh = Mesh::new("TP2 DP2".parse()?)?;
/// let (recipe, dims) = (EngineConfig::new(2, 16, LrConfig::constant(1e-3)), config.dims());
/// let run = Pretraining::new(mesh, recipe, 100, (data.clone(), data), dims, move |rank, part| {
///     Ok(Llama::build(&config, ParamBuilder::new(rank, FloatDType::F32, 1234).with_part(part))?)
/// })
/// .directory("runs/example")
/// .checkpoints(CheckpointOptions {
///     root: "runs/example/checkpoints".into(),
///     every: SaveEvery::Auto,
///     saver: SaverOptions { keep_last: Some(2), background: true, ..SaverOptions::default() },
/// })
/// .resume(Resume::IfPresent)
/// .finish(|rank, engine| global_weights(rank, engine));
/// let (training, learner) = run.supervised();
/// if training.launch(learner).error.is_none() {
///     let weights = run.finished().flatten().expect("rank 0 has them all");
///     println!("{} tensors", weights.len());
/// }
/// # Ok::<(), BoxError>(())
/// ```
pub struct Pretraining<M, R = ()> {
    settings: Settings,
    build: Build<M>,
    reference: Option<Build<M>>,
    evaluation_batches: usize,
    directory: PathBuf,
    resume: Resume,
    finish: Finish<M, R>,
    finished: Arc<Mutex<Option<R>>>,
}

impl<M: CausalLm + 'static> Pretraining<M> {
    /// A run of `steps` optimizer steps on CPU ranks, evaluated ten times, that writes to `./runs/pretraining`.
    ///
    /// `dims` are the sizes of the model; `build` makes a stage of it, the part that it is given
    /// ([`ParamBuilder::with_part`](models::ParamBuilder::with_part)), on the rank's own thread.
    pub fn new(
        mesh: Mesh,
        engine: EngineConfig,
        steps: usize,
        (train, valid): (Arc<dyn TokenDataset>, Arc<dyn TokenDataset>),
        dims: ModelDims,
        build: impl Fn(&Rank, Part) -> Result<M, BoxError> + Send + Sync + 'static,
    ) -> Self {
        let settings = Settings {
            mesh,
            processes: None,
            devices: vec![Device::flex()],
            engine,
            dims,
            teacher: None,
            data: Data { train, valid, tasks: None, grpo: None },
            steps,
            epoch: steps.div_ceil(10).max(1),
            logs: LogOptions::default(),
            sinks: Sinks::default(),
            faults: Faults::default(),
            restarts: RestartOptions::default(),
            timeout: None,
            exit: ExitOptions::default(),
            exited: Arc::default(),
            checkpoints: None,
            local_copies: None,
            other_data: false,
            description: Description::default(),
        };
        Self {
            settings,
            build: Arc::new(build),
            reference: None,
            evaluation_batches: 8,
            directory: PathBuf::from("runs/pretraining"),
            resume: Resume::Never,
            finish: Arc::new(|_, _| Ok(())),
            finished: Arc::default(),
        }
    }
}

impl<M: CausalLm + 'static, R: Send + 'static> Pretraining<M, R> {
    /// The processes that host the ranks, which must be those of this mesh; all of them make the same `Pretraining` and
    /// launch it once. Only the first writes logs, shows something and collects metrics; checkpoints go to a folder
    /// that all of them see. Without this, this process hosts all ranks.
    ///
    /// # Panics
    /// If the processes have met for another mesh.
    pub fn processes(mut self, processes: Processes) -> Self {
        assert_eq!(processes.mesh().layout(), self.settings.mesh.layout(), "the processes have met for another layout");
        self.settings.processes = Some(processes);
        self
    }

    /// One device per rank of this process, or fewer that the ranks take in turn.
    pub fn devices(mut self, devices: Vec<Device>) -> Self {
        self.settings.devices = devices;
        self
    }

    /// What makes the frozen model of distillation ([`EngineConfig::distill`]) on a rank's own thread, after the model that
    /// learns. It is told what the rank's part of a model with so many layers is.
    pub fn teacher(
        mut self,
        build: impl Fn(&Rank, &dyn Fn(usize) -> Part) -> Result<Teacher, BoxError> + Send + Sync + 'static,
    ) -> Self {
        self.settings.teacher = Some(Arc::new(build));
        self
    }

    /// Completions of prompts are what the run trains on ([`EngineConfig::grpo`]); the prompts must be its training data
    /// too.
    pub fn grpo(mut self, grpo: GrpoRun) -> Self {
        self.settings.data.grpo = Some(grpo);
        self
    }

    /// What makes a stage of the reference model of GRPO. Without it the reference is the model that is trained with its
    /// adapters switched off. Nothing is made where [`EngineConfig::grpo`] gives the KL divergence no weight.
    pub fn reference(mut self, build: impl Fn(&Rank, Part) -> Result<M, BoxError> + Send + Sync + 'static) -> Self {
        self.reference = Some(Arc::new(build));
        self
    }

    /// Tasks that are scored at every evaluation.
    pub fn tasks(mut self, tasks: TrainingTasks) -> Self {
        self.settings.data.tasks = Some(Arc::new(tasks));
        self
    }

    /// Steps between two evaluations and global batches per evaluation. The steps between two evaluations are what
    /// burn-train calls an epoch.
    pub fn evaluate(mut self, every: usize, batches: usize) -> Self {
        (self.settings.epoch, self.evaluation_batches) = (every.max(1), batches);
        self
    }

    /// Where logs go, but for those that [`logs`](Self::logs) puts elsewhere.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = directory.into();
        self
    }

    /// What is logged, and where.
    pub fn logs(mut self, logs: LogOptions) -> Self {
        self.settings.logs = logs;
        self
    }

    /// Also hands every entry of the run's log to `sink`.
    pub fn metrics_sink(self, sink: impl MetricsSink + 'static) -> Self {
        self.settings.sinks.add(sink);
        self
    }

    /// Lets things go wrong, to try out what becomes of the run.
    pub fn inject(mut self, faults: Faults) -> Self {
        self.settings.faults = faults;
        self
    }

    /// What the run does when a rank fails; only in one process.
    pub fn restarts(mut self, restarts: RestartOptions) -> Self {
        self.settings.restarts = restarts;
        self
    }

    /// How long a rank waits for others before the run counts as dead; ten minutes without this.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = Some(timeout);
        self
    }

    /// When the run saves and ends before its last step.
    pub fn exit(mut self, exit: ExitOptions) -> Self {
        self.settings.exit = exit;
        self
    }

    /// Saves checkpoints: after so many steps, whenever burn-train's checkpointing strategy wants one at the end of an
    /// epoch (`SupervisedTraining::with_checkpointing_strategy`; by default it never does), and after the last step.
    pub fn checkpoints(mut self, options: CheckpointOptions) -> Self {
        self.settings.checkpoints = Some(options);
        self
    }

    /// Also saves to a folder in the memory of the host, from which processes continue that their launcher starts again:
    /// give the newest copy there to [`resume`](Self::resume). One that this run does not start from is deleted, and so are
    /// all when the run ends. All processes must see the folder, so they are on one host.
    pub fn local_copies(mut self, options: CheckpointOptions) -> Self {
        self.settings.local_copies = Some(options);
        self
    }

    /// Where the run starts. `SupervisedTraining::checkpoint(epoch)` starts it at the checkpoint of that epoch's last
    /// step instead. Weights, optimizer, learning rate and order of samples continue as if the run had not stopped, in
    /// this layout or any other.
    pub fn resume(mut self, resume: Resume) -> Self {
        self.resume = resume;
        self
    }

    /// Whether the run may resume from a checkpoint whose run has read other samples; without this it is refused.
    pub fn other_data(mut self, other: bool) -> Self {
        self.settings.other_data = other;
        self
    }

    /// What checkpoints say of the model and the run.
    pub fn describe(mut self, description: Description) -> Self {
        self.settings.description = description;
        self
    }

    /// What every rank does with the trained model at the end, for example to generate text. All ranks of a model must
    /// make the same calls; [`finished`](Self::finished) returns the value of rank 0.
    pub fn finish<S: Send + 'static>(
        self,
        finish: impl Fn(&Rank, &mut RankEngine<M>) -> Result<S, BoxError> + Send + Sync + 'static,
    ) -> Pretraining<M, S> {
        let Self { settings, build, reference, evaluation_batches, directory, resume, .. } = self;
        let (finish, finished) = (Arc::new(finish), Arc::default());
        Pretraining { settings, build, reference, evaluation_batches, directory, resume, finish, finished }
    }

    /// Whether a training has ended before its last step as [`exit`](Self::exit) says.
    pub fn exited(&self) -> bool {
        self.settings.exited.load(Ordering::Relaxed)
    }

    /// [`exited`](Self::exited) for who runs on a rank.
    pub(crate) fn exit_flag(&self) -> Arc<AtomicBool> {
        self.settings.exited.clone()
    }

    /// What [`finish`](Self::finish) returned on rank 0, once, after a training that did not fail.
    pub fn finished(&self) -> Option<R> {
        self.finished.lock().take()
    }
}
