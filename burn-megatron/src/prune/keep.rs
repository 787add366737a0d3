//! What is kept of a model.

use models::family::PrunedSizes;
use models::{ConfigError, DecoderConfig, FamilyConfig, ModelConfig};
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
    /// The family's weights cannot be pruned.
    #[error("models of the family {family} cannot be pruned; legal: {legal}")]
    Family { family: &'static str, legal: String },
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
    pub fn check(&self, model: &FamilyConfig) -> Result<(), PruneError> {
        Kept::all(model).config(model)?;
        let dims = model.dims();
        for (key, value, most, unit) in [
            ("layers", self.layers, dims.layers, 1),
            ("intermediate", self.intermediate, dims.intermediate, 1),
            ("hidden", self.hidden, dims.hidden, 1),
            ("heads", self.heads, dims.heads, dims.heads / dims.kv_heads),
        ] {
            let Some(value) = value else { continue };
            // Gemma multiplies embeddings by the root of the width: with a smaller one they would count less in every sum.
            let of_width = f64::from((most as f64).sqrt() as f32);
            if key == "hidden" && value != most && model.frame().embedding_scale == Some(of_width) {
                let legal = format!("the model's {most}, whose root its embeddings are multiplied by");
                return Err(PruneError::Size { key, value, legal, nearest: most });
            }
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
    pub fn all(model: &FamilyConfig) -> Self {
        let dims = model.dims();
        let by_layer = |size: usize| vec![(0..size).collect(); dims.layers];
        Self {
            layers: (0..dims.layers).collect(),
            hidden: (0..dims.hidden).collect(),
            intermediate: by_layer(dims.intermediate),
            groups: by_layer(dims.kv_heads),
        }
    }

    /// All but one block.
    pub fn without_layer(model: &FamilyConfig, layer: usize) -> Self {
        let mut all = Self::all(model);
        all.layers.retain(|kept| *kept != layer);
        all
    }

    /// As much of a model as `sizes` say: what is most important.
    pub fn most_important(model: &FamilyConfig, sizes: &Sizes, of: &Importance) -> Result<Self, PruneError> {
        sizes.check(model)?;
        let (mut kept, dims) = (Self::all(model), model.dims());
        if let Some(layers) = sizes.layers.filter(|layers| *layers < dims.layers) {
            kept.layers = largest(&of.layers, layers);
        }
        if let Some(hidden) = sizes.hidden {
            kept.hidden = largest(&of.hidden, hidden);
        }
        if let Some(intermediate) = sizes.intermediate {
            kept.intermediate = of.intermediate.iter().map(|values| largest(values, intermediate)).collect();
        }
        if let Some(heads) = sizes.heads {
            let groups = heads * dims.kv_heads / dims.heads;
            kept.groups = of.groups.iter().map(|values| largest(values, groups)).collect();
        }
        Ok(kept)
    }

    /// The configuration of what is kept. Fails if that is no model, or one of a family that cannot be pruned.
    pub fn config(&self, model: &FamilyConfig) -> Result<FamilyConfig, PruneError> {
        let config = model.pruned(&self.sizes()).ok_or_else(|| {
            let can = FamilyConfig::presets().into_iter().filter(|(_, of)| of.pruned(&Self::all(of).sizes()).is_some());
            let mut legal: Vec<&str> = can.map(|(_, of)| of.family()).collect();
            legal.dedup();
            PruneError::Family { family: model.family(), legal: legal.join(", ") }
        })?;
        config.check()?;
        Ok(config)
    }

    fn sizes(&self) -> PrunedSizes {
        PrunedSizes {
            layers: self.layers.clone(),
            hidden: self.hidden.len(),
            intermediate: self.intermediate[0].len(),
            kv_heads: self.groups[0].len(),
        }
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
    use models::{LlamaConfig, MixtralConfig};

    use super::*;

    #[test]
    fn the_largest_are_kept_in_order() {
        assert_eq!(largest(&[1.0, 5.0, 3.0, 5.0], 2), [1, 3]);
        assert_eq!(largest(&[2.0, 2.0, 2.0], 2), [0, 1]);
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        let model = LlamaConfig::tiny().into();
        let refused = |sizes: Sizes| sizes.check(&model).unwrap_err().to_string();
        let said = refused(Sizes { heads: Some(3), ..Sizes::default() });
        says!(said, "--heads 3 of the model's 8, of which 2 share a key-value head; nearest legal: 4");
        says!(refused(Sizes { layers: Some(99), ..Sizes::default() }), "--layers 99 of the model's", "nearest legal");
    }

    /// Their embeddings would be multiplied by the root of the new width.
    #[test]
    fn the_width_of_gemma_stays() {
        let (_, gemma) = FamilyConfig::presets().into_iter().find(|(name, _)| *name == "gemma2-2b").unwrap();
        let check = |hidden: usize| Sizes { hidden: Some(hidden), ..Sizes::default() }.check(&gemma);
        let said = check(2048).unwrap_err().to_string();
        says!(said, "--hidden 2048 of the model's 2304, whose root its embeddings", "nearest legal: 2304");
        assert_eq!(check(2304), Ok(()));
        assert_eq!(Sizes { intermediate: Some(4096), ..Sizes::default() }.check(&gemma), Ok(()));
    }

    #[test]
    fn families_whose_weights_cannot_be_pruned_are_refused() {
        let said = Sizes::default().check(&MixtralConfig::tiny().into()).unwrap_err().to_string();
        assert_eq!(said, "models of the family mixtral cannot be pruned; legal: llama");
    }
}
