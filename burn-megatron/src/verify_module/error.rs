//! What a proof says.

use std::fmt;

use backend_dist::mesh::ParallelLayout;
use burn::tensor::{DType, FloatDType};
use thiserror::Error;

use crate::verify::{Line, Worst};

/// How far every layout is from one device. Displayed, it is a table.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// /// The largest relative difference of all layouts.
/// fn largest(report: &ModuleReport) -> f64 {
///     report.worst().map(|(_, worst)| worst.relative).fold(0.0, f64::max)
/// }
/// ```
#[derive(Clone, Debug)]
pub struct ModuleReport {
    /// One for each layout.
    pub lines: Vec<Line>,
}

impl ModuleReport {
    /// The worst difference of each layout that ran to the end, and where it is.
    pub fn worst(&self) -> impl Iterator<Item = (&ParallelLayout, &Worst)> {
        self.lines.iter().filter_map(|line| Some((&line.candidate.layout, line.outcome.as_ref().ok()?.worst())))
    }
}

impl fmt::Display for ModuleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Line::heading())?;
        self.lines.iter().try_for_each(|line| write!(f, "\n{line}"))
    }
}

/// Why there is no proof.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// fn advice(error: &ModuleError) -> String {
///     match error {
///         ModuleError::Different(report) => format!("a layout computes something else:\n{report}"),
///         other => other.to_string(),
///     }
/// }
/// ```
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ModuleError {
    /// At least one layout does not train like one device.
    #[error("{}\n{}", different(.0), .0)]
    Different(ModuleReport),
    /// A layout that is not for any module, with the nearest that is.
    #[error("{0}. `burn-megatron verify` proves the others for this crate's own models")]
    Layout(String),
    /// What only a model of stages has.
    #[error("Proof's micro_batches, schedule and recompute need a model that implements `Stages`: verify_stages_as")]
    Stages,
    /// A device's floats are not `f64` where nothing else is said.
    #[error(
        "floats on {device} are {float:?} in this process{}: verify_module must come before the first tensor; a file under \
         tests/ is a process of its own", because(.why)
    )]
    Precision { device: String, float: FloatDType, why: Option<String> },
    /// A parameter that is not `f64`.
    #[error("parameter {path} is {dtype:?}: layouts are compared in F64; make it with the float type of its device")]
    Parameter { path: String, dtype: DType },
}

fn because(why: &Option<String>) -> String {
    why.as_ref().map_or(String::new(), |why| format!(" ({why})"))
}

/// Which layout fails by most, and where.
fn different(report: &ModuleReport) -> String {
    let failed: Vec<&Line> = report.lines.iter().filter(|line| !line.passes()).collect();
    let share = |line: &Line| line.outcome.as_ref().map_or(f64::INFINITY, |found| found.worst().share());
    let rank = |line: &Line| if share(line).is_nan() { f64::INFINITY } else { share(line) };
    let Some(worst) = failed.iter().max_by(|a, b| rank(a).total_cmp(&rank(b))) else { return String::new() };
    let why = match &worst.outcome {
        Ok(found) => {
            let Worst { relative, allowed, at } = found.worst();
            format!("{at} differs by {relative:.1e} of its norm, allowed {allowed:.1e}")
        }
        Err(why) => why.clone(),
    };
    let (count, all) = (failed.len(), report.lines.len());
    format!("{count} of {all} layouts do not train like one device; worst: {}: {why}", worst.candidate.layout)
}
