//! When a run saves, what a checkpoint holds apart from tensors, and which checkpoint a run resumes from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::process::{ProcessChannel, Processes};
use indicatif::HumanBytes;
use models::CausalLm;
use serde_json::{Value, json};

use super::logs::say;
use super::same_data::fingerprint;
use crate::checkpoint::{
    Channel, Checkpoint, CheckpointError, CopyReport, Pace, Peers, RunState, SaveEvery, SaveReport, Saver, SaverOptions,
};
use crate::data::TokenDataset;
use crate::engine::{EngineConfig, RankEngine};

/// Where and when a run saves.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let options = CheckpointOptions {
///     root: "runs/example/checkpoints".into(),
///     every: SaveEvery::Steps(500),
///     saver: SaverOptions { keep_last: Some(2), background: true, ..SaverOptions::default() },
/// };
/// // For `Pretraining::checkpoints`.
/// assert!(options.every.is_due(1000) && !options.every.is_due(1001));
/// ```
#[derive(Clone, Debug)]
pub struct CheckpointOptions {
    /// Folder of the checkpoints, one `step_…` folder each.
    pub root: PathBuf,
    /// How often it saves; burn-train's checkpointing strategy may ask for more. A run that ends or is stopped saves its
    /// last step in any case.
    pub every: SaveEvery,
    /// Which checkpoints stay, and how they are written.
    pub saver: SaverOptions,
}

/// Where a run starts.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// /// A run continues where it stopped; with a folder it starts from the weights and the state that are there.
/// fn start(from: Option<&str>) -> Resume {
///     from.map_or(Resume::IfPresent, |folder| Resume::From(folder.into()))
/// }
/// // For `Pretraining::resume`.
/// assert_eq!(start(Some("checkpoints/step_00000500")), Resume::From("checkpoints/step_00000500".into()));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// At its first step.
    #[default]
    Never,
    /// At the latest checkpoint in the run's own folder of checkpoints, or at its first step where there is none. A folder
    /// in which all are damaged is an error.
    IfPresent,
    /// At this checkpoint, or the latest one in this folder.
    From(PathBuf),
}

/// What a checkpoint says of the run that wrote it.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let config = LlamaConfig::tiny();
/// let recipe = EngineConfig::new(2, 16, LrConfig::constant(1e-3));
/// // With the model's sizes in it, `burn-megatron generate --checkpoint` and `export` can use a checkpoint.
/// let description = Description {
///     model: serde_json::to_value(FamilyConfig::Llama(config))?,
///     config: serde_json::to_value(recipe)?,
///     ..Description::default()
/// };
/// assert_eq!(description.model["family"], "llama");
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Description {
    /// The model: usually its `FamilyConfig`.
    pub model: Value,
    /// The full resolved configuration of the run.
    pub config: Value,
    /// The step of the checkpoint in its own folder that the run was told to begin with; see [`RunState::begun_from`].
    pub begun_from: Option<u64>,
}

impl Resume {
    /// The checkpoint to resume from, opened. Fails if it is damaged, or was asked for and is not there.
    pub(super) fn open(&self, options: Option<&CheckpointOptions>) -> Result<Option<Checkpoint>, CheckpointError> {
        match (self, options) {
            (Resume::From(path), _) => Checkpoint::open(path).map(Some),
            (Resume::IfPresent, Some(options)) => match Checkpoint::open(&options.root) {
                Err(CheckpointError::NotFound { .. }) => Ok(None),
                opened => opened.map(Some),
            },
            _ => Ok(None),
        }
    }
}

/// The line of a run whose saves stop training for longer.
pub(super) fn without_host_memory(trouble: &str) -> String {
    format!("training waits while checkpoints are copied, for lack of page-locked host memory: {trouble}")
}

/// What the savers of several processes tell each other over.
struct BetweenProcesses(ProcessChannel);

impl Channel for BetweenProcesses {
    fn is_first(&self) -> bool {
        self.0.is_first()
    }

    fn all_gather(&self, text: String) -> Result<Vec<String>, String> {
        self.0.all_gather(&text).map_err(|error| error.to_string())
    }
}

/// Step and folder of the newest checkpoint of a run.
pub(super) type Newest = (u64, PathBuf);

/// What is the same in every save of a run.
pub(super) struct Saves {
    saver: Saver,
    every: SaveEvery,
    description: Description,
    data: Value,
}

impl Saves {
    /// Takes the folder; see [`Saver::new`] and, for several processes, [`Saver::among`], which talk over the channel
    /// `name`. `data` is what the run trains on.
    pub fn new(
        name: &str,
        options: &CheckpointOptions,
        processes: &Processes,
        description: Description,
        data: &dyn TokenDataset,
    ) -> Result<Arc<Self>, BoxError> {
        let (root, ranks, saver) = (&options.root, processes.ranks(), options.saver.clone());
        let saver = match processes.count() {
            1 => Saver::new(root, ranks.len(), saver)?,
            _ => Saver::among(Peers::new(BetweenProcesses(processes.channel(name))), root, ranks, saver)?,
        };
        Ok(Arc::new(Self { saver, every: options.every, description, data: fingerprint(data)? }))
    }

    /// The run begins, and has this checkpoint on disk; see [`Saver::begin_from`].
    pub fn begin_from(&self, newest: Option<&Newest>) {
        let resolved = |folder: &Path| folder.canonicalize().ok();
        let is_here = |folder: &Path| resolved(folder) == resolved(self.saver.root());
        let newest = newest.filter(|(_, path)| path.parent().is_some_and(is_here));
        self.saver.begin_from(newest.map_or(0, |(step, _)| *step));
    }

    /// The folder of the checkpoints.
    pub fn root(&self) -> &Path {
        self.saver.root()
    }

    /// The checkpoints of the run, by step; see [`Saver::of_run`].
    pub fn of_run(&self) -> Result<BTreeMap<u64, PathBuf>, CheckpointError> {
        self.saver.of_run()
    }

    /// Whether a save is due after this step.
    pub fn due(&self, step: u64) -> bool {
        self.every.is_due(step)
    }

    /// Tries out a save with a small file, so that the first real one does not fail for lack of permission or space.
    /// Returns what decides about further saves of a run up to step `last`, if the options leave that to what saves cost. One
    /// rank calls it.
    pub fn rehearse<M: CausalLm>(&self, engine: &RankEngine<M>, last: u64) -> Result<Option<Pace>, CheckpointError> {
        let seconds = self.saver.rehearse(engine.checkpoint_bytes(), self.every.saves(engine.steps(), last))?;
        Ok((self.every == SaveEvery::Auto).then(|| Pace::new(seconds)))
    }

    /// Hands this rank's share of the state over; all ranks call it after the same step. Returns the seconds it took.
    pub fn submit<M: CausalLm>(
        &self,
        rank: &Rank,
        engine: &RankEngine<M>,
        config: &EngineConfig,
    ) -> Result<f64, CheckpointError> {
        let start = Instant::now();
        let state = run_state(rank, engine, config, &self.description, &self.data);
        self.saver.submit(rank.rank, engine.snapshot(), &state)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Saves that have ended since the last call. One rank calls it. Fails if one of them has failed.
    pub fn finished(&self) -> Result<Vec<SaveReport>, CheckpointError> {
        self.saver.finished().into_iter().collect()
    }

    /// Lines on copies to the storage that have ended since the last call. A copy that failed does not end the run: its
    /// checkpoint is in the folder, and the next one is copied again.
    pub fn copied(&self) -> Vec<String> {
        let line = |copied| match copied {
            Ok(CopyReport { step, storage, bytes, seconds, .. }) => {
                format!("checkpoint of step {step} copied to {storage}: {} in {seconds:.1} s", HumanBytes(bytes))
            }
            Err(error) => format!("checkpoint.storage: {error}; checkpoints are in {}", self.saver.root().display()),
        };
        self.saver.copied().into_iter().map(line).collect()
    }

    /// Gives up the copies that have not begun: a run that begins again does not wait for them.
    pub fn skip_copies(&self) {
        self.saver.skip_copies();
    }

    /// Waits until the checkpoints that are complete are copied to the storage, and says how that went. Not in a rank: others
    /// that wait for it time out where a network is slow.
    pub fn end_copies(&self) {
        let (_, errors) = self.settled();
        errors.iter().for_each(|error| say(&format!("a checkpoint was not saved: {error}")));
        if let Err(error) = self.saver.wait_for_copies() {
            say(&format!("a checkpoint was not deleted: {error}"));
        }
        self.copied().iter().for_each(|line| say(line));
    }

    /// The checkpoint of a step is not wanted any more; see [`Saver::retire`].
    pub fn retire(&self, step: u64) -> Result<(), CheckpointError> {
        self.saver.retire(step)
    }

    /// The run continues from the checkpoint of a step; see [`Saver::go_back_to`].
    pub fn go_back_to(&self, step: u64) -> Result<(), CheckpointError> {
        self.saver.go_back_to(step)
    }

    /// Waits for the save in progress, which ends if some rank has not submitted to it: those that are complete, and why others
    /// are not.
    pub fn settled(&self) -> (Vec<SaveReport>, Vec<CheckpointError>) {
        let (mut reports, mut errors) = (Vec::new(), Vec::new());
        for save in self.saver.settled() {
            save.map_or_else(|error| errors.push(error), |report| reports.push(report));
        }
        (reports, errors)
    }

    /// Waits for the save in progress, which all ranks must have submitted to.
    pub fn wait(&self) -> Result<Vec<SaveReport>, CheckpointError> {
        self.saver.wait()
    }
}

/// Everything but the tensors of a rank's state after a step.
pub(super) fn run_state<M: CausalLm>(
    rank: &Rank,
    engine: &RankEngine<M>,
    config: &EngineConfig,
    description: &Description,
    data: &Value,
) -> RunState {
    let position = engine.position();
    let value = |part: Result<Value, serde_json::Error>| part.expect("configurations are JSON");
    RunState {
        step: position.step,
        consumed_samples: position.consumed,
        updates: position.updates,
        skipped_samples: Some(position.skipped),
        layout: rank.mesh.layout().clone(),
        world_size: rank.mesh.world_size(),
        model: description.model.clone(),
        config: description.config.clone(),
        data: data.clone(),
        schedule: value(serde_json::to_value(config)),
        rng: json!({ "seed": config.seed, "kind": "counter-based: dropout is a function of seed, updates and position" }),
        loss_scale: value(serde_json::to_value(engine.loss_scale())),
        fp8: engine.fp8_state(),
        anomalies: value(serde_json::to_value(engine.anomaly_state())),
        begun_from: description.begun_from,
    }
}
