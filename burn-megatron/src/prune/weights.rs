//! The weights that are left.

use std::collections::HashMap;
use std::ops::Range;

use backend_dist::launch::BoxError;
use models::{DecoderConfig, FamilyConfig, ModelConfig, WeightSource};

use super::keep::{Kept, PruneError};
use crate::element::{Element, HostFloats, copy_bytes};
use crate::hf::{HfFolder, TensorReader};

/// A model's weights without those that are pruned, by the names of the smaller model.
#[derive(Debug)]
pub struct Pruned<'a> {
    base: &'a HfFolder,
    /// Features of a head of the model, its query heads, and how many of them share a key-value head.
    head_dim: usize,
    heads: usize,
    heads_per_group: usize,
    kept: Kept,
    config: FamilyConfig,
    /// Shapes of the model's tensors, by our names.
    shapes: HashMap<String, Vec<usize>>,
}

/// The model's name of a tensor, its shape, and which positions of each dimension are kept.
type Place<'a> = (String, &'a [usize], Vec<Vec<usize>>);

/// What a dimension of a tensor counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Hidden,
    Intermediate,
    /// Features of the heads that share a key-value head: all their queries.
    Queries,
    /// Features of key-value heads.
    KeyValues,
    /// Vocabulary, or a head's own features.
    Other,
}

/// The dimensions of a tensor by the end of its name.
fn axes(name: &str) -> [Axis; 2] {
    let parts: Vec<&str> = name.rsplit('.').collect();
    let [kind, module] = [parts[0], parts.get(1).copied().unwrap_or_default()];
    match (module, kind) {
        ("embed_tokens" | "lm_head", _) => [Axis::Other, Axis::Hidden],
        ("q_proj", _) => [Axis::Queries, Axis::Hidden],
        ("k_proj" | "v_proj", _) => [Axis::KeyValues, Axis::Hidden],
        ("o_proj", _) => [Axis::Hidden, Axis::Queries],
        ("gate_proj" | "up_proj", _) => [Axis::Intermediate, Axis::Hidden],
        ("down_proj", _) => [Axis::Hidden, Axis::Intermediate],
        ("q_norm", _) => [Axis::Queries, Axis::Other],
        ("k_norm", _) => [Axis::KeyValues, Axis::Other],
        _ => [Axis::Hidden, Axis::Other],
    }
}

impl<'a> Pruned<'a> {
    /// What is kept of the weights of `base`, which are a `model`'s. Fails if what is kept is no model.
    pub fn new(base: &'a HfFolder, model: &FamilyConfig, kept: Kept) -> Result<Self, PruneError> {
        let (config, dims) = (kept.config(model)?, model.dims());
        let head_dim = model.block(0).attention().map_or(0, |attention| attention.head_dim);
        let shapes = model.hf_names().iter().map(|(name, of)| (name.to_string(), of.our_shape())).collect();
        let (heads, heads_per_group) = (dims.heads, dims.heads / dims.kv_heads);
        Ok(Self { base, head_dim, heads, heads_per_group, kept, config, shapes })
    }

    /// The smaller model.
    pub fn config(&self) -> &FamilyConfig {
        &self.config
    }

    /// The blocks of the model that are kept.
    pub fn layers(&self) -> &[usize] {
        &self.kept.layers
    }

    /// The model's name of a tensor of the smaller model, its shape, and which of its elements are kept along each
    /// dimension.
    fn place(&self, name: &str) -> Result<Place<'_>, BoxError> {
        let number = |rest: &str| rest.split('.').next()?.parse::<usize>().ok();
        let layer = name.strip_prefix("layers.").and_then(number);
        let theirs = match layer {
            Some(layer) => {
                let old = *self.kept.layers.get(layer).ok_or_else(|| format!("no layer {layer} is kept"))?;
                name.replacen(&format!("layers.{layer}."), &format!("layers.{old}."), 1)
            }
            None => name.to_string(),
        };
        let shape = self.shapes.get(&theirs).ok_or_else(|| format!("the model has no tensor {theirs}"))?;
        let layer = layer.map_or(0, |layer| self.kept.layers[layer]);
        let kept = shape.iter().zip(axes(name)).map(|(size, axis)| self.along(axis, layer, *size)).collect();
        Ok((theirs, shape, kept))
    }

    /// The kept positions of a dimension of `size`.
    fn along(&self, axis: Axis, layer: usize, size: usize) -> Vec<usize> {
        let head_dim = self.head_dim;
        let of_groups = |features: usize| -> Vec<usize> {
            self.kept.groups[layer].iter().flat_map(|group| group * features..(group + 1) * features).collect()
        };
        match axis {
            Axis::Hidden => self.kept.hidden.clone(),
            Axis::Intermediate => self.kept.intermediate[layer].clone(),
            // A norm of single heads has one weight for all of them.
            Axis::Queries | Axis::KeyValues if size == head_dim && self.heads > 1 => (0..size).collect(),
            Axis::Queries => of_groups(self.heads_per_group * head_dim),
            Axis::KeyValues => of_groups(head_dim),
            Axis::Other => (0..size).collect(),
        }
    }
}

impl TensorReader for Pruned<'_> {
    fn element(&self, name: &str, _: &[usize]) -> Result<Element, BoxError> {
        let (theirs, shape, _) = self.place(name)?;
        self.base.element(&theirs, shape)
    }

    fn read_bytes(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError> {
        let (theirs, whole, kept) = self.place(name)?;
        let found: Vec<usize> = kept.iter().map(Vec::len).collect();
        if found != shape {
            return Err(format!("{name} is {found:?} after pruning, the model needs {shape:?}").into());
        }
        let rows = &kept[0][ranges[0].clone()];
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(Vec::new()) };
        let mut span: Vec<Range<usize>> = whole.iter().map(|size| 0..*size).collect();
        span[0] = *first..last + 1;
        let size = self.base.element(&theirs, whole)?.size();
        let bytes = self.base.read_bytes(&theirs, whole, &span)?;
        let row = whole[1..].iter().product::<usize>() * size;
        let mut taken = Vec::with_capacity(ranges.iter().map(ExactSizeIterator::len).product::<usize>() * size);
        for at in rows {
            let from = &bytes[(at - first) * row..][..row];
            match (kept.get(1), ranges.get(1)) {
                (Some(columns), Some(range)) => {
                    let columns = &columns[range.clone()];
                    // All of them, most often.
                    if let [first, .., last] = columns
                        && last - first + 1 == columns.len()
                    {
                        taken.extend_from_slice(&from[first * size..(last + 1) * size]);
                        continue;
                    }
                    columns.iter().for_each(|column| taken.extend_from_slice(&from[column * size..][..size]));
                }
                _ => taken.extend_from_slice(from),
            }
        }
        Ok(taken)
    }
}

impl WeightSource for Pruned<'_> {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        Ok(self.read_stored(name, shape, ranges)?.into_f64())
    }

    fn read_stored(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<HostFloats, BoxError> {
        let bytes = self.read_bytes(name, shape, ranges)?;
        let element = self.element(name, shape)?;
        let mut values = element.zeros(bytes.len() / element.size());
        copy_bytes(&bytes, values.bytes_mut());
        Ok(values)
    }
}
