//! The replay itself, and its table.

use super::files::FileError;
use super::oracle::{Oracle, OracleStep};
use super::recipe::{self, RecipeError};
use crate::batch::BatchError;
use crate::verify::{Candidate, Job, LocalTensor, RankTrace, TraceError, assemble, first_copies, trace, worst_of};
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::process::Cluster;
use backend_dist::shard::HostTensor;
use burn::tensor::FloatDType;
use models::layout::{ModelDims, ModelLayoutError};
use models::names::NameError;
use models::{CausalLm, ModelConfig, ParamBuilder, WithModel};
use std::collections::BTreeMap;
use std::fmt;

/// Why a run cannot be repeated.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A file is missing or damaged.
    #[error(transparent)]
    File(#[from] FileError),
    /// The run has something that does not run yet.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The recorded weights are not those of the recorded model.
    #[error(transparent)]
    Names(#[from] NameError),
    /// The model does not fit the layout.
    #[error(transparent)]
    Model(#[from] ModelLayoutError),
    /// The batch does not fit the layout.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A rank failed.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// The largest differences that pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerances {
    /// Relative, of a step's loss.
    pub loss: f64,
    /// Relative, of a step's gradient norm.
    pub grad_norm: f64,
    /// Of each tensor of the final weights, relative to its norm.
    pub weights: f64,
    /// Of each element of the final weights.
    pub elements: f64,
}

impl Tolerances {
    /// For a repetition in `dtype` of a run in fp32.
    ///
    /// In `f64` only the recorded run's rounding is left of the difference, the same in every layout. In `f32` ours
    /// comes on top, and AdamW divides small gradients by their own size, rounding included: an element whose gradient
    /// is nothing but rounding moves by the learning rate (1e-2) in either direction. In 16 bits a run follows the
    /// recorded one in its losses, no more.
    pub fn of(dtype: FloatDType) -> Self {
        match dtype {
            FloatDType::F64 => Self { loss: 2e-6, grad_norm: 1e-4, weights: 1e-4, elements: 1e-4 },
            FloatDType::F32 => Self { loss: 1e-5, grad_norm: 1e-3, weights: 5e-4, elements: 2e-2 },
            _ => Self { loss: 2e-2, grad_norm: f64::INFINITY, weights: f64::INFINITY, elements: f64::INFINITY },
        }
    }
}

/// One step compared with Megatron's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplayStep {
    /// Step, counted from 0.
    pub step: u64,
    /// Our loss and Megatron's.
    pub loss: [f64; 2],
    /// Our gradient norm and Megatron's.
    pub grad_norm: [f64; 2],
}

/// How far final weights are from Megatron's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightDifference {
    /// `max |a − b|` over all elements.
    pub element: f64,
    /// `‖a − b‖ / ‖b‖` of the worst tensor.
    pub tensor: f64,
}

/// A repeated run.
#[derive(Clone, Debug, PartialEq)]
pub struct Replay {
    /// Steps in order.
    pub steps: Vec<ReplayStep>,
    /// Final weights.
    pub weights: WeightDifference,
    /// The tolerances.
    pub tolerances: Tolerances,
}

fn relative([ours, theirs]: [f64; 2]) -> f64 {
    (ours - theirs).abs() / theirs.abs().max(f64::MIN_POSITIVE)
}

impl ReplayStep {
    fn passes(&self, limits: &Tolerances) -> bool {
        relative(self.loss) <= limits.loss && relative(self.grad_norm) <= limits.grad_norm
    }
}

impl Replay {
    /// Whether every step and the final weights are within the tolerances; a NaN is not.
    pub fn passes(&self) -> bool {
        let (WeightDifference { element, tensor }, limits) = (self.weights, self.tolerances);
        self.steps.iter().all(|step| step.passes(&limits)) && element <= limits.elements && tensor <= limits.weights
    }

    /// The largest relative differences of loss and gradient norm over all steps.
    pub fn worst(&self) -> (f64, f64) {
        let worst = |of: fn(&ReplayStep) -> [f64; 2]| worst_of(self.steps.iter().map(|step| relative(of(step))));
        (worst(|step| step.loss), worst(|step| step.grad_norm))
    }
}

impl Replay {
    /// The largest differences and the verdict in one line.
    pub fn line(&self) -> String {
        let ((loss, norm), WeightDifference { element, tensor }) = (self.worst(), self.weights);
        let verdict = if self.passes() { "equal" } else { "DIFFERENT" };
        format!(
            "loss {loss:.1e}, grad norm {norm:.1e}; final weights {element:.1e}, of a tensor's norm {tensor:.1e}: {verdict}"
        )
    }
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "step       loss   megatron  rel diff   grad norm   megatron  rel diff")?;
        for step in &self.steps {
            let ([loss, theirs], [norm, their_norm]) = (step.loss, step.grad_norm);
            let outside = if step.passes(&self.tolerances) { "" } else { "  OUTSIDE" };
            writeln!(
                f,
                "{:>4} {loss:>10.6} {theirs:>10.6}  {:>8.1e}  {norm:>10.6} {their_norm:>10.6}  {:>8.1e}{outside}",
                step.step,
                relative(step.loss),
                relative(step.grad_norm)
            )?;
        }
        let (loss, norm) = self.worst();
        let WeightDifference { element, tensor } = self.weights;
        writeln!(
            f,
            "largest: loss {loss:.1e}, grad norm {norm:.1e}; final weights {element:.1e}, of a tensor's norm {tensor:.1e}"
        )?;
        let Tolerances { loss, grad_norm, weights, elements } = self.tolerances;
        write!(
            f,
            "allowed: loss {loss:.0e}, grad norm {grad_norm:.0e}; final weights {elements:.0e}, of a tensor's norm {weights:.0e}: "
        )?;
        f.write_str(if self.passes() { "equal" } else { "DIFFERENT" })
    }
}

/// Trains the recorded model from its recorded weights on its recorded tokens over the ranks of `layout`; every process
/// of the cluster has the result. What passes depends on `dtype`: [`Tolerances::of`]. Fails if the recorded run or the
/// layout cannot be run; differences are in the result.
pub fn replay(
    oracle: &Oracle,
    layout: &ParallelLayout,
    dtype: FloatDType,
    cluster: &Cluster,
) -> Result<Replay, ReplayError> {
    let model = recipe::model(&oracle.model)?;
    let dims = model.dims();
    dims.check(layout, oracle.model.seq_length)?;
    let engine = recipe::engine(&oracle.training)?;
    let accumulation = engine.plan(layout.dp)?.accumulation;
    let (initial, last) =
        (model.megatron_names().import(&oracle.initial)?, model.megatron_names().import(&oracle.last)?);

    let candidate = Candidate { layout: layout.clone(), accumulation, ..Default::default() };
    let job = Job { engine, batches: oracle.batches.clone(), routing: None };
    let ranks =
        model.visit(Run { candidate: &candidate, job: &job, cluster, dims: &dims, dtype, initial: &initial })?;
    let ours = &ranks[0];
    let step = |(index, theirs): (usize, &OracleStep)| ReplayStep {
        step: theirs.step,
        loss: [ours.losses[index], theirs.loss],
        grad_norm: [ours.grad_norms[index], theirs.grad_norm],
    };
    let steps = oracle.steps.iter().enumerate().map(step).collect();
    let mesh = Mesh::new(layout.clone()).map_err(TraceError::from)?;
    let copies = |(rank, trace): (usize, &RankTrace)| first_copies(&mesh, rank, trace.parameters.clone());
    let once: Vec<LocalTensor> = ranks.iter().enumerate().flat_map(copies).collect();
    let weights = assemble(&once).map_err(TraceError::from)?;
    Ok(Replay { steps, weights: weight_difference(&weights, &last), tolerances: Tolerances::of(dtype) })
}

/// The recorded run with a model of whatever family.
struct Run<'a> {
    candidate: &'a Candidate,
    job: &'a Job,
    cluster: &'a Cluster,
    dims: &'a ModelDims,
    dtype: FloatDType,
    initial: &'a BTreeMap<String, HostTensor>,
}

impl WithModel for Run<'_> {
    type Output = Result<Vec<RankTrace>, TraceError>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let Self { candidate, job, cluster, dims, dtype, initial } = self;
        trace(candidate, job, cluster, dims, |rank, part| {
            Ok(M::build(config, ParamBuilder::new(rank, dtype, 0).with_part(part).with_source(initial))?)
        })
    }
}

fn weight_difference(ours: &BTreeMap<String, HostTensor>, theirs: &BTreeMap<String, HostTensor>) -> WeightDifference {
    let gaps = |name: &String| ours[name].data.iter().zip(&theirs[name].data).map(|(a, b)| (a - b).abs());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let tensor = |(name, tensor): (&String, &HostTensor)| {
        norm(&mut gaps(name)) / norm(&mut tensor.data.iter().copied()).max(f64::MIN_POSITIVE)
    };
    WeightDifference { element: worst_of(theirs.keys().flat_map(gaps)), tensor: worst_of(theirs.iter().map(tensor)) }
}
