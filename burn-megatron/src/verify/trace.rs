//! Trains a model in one layout and keeps everything that another layout must agree with.

use super::Candidate;
use crate::engine::{EngineConfig, RankEngine, TokenBatch};
use backend_dist::comm::RunError;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{LayoutError, Mesh};
use backend_dist::shard::{HostTensor, Registry, RegistryError, Section};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use models::CausalLm;
use std::collections::{BTreeMap, HashMap};

/// What every layout trains on: one global batch per step. `engine.micro_batch` is replaced by what the layout needs.
#[derive(Clone, Debug)]
pub struct Job {
    /// Optimizer, schedule, batch size.
    pub engine: EngineConfig,
    /// One global batch per step.
    pub batches: Vec<TokenBatch>,
}

/// A slice that a rank holds, with its values.
#[derive(Clone, Debug)]
pub struct LocalTensor {
    /// Of which global tensor, and which part.
    pub section: Section,
    /// Values, padding included.
    pub values: Vec<f64>,
}

/// Everything one rank has seen.
#[derive(Clone, Debug)]
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
    /// The reference does not hold whole tensors.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// Trains in a layout, one thread per rank, and returns what each rank has seen. Rank `r` owns
/// `devices[r % devices.len()]`; `build` makes a rank's model.
///
/// # Errors
/// If the layout is illegal or a rank fails.
pub fn trace<M: CausalLm>(
    candidate: &Candidate,
    job: &Job,
    devices: &[Device],
    build: impl Fn(&Rank) -> Result<M, BoxError> + Sync,
) -> Result<Vec<RankTrace>, TraceError> {
    let mesh = Mesh::new(candidate.layout.clone())?;
    let ranks_rows = job.engine.global_batch / candidate.layout.dp;
    let config = EngineConfig { micro_batch: (ranks_rows / candidate.accumulation).max(1), ..job.engine.clone() };
    let traces = launch(&mesh, devices, |rank| {
        let mut engine = RankEngine::new(&rank, build(&rank)?, config.clone())?;
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
            trace.gradients.push(sections(engine.registry(), &engine.gradients()));
        }
        trace.parameters = parameters(engine.model(), engine.registry());
        Ok(trace)
    })?;
    Ok(traces)
}

/// The sections of a rank with their parts of its flat values.
fn sections(registry: &Registry, flat: &[f64]) -> Vec<LocalTensor> {
    let mut rest = flat;
    let mut list = Vec::new();
    for section in registry.sections() {
        let (values, tail) = rest.split_at(section.local_len());
        list.push(LocalTensor { section: section.clone(), values: values.to_vec() });
        rest = tail;
    }
    list
}

/// The sections of a rank with the values of its parameters.
pub fn parameters<M: Module>(model: &M, registry: &Registry) -> Vec<LocalTensor> {
    struct Values(HashMap<u64, Vec<f64>>);

    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.insert(param.id.val(), param.val().inner().into_data().iter::<f64>().collect());
        }
    }

    let mut values = Values(HashMap::new());
    model.visit(&mut values);
    let flat: Vec<f64> = registry.iter().flat_map(|spec| values.0.remove(&spec.id).unwrap_or_default()).collect();
    sections(registry, &flat)
}

/// Global tensors from the slices of the ranks that together hold the model once.
///
/// # Errors
/// If a part of a tensor is missing.
pub fn assemble<'a>(
    locals: impl IntoIterator<Item = &'a LocalTensor>,
) -> Result<BTreeMap<String, HostTensor>, RegistryError> {
    Registry::assemble(locals.into_iter().map(|local| (&local.section, local.values.as_slice())))
}
