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
mod pattern;
mod plan;
mod prologue;
mod share;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::names::{Foreign, HostTensors, NameMap, is_router};
pub use base::BaseFormat;
pub(crate) use base::Quantizer;
pub use error::LoraError;
pub(crate) use experts::ExpertAdapters;
pub(crate) use layers::{ColumnAdapters, RowAdapter};
pub use module::{LowRank, adapter_gradients, explained, linear_names, module_adapter, with_adapters};
pub use off::without_adapters;
pub(crate) use plan::LayerAdapter;
pub use plan::LoraPlan;
use plan::Target;
pub(crate) use prologue::apply;
pub use share::with_weights_of;

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
    /// Magnitude and direction of the weight are apart.
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
    /// If rank or scale are not positive, or a name is none of a linear layer that can have an adapter.
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
                if let Some(why) = layer.refused() {
                    let module = layer.theirs.to_string();
                    let can_some = linear.iter().any(|layer| in_all(layer.theirs) && layer.refused().is_none());
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
        let mut of_experts = BTreeMap::new();
        for layer in targets.values() {
            let Some((of_layer, _)) = of_expert(layer.ours) else { continue };
            let first: &mut (usize, f64) = of_experts.entry(of_layer).or_insert(of(layer.theirs));
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
    fn refused(&self) -> Option<&'static str> {
        match () {
            _ if self.theirs == "lm_head" => Some("it is the output layer, where adapters are not implemented"),
            _ if is_router(self.theirs) => Some("it is a router"),
            _ if self.foreign.stack.is_some() => Some("Hugging Face stores the experts of a layer as one tensor"),
            _ if self.foreign.transposed => Some("Hugging Face stores its transpose (Conv1D)"),
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
        let some = layers.iter().filter(|layer| !can || layer.refused().is_none());
        some.filter_map(|layer| layer.theirs.rsplit('.').next()).collect::<BTreeSet<_>>()
    };
    let names = Some(of(true)).filter(|names| !names.is_empty()).unwrap_or_else(|| of(false));
    names.into_iter().collect::<Vec<_>>().join(", ")
}

/// Hugging Face's names of all linear layers of a model with these names.
pub fn modules(names: &NameMap) -> BTreeSet<&str> {
    linear_layers(names).into_iter().map(|layer| layer.theirs).collect()
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
mod tests {
    use super::*;
    use crate::{
        DeepSeekV3Config, FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, MixtralConfig, MixtralVariant,
        ModelConfig,
    };

    fn of(targets: &[&str], names: &NameMap) -> Result<LoraPlan, LoraError> {
        let target_modules = targets.iter().map(|target| target.to_string()).collect();
        LoraConfig { target_modules, ..LoraConfig::default() }.plan(names)
    }

    #[test]
    fn layers_are_chosen_by_pefts_names() {
        let llama = LlamaConfig::tiny();
        let layers = llama.num_hidden_layers;
        assert_eq!(of(&[ALL_LINEAR], &llama.hf_names()).unwrap().len(), 7 * layers);
        assert_eq!(of(&["model.layers.1.self_attn.q_proj"], &llama.hf_names()).unwrap().len(), 1);
        let plan = of(&["down_proj"], &llama.hf_names()).unwrap();
        assert!(plan.has("layers.0.mlp.down_proj") && !plan.has("layers.0.mlp.up_proj"));
        let file = plan.names("base_model.model.");
        let a = file.get("layers.0.mlp.down_proj.lora_A.weight").unwrap();
        assert_eq!(a.name, "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight");
        assert_eq!(a.shape, [8, llama.intermediate_size]);
        // Experts are not among all linear layers, but have names.
        let (mixtral, names) = (MixtralConfig::tiny(), MixtralConfig::tiny().hf_names());
        assert!(of(&[ALL_LINEAR], &names).unwrap().targets().all(|(ours, ..)| ours.contains(".attention.")));
        let (layers, experts) = (mixtral.num_hidden_layers, mixtral.num_experts);
        assert_eq!(of(&["w2", "w3"], &names).unwrap().len(), 2 * layers * experts);
        assert_eq!(of(&["layers.0.*.experts.*"], &names).unwrap().len(), 3 * experts);
        let theirs = of(&["experts.*.w1"], &names).unwrap().names("base_model.model.");
        let a = theirs.get("layers.1.mlp.experts.2.gate_proj.lora_A.weight").unwrap();
        assert_eq!(a.name, "base_model.model.model.layers.1.block_sparse_moe.experts.2.w1.lora_A.weight");
    }

    #[test]
    fn layers_that_a_file_fuses_have_one_a_and_their_rows_of_b() {
        let config = LlamaConfig { variant: LlamaVariant::Phi3, ..LlamaConfig::tiny() };
        let plan = of(&[ALL_LINEAR], &config.hf_names()).unwrap();
        assert_eq!(plan.len(), 4 * config.num_hidden_layers);
        assert!(plan.modules().contains_key("model.layers.0.self_attn.qkv_proj"));
        let names = plan.names("base_model.model.");
        let (queries, keys) = (config.hidden_size, config.num_key_value_heads * config.head_dim);
        let b = names.get("layers.0.attention.k_proj.lora_B.weight").unwrap();
        assert_eq!(b.name, "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight");
        assert_eq!((&b.rows, &b.shape), (&Some(vec![queries..queries + keys]), &vec![queries + 2 * keys, 8]));
        assert!(names.get("layers.0.attention.k_proj.lora_A.weight").is_none());
        let a = names.get("layers.0.attention.qkv_proj.lora_A.weight").unwrap();
        assert_eq!((&a.rows, &a.shape), (&None, &vec![8, config.hidden_size]));
        // The matrix rows of a whole module in another order.
        let glm = LlamaConfig { variant: LlamaVariant::Glm4, ..LlamaConfig::tiny() };
        let names = of(&["q_proj", "gate_up_proj"], &glm.hf_names()).unwrap().names("");
        assert!(names.get("layers.0.attention.q_proj.lora_A.weight").unwrap().rows.is_none());
        let b = names.get("layers.0.attention.q_proj.lora_B.weight").unwrap();
        assert_eq!(b.rows.as_ref().map(|rows| rows[1].start), Some(2));
    }

    #[test]
    fn what_cannot_have_an_adapter_is_refused() {
        let names = LlamaConfig::tiny().hf_names();
        let refused = |targets: &[&str], names: &NameMap| of(targets, names).unwrap_err().to_string();
        let said = refused(&["q_prj"], &names);
        assert!(said.contains("no linear layer `q_prj`") && said.contains("q_proj"), "{said}");
        assert!(refused(&["lm_head"], &names).contains("the output layer"));
        let gpt = FamilyConfig::Gpt(GptConfig::tiny()).hf_names();
        assert!(refused(&[ALL_LINEAR], &gpt).contains("adapters of `transformer.h.0.attn.c_attn` are not supported"));
        let said = refused(&[ALL_LINEAR], &DeepSeekV3Config::tiny().hf_names());
        assert!(said.contains("; name those that can: down_proj, gate_proj, kv_b_proj, o_proj, q_b_proj"), "{said}");
        let experts = MixtralConfig::tiny().hf_names();
        let said = refused(&["experts.0.w1"], &experts);
        assert!(
            said.contains("experts.1.w1` are not supported: the experts of a layer have adapters all or none"),
            "{said}"
        );
        let stacked = MixtralConfig { variant: MixtralVariant::GptOss, ..MixtralConfig::tiny() }.hf_names();
        assert!(refused(&["down_proj"], &stacked).contains("Hugging Face stores the experts of a layer as one tensor"));
        assert!(of(&[ALL_LINEAR], &stacked).unwrap().targets().all(|(ours, ..)| ours.contains(".attention.")));
        let none = LoraConfig { rank: 0, ..LoraConfig::default() }.plan(&names).unwrap_err();
        assert_eq!(none.to_string(), "r = 0 is not at least 1");
    }

    #[test]
    fn modules_have_ranks_and_scales_of_their_own() {
        let (rank, alpha) = (|pattern: &str, rank| (pattern.to_string(), rank), |pattern: &str| (pattern.into(), 3.0));
        let config = |rank_pattern: Vec<(String, usize)>, alpha_pattern: Vec<(String, f64)>| {
            let (rank_pattern, alpha_pattern) =
                (rank_pattern.into_iter().collect(), alpha_pattern.into_iter().collect());
            let target_modules = vec!["q_proj".into(), "o_proj".into()];
            LoraConfig { target_modules, rank_pattern, alpha_pattern, ..LoraConfig::default() }
        };
        let names = LlamaConfig::tiny().hf_names();
        let plan = config(vec![rank("layers.1.*.q_proj", 4)], vec![alpha("o_proj")]).plan(&names).unwrap();
        let of = |module: &str| plan.modules()[format!("model.layers.{module}").as_str()];
        assert_eq!(of("0.self_attn.q_proj"), (8, 16.0));
        assert_eq!((of("1.self_attn.q_proj"), of("1.self_attn.o_proj")), ((4, 16.0), (8, 3.0)));
        assert_eq!(plan.of_layer("layers.1.attention.q_proj").unwrap().scale, 4.0);
        assert_eq!(plan.names("").get("layers.1.attention.q_proj.lora_B.weight").unwrap().shape[1], 4);
        let refused = |ranks| config(ranks, vec![]).plan(&names).unwrap_err().to_string();
        let said = refused(vec![rank("v_proj", 4)]);
        assert_eq!(said, "rank_pattern: no module with an adapter is called `v_proj`; these are o_proj, q_proj");
        let said = refused(vec![rank("q_proj", 4), rank("layers.0.*", 2)]);
        assert!(said.contains("`layers.0.*` and `q_proj` both fit `model.layers.0.self_attn.q_proj`"), "{said}");
        assert_eq!(refused(vec![rank("q_proj", 0)]), "rank_pattern = 0 is not at least 1");
        let one_of = [("experts.0.w1".to_string(), 4)].into();
        let experts =
            LoraConfig { target_modules: vec!["experts.*".into()], rank_pattern: one_of, ..LoraConfig::default() };
        let said = experts.plan(&MixtralConfig::tiny().hf_names()).unwrap_err().to_string();
        let expected =
            "rank_pattern: the experts of a layer have adapters of one rank and scale, gate and up and down, but";
        assert!(said.starts_with(expected), "{said}");
    }

    #[test]
    fn scales_are_those_of_the_papers() {
        let (plain, rs) = (LoraConfig::default(), LoraConfig { rslora: true, ..LoraConfig::default() });
        assert_eq!((plain.scale(16, 8.0), rs.scale(16, 8.0)), (0.5, 2.0));
    }
}
