//! The replay itself, and its table.

use super::files::FileError;
use super::oracle::{Oracle, OracleStep};
use super::recipe::{self, RecipeError};
use crate::batch::BatchError;
use crate::verify::{Candidate, Job, TraceError, assemble, trace, worst_of};
use backend_dist::mesh::ParallelLayout;
use backend_dist::shard::HostTensor;
use burn::tensor::FloatDType;
use models::layout::ModelLayoutError;
use models::llama::Llama;
use models::names::NameError;
use models::param::ParamBuilder;
use models::{CausalLm, ModelConfig};
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

/// The largest relative differences that pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerances {
    /// Of a step's loss.
    pub loss: f64,
    /// Of a step's gradient norm.
    pub grad_norm: f64,
    /// Of a final weight, relative to the largest element of its tensor.
    pub weights: f64,
}

impl Default for Tolerances {
    fn default() -> Self {
        Self { loss: 2e-6, grad_norm: 1e-4, weights: 1e-4 }
    }
}

/// One step beside Megatron's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplayStep {
    /// Step, counted from 0.
    pub step: u64,
    /// Our loss and Megatron's.
    pub loss: [f64; 2],
    /// Our gradient norm and Megatron's.
    pub grad_norm: [f64; 2],
}

/// A repeated run.
#[derive(Clone, Debug, PartialEq)]
pub struct Replay {
    /// Steps in order.
    pub steps: Vec<ReplayStep>,
    /// Largest relative difference of a final weight, and its name.
    pub weights: (f64, String),
    /// What passes.
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
        self.steps.iter().all(|step| step.passes(&self.tolerances)) && self.weights.0 <= self.tolerances.weights
    }

    /// The largest relative differences of loss and gradient norm over all steps.
    pub fn worst(&self) -> (f64, f64) {
        let worst = |of: fn(&ReplayStep) -> [f64; 2]| worst_of(self.steps.iter().map(|step| relative(of(step))));
        (worst(|step| step.loss), worst(|step| step.grad_norm))
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
        let (weights, name) = &self.weights;
        writeln!(f, "final weights: largest relative difference {weights:.1e} in {name}")?;
        let Tolerances { loss, grad_norm, weights } = self.tolerances;
        write!(f, "allowed: loss {loss:.0e}, grad norm {grad_norm:.0e}, weights {weights:.0e}: ")?;
        f.write_str(if self.passes() { "equal" } else { "DIFFERENT" })
    }
}

/// Trains the recorded model from its recorded weights on its recorded tokens, in fp32, over the ranks of `layout`.
///
/// # Errors
/// If the recorded run or the layout cannot be run; differences are in the result.
pub fn replay(oracle: &Oracle, layout: &ParallelLayout) -> Result<Replay, ReplayError> {
    let model = recipe::llama(&oracle.model)?;
    model.dims().check(layout, oracle.model.seq_length)?;
    let engine = recipe::engine(&oracle.training)?;
    let accumulation = engine.plan(layout.dp)?.accumulation;
    let (initial, last) =
        (model.megatron_names().import(&oracle.initial)?, model.megatron_names().import(&oracle.last)?);

    let candidate = Candidate { layout: layout.clone(), accumulation };
    let job = Job { engine, batches: oracle.batches.clone() };
    let ranks = trace(&candidate, &job, |rank| {
        Ok(Llama::build(&model, ParamBuilder::new(rank, if std::env::var("RF64").is_ok() { FloatDType::F64 } else { FloatDType::F32 }, 0).with_source(&initial))?)
    })?;
    let ours = &ranks[0];
    let step = |(index, theirs): (usize, &OracleStep)| ReplayStep {
        step: theirs.step,
        loss: [ours.losses[index], theirs.loss],
        grad_norm: [ours.grad_norms[index], theirs.grad_norm],
    };
    let steps = oracle.steps.iter().enumerate().map(step).collect();
    let weights = assemble(ranks.iter().take(layout.tp).flat_map(|rank| &rank.parameters)).map_err(TraceError::from)?;
    Ok(Replay { steps, weights: worst_weight(&weights, &last), tolerances: Tolerances::default() })
}

fn worst_weight(ours: &BTreeMap<String, HostTensor>, theirs: &BTreeMap<String, HostTensor>) -> (f64, String) {
    let difference = |(name, theirs): (&String, &HostTensor)| {
        let ours = &ours[name];
        let scale = theirs.data.iter().fold(f64::MIN_POSITIVE, |max, x| x.abs().max(max));
        (worst_of(ours.data.iter().zip(&theirs.data).map(|(a, b)| (a - b).abs() / scale)), name.clone())
    };
    let worse = |a: (f64, String), b: (f64, String)| if b.0 > a.0 || b.0.is_nan() { b } else { a };
    theirs.iter().map(difference).fold((0.0, "none".into()), worse)
}
