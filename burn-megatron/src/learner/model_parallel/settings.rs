//! What a [`Pretraining`](super::Pretraining) says of a run.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Mesh;
use backend_dist::process::Processes;
use burn::tensor::Device;
use models::Part;
use models::layout::ModelDims;

use super::exit::ExitOptions;
use super::faults::Faults;
use super::logs::LogOptions;
use super::restarts::RestartOptions;
use super::saving::{CheckpointOptions, Description};
use super::worker::Data;
use crate::engine::{EngineConfig, RankEngine, Teacher};
use crate::metrics::Sinks;

pub(super) type Build<M> = Arc<dyn Fn(&Rank, Part) -> Result<M, BoxError> + Send + Sync>;
pub(super) type BuildTeacher = Arc<dyn Fn(&Rank, &dyn Fn(usize) -> Part) -> Result<Teacher, BoxError> + Send + Sync>;
pub(super) type Finish<M, R> = Arc<dyn Fn(&Rank, &mut RankEngine<M>) -> Result<R, BoxError> + Send + Sync>;

/// What a [`Pretraining`](super::Pretraining) says of a run, but for its model.
#[derive(Clone)]
pub(super) struct Settings {
    pub mesh: Mesh,
    /// The processes that host the ranks; `None` if this one hosts all.
    pub processes: Option<Processes>,
    pub devices: Vec<Device>,
    pub engine: EngineConfig,
    pub dims: ModelDims,
    pub teacher: Option<BuildTeacher>,
    pub data: Data,
    /// Steps of the whole run.
    pub steps: usize,
    /// Steps between two evaluations.
    pub epoch: usize,
    pub logs: LogOptions,
    pub sinks: Sinks,
    pub faults: Faults,
    pub restarts: RestartOptions,
    pub timeout: Option<Duration>,
    pub exit: ExitOptions,
    /// Whether the run has ended so.
    pub exited: Arc<AtomicBool>,
    pub checkpoints: Option<CheckpointOptions>,
    /// Copies that outlive the processes.
    pub local_copies: Option<CheckpointOptions>,
    /// The checkpoint's run may have read other samples.
    pub other_data: bool,
    pub description: Description,
}
