//! The adapters of one model: their layers, their tensors, and what they add to the weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use backend_dist::shard::{HostTensor, Registry};
use rayon::prelude::*;

use super::{LoraConfig, LoraError};
use crate::names::{Foreign, NameMap};

/// The adapters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraPlan {
    config: LoraConfig,
    /// By our name of a layer.
    targets: BTreeMap<String, Target>,
}

/// A layer with an adapter: a module of Hugging Face's, or some of its matrix rows.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Target {
    /// Hugging Face's name of the module.
    theirs: String,
    /// Our name of the module, under which its A is: all layers whose weights it fuses read one.
    module: String,
    /// The module's weight, and which of its rows are the layer's.
    weight: Foreign,
    rank: usize,
    /// Numerator of the scale.
    alpha: f64,
}

/// What a layer has to know of its adapter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LayerAdapter {
    /// Our name of the module whose A it reads: its own, or that of the module which fuses its weight with others.
    pub module: String,
    pub rank: usize,
    /// The factor of the adapter's output.
    pub scale: f64,
    pub dora: bool,
}

impl Target {
    /// The layer `ours`, which is `weight` of the module `theirs`, whose adapter has this rank and numerator.
    pub fn new(ours: &str, theirs: &str, weight: &Foreign, (rank, alpha): (usize, f64)) -> Self {
        let is_part = weight.rows.is_some() || weight.stack.is_some();
        let module = match (is_part, ours.rsplit_once('.'), theirs.rsplit('.').next()) {
            (true, Some((parent, _)), Some(called)) => format!("{parent}.{called}"),
            _ => ours.to_string(),
        };
        Self { theirs: theirs.into(), module, weight: weight.clone(), rank, alpha }
    }
}

/// The parts of an adapter: our ending, and peft's.
pub(super) const PARTS: [(&str, &str); 3] = [
    ("lora_A.weight", "lora_A.weight"),
    ("lora_B.weight", "lora_B.weight"),
    ("lora_magnitude_vector.weight", "lora_magnitude_vector"),
];

impl LoraPlan {
    /// Adapters of these layers.
    pub(super) fn new(config: LoraConfig, targets: BTreeMap<String, Target>) -> Self {
        Self { config, targets }
    }

    /// What was asked for.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Number of Hugging Face's modules with an adapter.
    pub fn len(&self) -> usize {
        self.modules().len()
    }

    /// Whether no layer has one.
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// Whether the layer of our name has an adapter.
    pub fn has(&self, layer: &str) -> bool {
        self.targets.contains_key(layer)
    }

    /// Our names of the layers, with those of Hugging Face's modules and the shapes `[out, in]`. Layers whose weights a
    /// module fuses have the same one.
    pub fn targets(&self) -> impl Iterator<Item = (&str, &str, [usize; 2])> {
        self.targets.iter().map(|(ours, target)| {
            let shape = target.weight.our_shape();
            (ours.as_str(), target.theirs.as_str(), [shape[0], shape[1]])
        })
    }

    /// Names of Hugging Face's modules, with rank and numerator of the scale of each.
    pub fn modules(&self) -> BTreeMap<&str, (usize, f64)> {
        self.targets.values().map(|target| (target.theirs.as_str(), (target.rank, target.alpha))).collect()
    }

    /// Names of Hugging Face's parameters that are the matrices of all experts of a layer, with the number of these: peft has
    /// one adapter for all.
    pub fn parameters(&self) -> BTreeMap<&str, usize> {
        let stacked = self.targets.values().filter(|target| target.weight.stack.is_some());
        stacked.map(|target| (target.theirs.as_str(), target.weight.shape[0])).collect()
    }

    /// Whether adapters of both plans have the same tensors and compute the same.
    pub fn is_like(&self, other: &Self) -> bool {
        let scales = |plan: &Self| plan.targets.keys().filter_map(|ours| plan.of_layer(ours)).collect::<Vec<_>>();
        self.names("") == other.names("") && scales(self) == scales(other)
    }

    /// Our name of the module whose A the layer reads, if it has an adapter: its own, or that of the module which fuses its
    /// weight with others.
    pub fn module_of(&self, layer: &str) -> Option<&str> {
        self.targets.get(layer).map(|target| target.module.as_str())
    }

    /// The adapter of the layer of our name, if it has one.
    pub(crate) fn of_layer(&self, layer: &str) -> Option<LayerAdapter> {
        let Target { module, rank, alpha, .. } = self.targets.get(layer)?;
        let scale = self.config.scale(*rank, *alpha);
        Some(LayerAdapter { module: module.clone(), rank: *rank, scale, dora: self.config.dora })
    }

    /// The adapters' tensors under names that begin with `prefix`: in files of peft `base_model.model.`, among a
    /// model's parameters nothing. B and magnitudes are rows of the module's, as the weight is. Of experts that are one tensor
    /// A is `[experts · rank, in]`, and B a stack as the weight is, `[experts, rank, out]`; their names are those of Hugging
    /// Face's parameters. Files have these two under other names, and B in another order: [`import`](Self::import) and
    /// [`export`](Self::export) read and write files.
    pub fn names(&self, prefix: &str) -> NameMap {
        let in_file = !prefix.is_empty();
        let (mut map, mut modules) = (NameMap::default(), BTreeSet::new());
        for (ours, Target { theirs, module, weight, rank, .. }) in &self.targets {
            let (rank, rows) = (*rank, weight.rows.clone());
            let parts = match (weight.stack, &weight.shape[..]) {
                (Some(part), &[experts, input, out]) => {
                    let own = Some(vec![part.index * rank..(part.index + 1) * rank]);
                    let a = Foreign { rows: own, ..Foreign::unnamed(vec![experts * rank, input]) };
                    let b =
                        Foreign { stack: Some(part), transposed: true, ..Foreign::unnamed(vec![experts, rank, out]) };
                    vec![(module, a), (ours, b)]
                }
                (_, shape) => {
                    let (out, input) = (shape[0], shape[1]);
                    let of = |shape, rows| Foreign { rows, ..Foreign::unnamed(shape) };
                    let a = of(vec![rank, input], None);
                    vec![(module, a), (ours, of(vec![out, rank], rows.clone())), (ours, of(vec![out], rows))]
                }
            };
            let parts = PARTS.iter().zip(parts).take(if self.config.dora { 3 } else { 2 });
            for (index, ((part, in_files), (layer, foreign))) in parts.enumerate() {
                if index == 0 && !modules.insert(module) {
                    continue;
                }
                let name = format!("{prefix}{theirs}.{}", if in_file { in_files } else { part });
                map.add(format!("{layer}.{part}"), Foreign { name, ..foreign });
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
            self.targets.keys().find(|ours| held(&format!("{ours}.weight")) && !held(&format!("{ours}.lora_B.weight")));
        missing.map_or(Ok(()), |ours| Err(LoraError::Unclaimed(ours.clone())))
    }

    /// Some matrix rows of the weight of a layer that has an adapter, with it: `W + s B A`, for DoRA `m / ‖W + s B A‖` times
    /// that. `base` has these rows of `W`, whole; `tensor` gives the adapter's whole tensors by our names.
    ///
    /// # Errors
    /// Whatever `tensor` has to say.
    ///
    /// # Panics
    /// If the layer has none.
    pub fn merge<E>(
        &self,
        layer: &str,
        rows: Range<usize>,
        mut base: Vec<f64>,
        tensor: impl Fn(&str) -> Result<HostTensor, E>,
    ) -> Result<Vec<f64>, E> {
        let LayerAdapter { module, rank, scale, dora } = self.of_layer(layer).expect("the layer has an adapter");
        let part = |of: &str, part: usize| tensor(&format!("{of}.{}", PARTS[part].0));
        let [a, b] = [part(&module, 0)?, part(layer, 1)?];
        let input = a.shape[1];
        let magnitude = if dora { Some(part(layer, 2)?) } else { None };
        base.par_chunks_exact_mut(input).zip(rows).for_each(|(values, row)| {
            for (factor, a) in b.data[row * rank..(row + 1) * rank].iter().zip(a.data.chunks_exact(input)) {
                values.iter_mut().zip(a).for_each(|(value, a)| *value += scale * factor * a);
            }
            if let Some(magnitude) = &magnitude {
                let factor = magnitude.data[row] / values.iter().map(|value| value * value).sum::<f64>().sqrt();
                values.iter_mut().for_each(|value| *value *= factor);
            }
        });
        Ok(base)
    }
}
