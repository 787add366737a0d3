//! The states of AdamW in checkpoints of PyTorch and Megatron-Core: its moments, fp32 weights, and what a run needs to know
//! to continue.

mod megatron;
pub(super) mod recipe;
mod settings;
mod torch;
pub(super) mod writer;

use std::path::Path;

use serde_json::Value;

use self::torch::Prefixes;
use super::distributed;
use super::error::HfFolderError;
use super::folder::HfFolder;
use crate::checkpoint::Kind;
use crate::dcp::{DcpFolder, DcpObjects, METADATA};

/// Names of AdamW's moments.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];
/// Megatron-Core's names of the optimizer's own weights.
const MASTERS: [&str; 2] = ["param", "fp32_param"];

/// The states of an optimizer next to a model's weights.
#[derive(Debug)]
pub struct OptimizerStates {
    /// Each kind as a model of such weights.
    kinds: Vec<(Kind, HfFolder)>,
    recorded: Recorded,
}

/// What a run has counted, and what it was told.
#[derive(Debug, Default)]
struct Recorded {
    step: u64,
    updates: u64,
    consumed: Option<u64>,
    /// Samples of steps without an update.
    skipped: u64,
    /// Sections of a run's configuration.
    config: Value,
    /// What the configuration cannot say.
    notes: Vec<String>,
}

impl OptimizerStates {
    /// The states in the folder from which the weights of `model` were opened, if there are any. `consumed` are the samples
    /// that the run had consumed, if its checkpoint does not say.
    ///
    /// # Errors
    /// If they are those of another optimizer than AdamW, are sharded in a way that cannot be read, or are damaged; the
    /// message names the key.
    pub fn read(model: &HfFolder, weights: &Path, consumed: Option<u64>) -> Result<Option<Self>, HfFolderError> {
        if !DcpFolder::is_one(weights) {
            let what = format!("has no {METADATA}: moments come from DCP folders of PyTorch and Megatron-Core");
            return Err(HfFolderError::file(weights, what));
        }
        let objects = DcpObjects::open(weights)?;
        let found = match model.is_megatron() {
            true => megatron::states(&objects).map(|are_there| are_there.then(Prefixes::default)),
            false => torch::states(&objects.names, &distributed::hf_names(model.config())),
        };
        let Some(prefixes) = found.map_err(|what| HfFolderError::file(weights, what))? else { return Ok(None) };
        let (first, without) = model.states(weights, MOMENTS[0])?;
        let (second, other) = model.states(weights, MOMENTS[1])?;
        if let Some(name) =
            without.iter().find(|name| !other.contains(name)).or(other.iter().find(|name| !without.contains(name)))
        {
            let what = format!("has one moment; AdamW has {} and {}", MOMENTS[0], MOMENTS[1]);
            return Err(HfFolderError::tensor(weights, name, what));
        }
        let mut recorded = match model.is_megatron() {
            true => megatron::recorded(&weights.join("common.pt"), &objects)?,
            false => torch::recorded(&objects, &prefixes, model).map_err(|what| HfFolderError::file(weights, what))?,
        };
        recorded.consumed = recorded.consumed.or(consumed);
        if recorded.consumed.is_none() {
            let what = format!(
                "does not say how many samples its run had consumed: give --consumed-samples, for {} steps of the same \
                 global batch {0} times that",
                recorded.step
            );
            return Err(HfFolderError::file(weights, what));
        }
        // The bias that balances experts follows their loads; no optimizer has moments of it.
        let is_weight = |name: &&String| !(model.is_megatron() && name.ends_with(".router.expert_bias"));
        let without: Vec<&String> = without.iter().filter(is_weight).collect();
        if let Some(name) = without.first() {
            let what =
                format!("no moments of {} tensors, the first of them {name}: they must be frozen", without.len());
            recorded.notes.push(what);
        }
        let mut kinds = vec![(Kind::FirstMoment, first), (Kind::SecondMoment, second)];
        if model.is_megatron() {
            for name in MASTERS {
                kinds.extend(model.more_precise(weights, name)?.map(|masters| (Kind::Master, masters)));
            }
        }
        Ok(Some(Self { kinds, recorded }))
    }

    /// Optimizer steps done.
    pub fn updates(&self) -> u64 {
        self.recorded.updates
    }

    /// Samples that the run had consumed.
    pub fn consumed(&self) -> u64 {
        self.recorded.consumed.unwrap_or(0)
    }

    /// What the user must know.
    pub fn notes(&self) -> &[String] {
        &self.recorded.notes
    }

    /// Sections of a run's configuration that a run which continues has to have.
    pub fn config(&self) -> &Value {
        &self.recorded.config
    }

    /// Steps done, those without an update included, and samples of these.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.recorded.step, self.recorded.skipped)
    }

    pub(super) fn kinds(&self) -> &[(Kind, HfFolder)] {
        &self.kinds
    }
}

/// The error of a state that AdamW does not have.
fn of_another_optimizer(key: &str) -> String {
    format!(
        "`{key}` is a state of another optimizer than AdamW, whose are exp_avg, exp_avg_sq and step; import the weights alone"
    )
}
