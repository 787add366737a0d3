//! What is kept of a model.

use models::layers::LayerPattern;
use models::{ConfigError, LlamaConfig, ModelConfig};
use thiserror::Error;

/// Sizes of the smaller model; what is `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Blocks.
    pub layers: Option<usize>,
    /// Width of the MLPs.
    pub intermediate: Option<usize>,
    /// Width of the residual stream.
    pub hidden: Option<usize>,
    /// Query heads. Those that share a key-value head are kept or removed together.
    pub heads: Option<usize>,
}

/// Why a model cannot be pruned to some sizes.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum PruneError {
    /// A size is not below the model's.
    #[error("--{key} {value} of {legal}; nearest legal: {nearest}")]
    Size { key: &'static str, value: usize, legal: String, nearest: usize },
    /// The smaller model is none.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// Larger is more important; values of one list compare with each other only.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Importance {
    /// By block: the loss on the calibration texts without it. Empty where no block is to go.
    pub layers: Vec<f64>,
    /// By feature of the residual stream: the squares of what attention and MLPs of all blocks read of it.
    pub hidden: Vec<f64>,
    /// By block and neuron: the squares of what the down projection reads.
    pub intermediate: Vec<Vec<f64>>,
    /// By block and key-value head: the squares of the outputs of the heads that share it.
    pub groups: Vec<Vec<f64>>,
}

/// What is kept, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Blocks.
    pub layers: Vec<usize>,
    /// Features of the residual stream.
    pub hidden: Vec<usize>,
    /// By block of the model that is pruned: neurons of the MLP.
    pub intermediate: Vec<Vec<usize>>,
    /// By block: key-value heads, with the query heads that share them.
    pub groups: Vec<Vec<usize>>,
}

impl Sizes {
    /// Whether a model has as much as this. The error names the flag, its value and the nearest legal one.
    pub fn check(&self, model: &LlamaConfig) -> Result<(), PruneError> {
        let group = model.num_attention_heads / model.num_key_value_heads;
        for (key, value, most, unit) in [
            ("layers", self.layers, model.num_hidden_layers, 1),
            ("intermediate", self.intermediate, model.intermediate_size, 1),
            ("hidden", self.hidden, model.hidden_size, 1),
            ("heads", self.heads, model.num_attention_heads, group),
        ] {
            let Some(value) = value else { continue };
            if value == 0 || value > most || !value.is_multiple_of(unit) {
                let legal = match unit {
                    1 => format!("the model's {most}"),
                    _ => format!("the model's {most}, of which {unit} share a key-value head"),
                };
                let nearest = value.next_multiple_of(unit).clamp(unit, most);
                return Err(PruneError::Size { key, value, legal, nearest });
            }
        }
        Ok(())
    }
}

impl Kept {
    /// All of a model.
    pub fn all(model: &LlamaConfig) -> Self {
        let by_layer = |size: usize| vec![(0..size).collect(); model.num_hidden_layers];
        Self {
            layers: (0..model.num_hidden_layers).collect(),
            hidden: (0..model.hidden_size).collect(),
            intermediate: by_layer(model.intermediate_size),
            groups: by_layer(model.num_key_value_heads),
        }
    }

    /// All but one block.
    pub fn without_layer(model: &LlamaConfig, layer: usize) -> Self {
        let mut all = Self::all(model);
        all.layers.retain(|kept| *kept != layer);
        all
    }

    /// As much of a model as `sizes` say: what is most important.
    pub fn most_important(model: &LlamaConfig, sizes: &Sizes, of: &Importance) -> Result<Self, PruneError> {
        sizes.check(model)?;
        let mut kept = Self::all(model);
        if let Some(layers) = sizes.layers.filter(|layers| *layers < model.num_hidden_layers) {
            kept.layers = largest(&of.layers, layers);
        }
        if let Some(hidden) = sizes.hidden {
            kept.hidden = largest(&of.hidden, hidden);
        }
        if let Some(intermediate) = sizes.intermediate {
            kept.intermediate = of.intermediate.iter().map(|values| largest(values, intermediate)).collect();
        }
        if let Some(heads) = sizes.heads {
            let groups = heads * model.num_key_value_heads / model.num_attention_heads;
            kept.groups = of.groups.iter().map(|values| largest(values, groups)).collect();
        }
        Ok(kept)
    }

    /// The configuration of what is kept. Fails if that is no model.
    pub fn config(&self, model: &LlamaConfig) -> Result<LlamaConfig, ConfigError> {
        let group = model.num_attention_heads / model.num_key_value_heads;
        let (intermediate, groups) = (self.intermediate[0].len(), self.groups[0].len());
        let kept = |pattern: &Option<LayerPattern>| {
            LayerPattern::of(self.layers.len(), |layer| pattern.as_ref().is_some_and(|of| of.has(self.layers[layer])))
        };
        let config = models::sized! { model.clone();
            sliding_window_pattern: kept(&model.sliding_window_pattern),
            no_rope_layer_interval: kept(&model.no_rope_layer_interval),
            num_hidden_layers: self.layers.len(), hidden_size: self.hidden.len(), intermediate_size: intermediate,
            num_key_value_heads: groups, num_attention_heads: groups * group
        };
        config.check()?;
        Ok(config)
    }
}

/// Where the `count` largest values are; of equal ones the first.
fn largest(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
    order.truncate(count);
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use models::LlamaVariant;

    use super::*;

    #[test]
    fn the_largest_are_kept_in_order() {
        assert_eq!(largest(&[1.0, 5.0, 3.0, 5.0], 2), [1, 3]);
        assert_eq!(largest(&[2.0, 2.0, 2.0], 2), [0, 1]);
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        let model = LlamaConfig::tiny();
        let refused = |sizes: Sizes| sizes.check(&model).unwrap_err().to_string();
        let said = refused(Sizes { heads: Some(3), ..Sizes::default() });
        says!(said, "--heads 3 of the model's 8, of which 2 share a key-value head; nearest legal: 4");
        says!(refused(Sizes { layers: Some(99), ..Sizes::default() }), "--layers 99 of the model's", "nearest legal");
    }

    #[test]
    fn layers_keep_their_kinds() {
        let model = LlamaConfig {
            variant: LlamaVariant::Gemma3,
            num_hidden_layers: 6,
            sliding_window: Some(8),
            sliding_window_pattern: Some(LayerPattern::Every(3)),
            ..LlamaConfig::tiny()
        };
        let of = |layers: &[usize]| Kept { layers: layers.to_vec(), ..Kept::all(&model) }.config(&model).unwrap();
        assert_eq!(of(&[0, 2, 3, 5]).sliding_window_pattern, Some(LayerPattern::Every(2)));
        assert_eq!(of(&[2, 3, 4]).sliding_window_pattern, Some(LayerPattern::At(vec![0])));
        assert_eq!(of(&[0, 1]).sliding_window_pattern, None);
    }
}
