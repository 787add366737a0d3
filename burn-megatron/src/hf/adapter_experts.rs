//! Adapters of peft for experts that are one tensor in transformers' memory and one matrix each in files: transformers 5 has
//! Mixtral, Qwen's and other experts so, where peft adapts `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`
//! (`target_parameters`).
//!
//! An expert's gate and up then read one A. Here each has its own, which is the same at first, and the rows of B that are its
//! own.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use models::LoraConfig;
use models::lora::EXPERT_PARAMETERS;
use models::names::{HostTensors, NameError, NameMap};

use super::adapter_patterns::Patterns;

/// Our names of the parts of [`EXPERT_PARAMETERS`].
const PARTS: [&[&str]; EXPERT_PARAMETERS.len()] = [&["gate", "up"], &["down"]];

/// The experts of a layer.
#[derive(Debug, Default)]
struct Layer {
    experts: usize,
    /// By parameter, rank and numerator of the scale of its adapter.
    adapters: [Option<(usize, f64)>; 2],
    /// By parameter, the names of the modules of its parts in files, of expert 0, and their shapes `[out, in]`.
    modules: [Vec<(String, [usize; 2])>; 2],
}

/// The layers whose experts have adapters.
#[derive(Debug)]
pub(super) struct OneTensorExperts {
    layers: BTreeMap<usize, Layer>,
    /// All layers that have experts, with the same adapters.
    everywhere: bool,
}

impl OneTensorExperts {
    /// Those that `targets` name in a model with these names; what names others is left in `targets`.
    pub fn take(targets: &mut Vec<String>, config: &LoraConfig, patterns: &Patterns, names: &NameMap) -> Self {
        let mut layers: BTreeMap<usize, Layer> = BTreeMap::new();
        for (ours, foreign) in names.iter().filter(|(_, foreign)| foreign.stack.is_none()) {
            let module = foreign.name.strip_suffix(".weight").filter(|module| module.starts_with("model.layers."));
            let Some((module, (layer, expert, part))) = module.zip(matrix_of(ours)) else { continue };
            let Ok(shape) = foreign.our_shape().try_into() else { continue };
            let known = layers.entry(layer).or_default();
            known.experts = known.experts.max(expert + 1);
            let parameter = PARTS.iter().position(|parts| parts.contains(&part));
            if let Some(parameter) = parameter.filter(|_| expert == 0) {
                known.modules[parameter].push((module.to_string(), shape));
            }
        }
        targets.retain(|target| {
            let mut is_other = true;
            for (layer, of) in &mut layers {
                for (adapter, parameter) in of.adapters.iter_mut().zip(EXPERT_PARAMETERS) {
                    let name = format!("model.layers.{layer}.mlp.experts.{parameter}");
                    if name == *target || name.ends_with(&format!(".{target}")) {
                        let (rank, alpha) = patterns.own(&name);
                        *adapter = Some((rank.unwrap_or(config.rank), alpha.unwrap_or(config.alpha)));
                        is_other = false;
                    }
                }
            }
            is_other
        });
        let first = layers.values().next().map(|of| of.adapters);
        let everywhere = layers.values().all(|of| Some(of.adapters) == first);
        layers.retain(|_, of| of.adapters.iter().any(Option::is_some));
        Self { layers, everywhere }
    }

    /// The configuration with the modules of all experts, under the names of files.
    pub fn in_files(&self, mut config: LoraConfig) -> LoraConfig {
        for of in self.layers.values().take(if self.everywhere { 1 } else { usize::MAX }) {
            for (adapter, modules) in of.adapters.iter().zip(&of.modules) {
                let Some((rank, alpha)) = *adapter else { continue };
                for (module, _) in modules {
                    let all = of_expert(module, "*");
                    let all =
                        all.find("experts.").filter(|_| self.everywhere).map_or(&*all, |at| &all[at..]).to_string();
                    config.rank_pattern.extend((rank != config.rank).then(|| (all.clone(), rank)));
                    config.alpha_pattern.extend((alpha != config.alpha).then(|| (all.clone(), alpha)));
                    config.target_modules.push(all);
                }
            }
        }
        config
    }

    /// The tensors of a file whose names begin with `prefix`, with those of every expert under the names of its modules.
    ///
    /// # Errors
    /// If one is missing, or has another shape than the configuration and the model say.
    pub fn apart(&self, prefix: &str, mut theirs: HostTensors) -> Result<HostTensors, NameError> {
        for (layer, of) in &self.layers {
            for (at, (adapter, modules)) in of.adapters.iter().zip(&of.modules).enumerate() {
                let Some(((rank, _), &(_, [rows, input]))) = adapter.zip(modules.first()) else { continue };
                // The last parameter with an adapter has the module's name, the one before it is behind it.
                let behind = if at == 0 && of.adapters[1].is_some() { ".base_layer" } else { "" };
                let mut take = |part: &str| {
                    let name = format!("{prefix}model.layers.{layer}.mlp.experts{behind}.lora_{part}.weight");
                    theirs.remove(&name).map(|tensor| (name.clone(), tensor)).ok_or(NameError::Missing { name })
                };
                let ((a_name, a), (b_name, b)) = (take("A")?, take("B")?);
                let (narrow, out) = (rank * of.experts, rows * modules.len());
                for (name, found, expected) in [(a_name, &a, vec![narrow, input]), (b_name, &b, vec![out, narrow])] {
                    if found.shape != expected {
                        return Err(NameError::Shape { name, found: found.shape.clone(), expected });
                    }
                }
                for (expert, (part, (module, _))) in
                    (0..of.experts).flat_map(|expert| modules.iter().enumerate().map(move |part| (expert, part)))
                {
                    let own_a = a.data[expert * rank * input..][..rank * input].to_vec();
                    // In a row the experts are neighbours.
                    let element =
                        |at: usize| b.data[(part * rows + at / rank) * narrow + at % rank * of.experts + expert];
                    let own_b = (0..rows * rank).map(element).collect();
                    let module = of_expert(module, &expert.to_string());
                    let named = |part: &str| format!("{prefix}{module}.lora_{part}.weight");
                    theirs.insert(named("A"), HostTensor { shape: vec![rank, input], data: own_a });
                    theirs.insert(named("B"), HostTensor { shape: vec![rows, rank], data: own_b });
                }
            }
        }
        Ok(theirs)
    }
}

/// The name of a module of expert 0, for another.
fn of_expert(module: &str, expert: &str) -> String {
    module.replacen(".experts.0.", &format!(".experts.{expert}."), 1)
}

/// Layer, expert and place of the matrix that has this name of ours.
fn matrix_of(ours: &str) -> Option<(usize, usize, &str)> {
    let (layer, rest) = ours.strip_prefix("layers.")?.split_once(".mlp.experts.")?;
    let (expert, part) = rest.strip_suffix("_proj.weight")?.split_once('.')?;
    Some((layer.parse().ok()?, expert.parse().ok()?, part))
}
