//! Which activations are dropped in the forward pass and recomputed in the backward pass, as Megatron-LM's
//! `--recompute-granularity`, `--recompute-method`, `--recompute-num-layers` and `--recompute-modules`.

use serde::{Deserialize, Serialize};

/// How much is recomputed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Granularity {
    /// Nothing.
    #[default]
    None,
    /// The outputs of some modules of every layer.
    Selective,
    /// Whole layers, from their inputs.
    Full,
}

/// Which layers full recomputation recomputes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// All layers, a number of them at a time: only the input of each unit is saved.
    #[default]
    Uniform,
    /// The first layers of each stage, one at a time; the activations of the others are saved.
    Block,
}

/// A part of a layer whose output is cheap to recompute for the memory it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Module {
    /// Attention between the projections: the attention output, and its softmax statistics.
    #[serde(alias = "core_attn", alias = "core-attn")]
    CoreAttention,
    /// The activation function of the MLP.
    MlpActivation,
    /// The norms before attention and MLP.
    #[serde(alias = "layernorm")]
    Norms,
}

/// What is recomputed in the backward pass. The default is nothing.
///
/// ```
/// use layouts::recompute::{Module, Recompute};
///
/// let recompute = Recompute::selective(&[Module::CoreAttention, Module::Norms]);
/// assert!(recompute.selects(Module::Norms) && !recompute.selects(Module::MlpActivation));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Recompute {
    /// How much.
    pub granularity: Granularity,
    /// Which layers, of [`Granularity::Full`].
    pub method: Method,
    /// Layers per unit under [`Method::Uniform`], layers of each stage under [`Method::Block`].
    pub num_layers: usize,
    /// [`Granularity::Full`] saves the attention outputs and their softmax statistics: as much memory again as the
    /// layer's input, and no second computation of the most expensive part of long sequences.
    pub keep_attention: bool,
    /// The inputs of recomputed layers wait for the backward pass in host memory, as DeepSpeed's `cpu_checkpointing`.
    pub cpu_offload: bool,
    /// Which modules, of [`Granularity::Selective`].
    pub modules: Vec<Module>,
}

impl Default for Recompute {
    fn default() -> Self {
        Self {
            granularity: Granularity::None,
            method: Method::Uniform,
            num_layers: 1,
            keep_attention: false,
            cpu_offload: false,
            modules: vec![Module::CoreAttention],
        }
    }
}

impl Recompute {
    /// Full recomputation of every layer.
    pub fn full() -> Self {
        Self { granularity: Granularity::Full, ..Self::default() }
    }

    /// Selective recomputation of these modules.
    pub fn selective(modules: &[Module]) -> Self {
        Self { granularity: Granularity::Selective, modules: modules.to_vec(), ..Self::default() }
    }

    /// Whether the layers drop this module's output.
    pub fn selects(&self, module: Module) -> bool {
        self.granularity == Granularity::Selective && self.modules.contains(&module)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_count_only_under_selective_granularity() {
        let all = [Module::CoreAttention, Module::MlpActivation, Module::Norms];
        assert!(all.iter().all(|module| !Recompute::default().selects(*module)));
        let full = Recompute { granularity: Granularity::Full, ..Recompute::selective(&all) };
        assert!(all.iter().all(|module| !full.selects(*module)));
        let selected = all.map(|module| Recompute::selective(&[Module::Norms]).selects(module));
        assert_eq!(selected, [false, false, true]);
    }

    #[test]
    fn names_as_in_a_configuration() {
        let read = |text| serde_json::from_str::<Recompute>(text);
        let found = read(r#"{"granularity": "selective", "modules": ["core-attention", "mlp-activation", "norms"]}"#);
        let all = [Module::CoreAttention, Module::MlpActivation, Module::Norms];
        assert_eq!(found.unwrap(), Recompute::selective(&all));
        assert_eq!(read("{}").unwrap(), Recompute::default());
        assert!(read(r#"{"layers": 2}"#).unwrap_err().to_string().contains("unknown field `layers`"));
    }
}
