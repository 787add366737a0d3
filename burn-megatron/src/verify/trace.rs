//! Trains a model in one layout and records everything that another layout must agree with.

use super::Candidate;
use crate::engine::{EngineConfig, RankEngine, TokenBatch};
use backend_dist::comm::RunError;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{LayoutError, Mesh};
use backend_dist::process::Cluster;
use backend_dist::shard::{HostTensor, ParamSpec, Registry, RegistryError, Section, Unit};
use models::layers::moe::RoutingReplay;
use models::layout::ModelDims;
use models::lora::LoraError;
use models::{CausalLm, Part};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What every layout trains on: one global batch per step. `engine.micro_batch` is replaced by that of the layout.
#[derive(Clone, Debug)]
pub struct Job {
    /// Optimizer, schedule, batch size.
    pub engine: EngineConfig,
    /// One global batch per step.
    pub batches: Vec<TokenBatch>,
    /// Records the experts of all tokens, or replays them.
    pub routing: Option<RoutingReplay>,
}

impl Job {
    /// The engine's configuration in a layout.
    pub(super) fn engine_in(&self, candidate: &Candidate) -> EngineConfig {
        let sequences = self.engine.global_batch / candidate.layout.dp;
        EngineConfig {
            micro_batch: (sequences / candidate.accumulation).max(1),
            context: candidate.context.clone(),
            pipeline: candidate.pipeline.clone(),
            recompute: candidate.recompute.clone(),
            ..self.engine.clone()
        }
    }
}

/// A slice that a rank holds, with its values.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LocalTensor {
    /// Of which global tensor, and which part.
    pub section: Section,
    /// Where the model uses it.
    pub unit: Unit,
    /// Values, padding included.
    pub values: Vec<f64>,
}

/// The losses, gradients and parameters of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankTrace {
    /// Loss of each step.
    pub losses: Vec<f64>,
    /// Global gradient norm of each step.
    pub grad_norms: Vec<f64>,
    /// Gradients of each step, per token and before clipping.
    pub gradients: Vec<Vec<LocalTensor>>,
    /// Parameters after the last step.
    pub parameters: Vec<LocalTensor>,
}

/// Why a layout could not be tried.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The layout is not one.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A rank failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The model cannot have adapters.
    #[error("--lora: {0}")]
    Lora(#[from] LoraError),
    /// The reference does not hold whole tensors.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// Trains in a layout, one thread per rank, and returns the trace of each rank, in all processes of the cluster.
/// `build` makes a stage of a model of size `dims`. Fails if the layout is illegal or a rank fails.
pub fn trace<M: CausalLm>(
    candidate: &Candidate,
    job: &Job,
    cluster: &Cluster,
    dims: &ModelDims,
    build: impl Fn(&Rank, Part) -> Result<M, BoxError> + Sync,
) -> Result<Vec<RankTrace>, TraceError> {
    let mesh = Mesh::new(candidate.layout.clone())?;
    let config = job.engine_in(candidate);
    let train = |rank: Rank| {
        let mut engine = RankEngine::new(&rank, dims, |part| build(&rank, part), config.clone())?;
        if let Some(routing) = &job.routing {
            engine = engine.with_routing(routing.clone());
        }
        let steps = job.batches.len();
        let mut trace = RankTrace {
            losses: Vec::with_capacity(steps),
            grad_norms: Vec::with_capacity(steps),
            gradients: Vec::with_capacity(steps),
            parameters: Vec::new(),
        };
        for batch in &job.batches {
            let report = engine.train_step(batch)?;
            trace.losses.push(report.loss);
            trace.grad_norms.push(report.grad_norm);
            trace.gradients.push(sections(&engine.gradients()));
        }
        trace.parameters = parameters(&mut engine);
        Ok(trace)
    };
    Ok(cluster.launch_all(&mesh, train)?)
}

/// The sections of some parameters with their parts of the values.
fn sections(params: &[(ParamSpec, Vec<f64>)]) -> Vec<LocalTensor> {
    let of = |(spec, values): &(ParamSpec, Vec<f64>)| {
        let sections = spec.sections_of(values);
        let local = |(section, values): (&Section, &[f64])| LocalTensor {
            section: section.clone(),
            unit: spec.unit,
            values: values.to_vec(),
        };
        sections.map(local).collect()
    };
    params.iter().flat_map::<Vec<_>, _>(of).collect()
}

/// The sections that a rank holds with the values of its parameters. All ranks call it together.
pub fn parameters<M: CausalLm>(engine: &mut RankEngine<M>) -> Vec<LocalTensor> {
    sections(&engine.parameters())
}

/// The slices that `rank` holds as the first of all ranks with the same copies: over all ranks, the model once.
pub fn first_copies(mesh: &Mesh, rank: usize, locals: Vec<LocalTensor>) -> Vec<LocalTensor> {
    let is_first = |local: &LocalTensor| mesh.group_of(local.unit.grid().dp_ranks(), rank)[0] == rank;
    locals.into_iter().filter(is_first).collect()
}

/// Global tensors from the slices of the ranks that together hold the model once. Fails if a part of a tensor is
/// missing.
pub fn assemble<'a>(
    locals: impl IntoIterator<Item = &'a LocalTensor>,
) -> Result<BTreeMap<String, HostTensor>, RegistryError> {
    Registry::assemble(locals.into_iter().map(|local| (&local.section, local.values.as_slice())))
}
