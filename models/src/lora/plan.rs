//! The adapters of one model: their layers, their tensors, and what they add to the weights.

use std::collections::BTreeMap;
use std::ops::Range;

use backend_dist::shard::{HostTensor, Registry};

use super::{LoraConfig, LoraError};
use crate::names::NameMap;

/// The adapters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraPlan {
    config: LoraConfig,
    /// By our name of a layer: Hugging Face's, and the shape `[out, in]`.
    targets: BTreeMap<String, (String, [usize; 2])>,
}

/// The parts of an adapter: our ending, and peft's.
pub(super) const PARTS: [(&str, &str); 3] = [
    ("lora_A.weight", "lora_A.weight"),
    ("lora_B.weight", "lora_B.weight"),
    ("lora_magnitude_vector.weight", "lora_magnitude_vector"),
];

impl LoraPlan {
    /// Adapters of these layers.
    pub(super) fn new(config: LoraConfig, targets: BTreeMap<String, (String, [usize; 2])>) -> Self {
        Self { config, targets }
    }

    /// What was asked for.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Number of layers with an adapter.
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Whether no layer has one.
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// Whether the layer of our name has an adapter.
    pub fn has(&self, layer: &str) -> bool {
        self.targets.contains_key(layer)
    }

    /// Our names of the layers, with Hugging Face's and the shapes `[out, in]`.
    pub fn targets(&self) -> impl Iterator<Item = (&str, &str, [usize; 2])> {
        self.targets.iter().map(|(ours, (theirs, shape))| (ours.as_str(), theirs.as_str(), *shape))
    }

    /// The adapters' tensors under names that begin with `prefix`: in files of peft `base_model.model.`, among a
    /// model's parameters nothing.
    pub fn names(&self, prefix: &str) -> NameMap {
        let in_file = !prefix.is_empty();
        let mut map = NameMap::default();
        for (ours, theirs, [out, input]) in self.targets() {
            let rank = self.config.rank;
            let shapes = [vec![rank, input], vec![out, rank], vec![out]];
            for ((part, in_files), shape) in PARTS.iter().zip(shapes).take(if self.config.dora { 3 } else { 2 }) {
                let ending = if in_file { in_files } else { part };
                map.same(format!("{ours}.{part}"), format!("{prefix}{theirs}.{ending}"), &shape);
            }
        }
        map
    }

    /// Whether every layer of a model that should have an adapter has one.
    ///
    /// # Errors
    /// The first that does not: some kinds of layers cannot have adapters.
    pub fn check(&self, registry: &Registry) -> Result<(), LoraError> {
        let held = |name: &str| registry.sections().any(|section| section.name == name);
        let missing =
            self.targets.keys().find(|ours| held(&format!("{ours}.weight")) && !held(&format!("{ours}.lora_A.weight")));
        missing.map_or(Ok(()), |ours| Err(LoraError::Unclaimed(ours.clone())))
    }

    /// Some matrix rows of a layer's weight with its adapter: `W + s B A`, for DoRA `m / ‖W + s B A‖` times that.
    /// `base` has these rows of `W`, whole; `part` gives the adapter's whole tensors by the ends of our names.
    ///
    /// # Errors
    /// Whatever `part` has to say.
    pub fn merge<E>(
        &self,
        rows: Range<usize>,
        mut base: Vec<f64>,
        part: impl Fn(&str) -> Result<HostTensor, E>,
    ) -> Result<Vec<f64>, E> {
        let [a, b] = [part("lora_A.weight")?, part("lora_B.weight")?];
        let (rank, scale, input) = (self.config.rank, self.config.scale(), a.shape[1]);
        let magnitude = if self.config.dora { Some(part("lora_magnitude_vector.weight")?) } else { None };
        for (row, values) in rows.zip(base.chunks_exact_mut(input)) {
            for (factor, a) in b.data[row * rank..(row + 1) * rank].iter().zip(a.data.chunks_exact(input)) {
                values.iter_mut().zip(a).for_each(|(value, a)| *value += scale * factor * a);
            }
            if let Some(magnitude) = &magnitude {
                let factor = magnitude.data[row] / values.iter().map(|value| value * value).sum::<f64>().sqrt();
                values.iter_mut().for_each(|value| *value *= factor);
            }
        }
        Ok(base)
    }
}
