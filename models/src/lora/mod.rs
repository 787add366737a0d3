//! Low-rank adapters of linear layers (Hu et al., "LoRA", 2021), with peft's names, scales and initial values.
//!
//! The weight `W [out, in]` of a linear layer stays as it is. Two small matrices, `A [r, in]` and `B [out, r]`, are
//! trained in its place: `y = x Wᵀ + s (x Aᵀ) Bᵀ`. [`LoraConfig`] says which layers have adapters; [`LoraPlan`] is that
//! for one model, and a [`ParamBuilder`](crate::ParamBuilder) that has one freezes everything else.
//!
//! | | scale `s` | output |
//! |---|---|---|
//! | LoRA | `alpha / r` | `x Wᵀ + s (x Aᵀ) Bᵀ` |
//! | rsLoRA (Kalajdzievski, 2023) | `alpha / √r` | the same |
//! | DoRA (Liu et al., 2024) | as LoRA | `m / ‖W + s B A‖ · (x Wᵀ + s (x Aᵀ) Bᵀ)`, the norm of each matrix row without gradient |

mod base;
mod blocks;
mod error;
mod experts;
mod layers;
mod module;
mod norms;
mod off;
mod parameters;
mod pattern;
mod plan;
mod prologue;
mod row;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::names::{Foreign, HostTensors, NameMap, is_router};
pub use base::BaseFormat;
pub(crate) use base::Quantizer;
pub use error::LoraError;
pub(crate) use experts::ExpertAdapters;
pub(crate) use layers::ColumnAdapters;
pub use module::{LowRank, adapter_gradients, explained, linear_names, module_adapter, with_adapters};
pub use off::without_adapters;
pub use parameters::EXPERT_PARAMETERS;
use parameters::place_of;
pub(crate) use plan::LayerAdapter;
pub use plan::LoraPlan;
use plan::Target;
pub(crate) use prologue::apply;
pub(crate) use row::RowAdapter;

/// The word for all linear layers but the output layer, routers and routed experts.
pub const ALL_LINEAR: &str = "all-linear";

/// Which linear layers have adapters, and of what kind.
///
/// ```
/// use models::lora::LoraConfig;
/// use models::{LlamaConfig, ModelConfig};
///
/// let config = LoraConfig { target_modules: vec!["q_proj".into(), "v_proj".into()], ..LoraConfig::default() };
/// let plan = config.plan(&LlamaConfig::tiny().hf_names())?;
/// assert_eq!(plan.len(), 2 * LlamaConfig::tiny().num_hidden_layers);
/// # Ok::<(), models::lora::LoraError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LoraConfig {
    /// The rank r.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Hugging Face's names of modules, whole or their last parts, such as `q_proj`, in which `*` stands for any
    /// characters; or [`ALL_LINEAR`], which is all but the output layer, routers and routed experts.
    pub target_modules: Vec<String>,
    /// The scale is `alpha / √r`.
    pub rslora: bool,
    /// Magnitude and direction of the weight are apart. Not for experts that are one tensor, of which peft has none.
    pub dora: bool,
    /// Other ranks, by names of modules as in [`target_modules`](Self::target_modules).
    #[serde(default)]
    pub rank_pattern: BTreeMap<String, usize>,
    /// Other numerators of the scale, by names of modules.
    #[serde(default)]
    pub alpha_pattern: BTreeMap<String, f64>,
}

/// Rank 8 and a scale of 2 on all linear layers.
impl Default for LoraConfig {
    fn default() -> Self {
        let (rank_pattern, alpha_pattern) = (BTreeMap::new(), BTreeMap::new());
        let target_modules = vec![ALL_LINEAR.into()];
        Self { rank: 8, alpha: 16.0, target_modules, rslora: false, dora: false, rank_pattern, alpha_pattern }
    }
}

impl LoraConfig {
    /// The factor of the outputs of adapters of this rank and numerator.
    pub fn scale(&self, rank: usize, alpha: f64) -> f64 {
        let rank = rank as f64;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// The adapters of a model with these names.
    ///
    /// # Errors
    /// If rank or scale are not positive, a rank exceeds both sides of a matrix, or a name is none of a linear layer that can
    /// have an adapter.
    pub fn plan(&self, names: &NameMap) -> Result<LoraPlan, LoraError> {
        for (key, rank) in self.rank_pattern.values().map(|rank| ("rank_pattern", rank)).chain([("r", &self.rank)]) {
            if *rank == 0 {
                return Err(LoraError::Value { key, value: "0".into(), legal: "at least 1" });
            }
        }
        let alphas = self.alpha_pattern.values().map(|alpha| ("alpha_pattern", alpha));
        for (key, alpha) in alphas.chain([("lora_alpha", &self.alpha)]) {
            if !(alpha.is_finite() && *alpha > 0.0) {
                return Err(LoraError::Value { key, value: alpha.to_string(), legal: "above 0" });
            }
        }
        if self.target_modules.is_empty() {
            return Err(LoraError::Empty);
        }
        let linear = linear_layers(names);
        let mut targets = BTreeMap::new();
        for target in &self.target_modules {
            let all = target == ALL_LINEAR;
            // A router is no linear layer to peft, nor are experts where transformers 5 has them as one tensor.
            let is_output = |theirs: &str| theirs == "lm_head" || theirs.ends_with(".lm_head");
            let in_all = |theirs: &str| !theirs.contains(".experts.") && !is_router(theirs) && !is_output(theirs);
            let chosen: Vec<&Linear> = linear
                .iter()
                .filter(|layer| if all { in_all(layer.theirs) } else { pattern::names(target, layer.theirs) })
                .collect();
            if chosen.is_empty() {
                let known = last_parts(&linear);
                return Err(LoraError::Target { target: target.clone(), known });
            }
            for layer in chosen {
                if let Some(why) = layer.refused(self.dora) {
                    let module = layer.theirs.to_string();
                    let can_some =
                        linear.iter().any(|layer| in_all(layer.theirs) && layer.refused(self.dora).is_none());
                    return Err(match all && can_some {
                        true => LoraError::AllLinear { module, why, others: last_parts(&linear) },
                        false => LoraError::Unsupported { module, why },
                    });
                }
                targets.insert(layer.ours, layer);
            }
        }
        let together: BTreeSet<(&str, &str)> = targets.keys().filter_map(|ours| of_expert(ours)).collect();
        let alone = |layer: &&Linear| !targets.contains_key(layer.ours);
        let left_out = |layer: &&Linear| of_expert(layer.ours).is_some_and(|of| together.contains(&of));
        if let Some(layer) = linear.iter().filter(alone).find(left_out) {
            let why = "the experts of a layer have adapters all or none, and it would be left out";
            return Err(LoraError::Unsupported { module: layer.theirs.into(), why });
        }
        let modules = targets.values().map(|layer| layer.theirs).collect();
        let ranks = pattern::of_modules("rank_pattern", &self.rank_pattern, &modules)?;
        let alphas = pattern::of_modules("alpha_pattern", &self.alpha_pattern, &modules)?;
        let of = |theirs: &str| (*ranks.get(theirs).unwrap_or(&self.rank), *alphas.get(theirs).unwrap_or(&self.alpha));
        if let Some(layer) = targets.values().find(|layer| layer.shape.iter().all(|side| *side < of(layer.theirs).0)) {
            let (module, key) =
                (layer.theirs.to_string(), if ranks.contains_key(layer.theirs) { "rank_pattern" } else { "r" });
            return Err(LoraError::Rank { key, rank: of(layer.theirs).0, module, shape: layer.shape });
        }
        let mut of_experts = BTreeMap::new();
        for layer in targets.values() {
            // Gate and up read one input together.
            let Some((of_layer, matrix)) = of_expert(layer.ours) else { continue };
            let place = (of_layer, matrix.starts_with("down"));
            let first: &mut (usize, f64) = of_experts.entry(place).or_insert(of(layer.theirs));
            if *first != of(layer.theirs) {
                let key = if first.0 == of(layer.theirs).0 { "alpha_pattern" } else { "rank_pattern" };
                return Err(LoraError::Experts { key, module: layer.theirs.into() });
            }
        }
        let target = |layer: &Linear| Target::new(layer.ours, layer.theirs, layer.foreign, of(layer.theirs));
        let targets = targets.into_iter().map(|(ours, layer)| (ours.to_string(), target(layer))).collect();
        Ok(LoraPlan::new(self.clone(), targets))
    }
}

/// Of our name of a routed expert's matrix: its layer and its place in an expert.
fn of_expert(ours: &str) -> Option<(&str, &str)> {
    let (layer, rest) = ours.split_once(".experts.")?;
    Some((layer, rest.split_once('.')?.1))
}

/// A matrix that a model multiplies activations with.
struct Linear<'a> {
    ours: &'a str,
    theirs: &'a str,
    shape: [usize; 2],
    foreign: &'a Foreign,
}

impl Linear<'_> {
    fn refused(&self, dora: bool) -> Option<&'static str> {
        match () {
            _ if self.theirs == "lm_head" => Some("it is the output layer, where adapters are not implemented"),
            _ if is_router(self.theirs) => Some("it is a router"),
            _ if self.foreign.stack.is_some() && dora => Some("DoRA is not for experts that are one tensor"),
            _ if self.foreign.stack.is_some() && place_of(self.theirs).is_none() => {
                Some("experts that are one tensor have adapters of gate_up_proj and down_proj alone")
            }
            _ if self.foreign.transposed && self.foreign.stack.is_none() => {
                Some("Hugging Face stores its transpose (Conv1D)")
            }
            // `LatentAttention`'s down projections and multi-token prediction's.
            _ if ["q_a_proj", "kv_a_proj_with_mqa", "eh_proj"].iter().any(|end| self.ours.ends_with(end)) => {
                Some("it is whole on every rank, where adapters are not implemented")
            }
            _ => None,
        }
    }
}

/// The last parts of the names of those layers that can have an adapter, or else of all.
fn last_parts(layers: &[Linear]) -> String {
    let of = |can: bool| {
        let some = layers.iter().filter(|layer| !can || layer.refused(false).is_none());
        some.filter_map(|layer| layer.theirs.rsplit('.').next()).collect::<BTreeSet<_>>()
    };
    let names = Some(of(true)).filter(|names| !names.is_empty()).unwrap_or_else(|| of(false));
    names.into_iter().collect::<Vec<_>>().join(", ")
}

/// Hugging Face's names of all linear layers of a model with these names, without experts that are one tensor, which are no
/// modules.
pub fn modules(names: &NameMap) -> BTreeSet<&str> {
    let layers = linear_layers(names).into_iter();
    layers.filter(|layer| layer.foreign.stack.is_none()).map(|layer| layer.theirs).collect()
}

fn linear_layers(names: &NameMap) -> Vec<Linear<'_>> {
    let layer = |(ours, foreign)| -> Option<Linear<'_>> {
        let (ours, foreign): (&str, &Foreign) = (ours, foreign);
        let shape: [usize; 2] = foreign.our_shape().try_into().ok()?;
        let ours =
            ours.strip_suffix(".weight").filter(|name| !name.contains("embed") && !name.ends_with("positions"))?;
        // Experts that are one tensor are parameters without a module.
        let theirs = foreign.name.strip_suffix(".weight").or(foreign.stack.map(|_| &*foreign.name))?;
        Some(Linear { ours, theirs, shape, foreign })
    };
    names.iter().filter_map(layer).collect()
}

/// The adapters of a model with their values.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Which layers have one.
    pub plan: Arc<LoraPlan>,
    /// The tensors under our names.
    pub tensors: HostTensors,
}

#[cfg(test)]
mod tests;
