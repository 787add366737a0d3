//! One local parameter: its sections, and what the optimizer and the gradient reduction must know of it.

use std::cmp::Ordering;
use std::ops::Range;

use crate::mesh::GridKind;
use serde::{Deserialize, Serialize};

use super::{Section, stable_hash};

/// Where in a model a parameter is used. What is used together is computed, gathered and reduced together;
/// the order is that of the forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Unit {
    /// Shared by embedding and head, which may be on different ranks.
    Tied,
    /// Before the first layer.
    #[default]
    Embedding,
    /// A layer, counted over the whole model.
    Layer(usize),
    /// The routed experts of a layer: the ranks that hold the same ones are others than those that hold the same rest.
    Experts(usize),
    /// After the last layer.
    Head,
}

impl Unit {
    /// The layer that the unit is, or belongs to.
    pub fn layer(self) -> Option<usize> {
        match self {
            Self::Layer(layer) | Self::Experts(layer) => Some(layer),
            _ => None,
        }
    }

    /// The grid over which its parameters are sharded and copied.
    pub fn grid(self) -> GridKind {
        if matches!(self, Self::Experts(_)) { GridKind::Expert } else { GridKind::Dense }
    }

    /// Position in the model: its third, the layer, dense or experts.
    fn position(self) -> (usize, usize, usize) {
        match self {
            Self::Tied => (0, 0, 0),
            Self::Embedding => (0, 0, 1),
            Self::Layer(layer) => (1, layer, 0),
            Self::Experts(layer) => (1, layer, 1),
            Self::Head => (2, 0, 0),
        }
    }
}

impl Ord for Unit {
    fn cmp(&self, other: &Self) -> Ordering {
        self.position().cmp(&other.position())
    }
}

impl PartialOrd for Unit {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A local parameter, described: sections laid one after the other along its first dimension.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamSpec {
    /// Identity of the parameter: [`stable_hash`] of the first section's name, the same on all ranks and in all
    /// layouts. It is also the Burn `ParamId`.
    pub id: u64,
    /// The slices of global tensors that the parameter is made of, in order.
    pub sections: Vec<Section>,
    /// The parameter is applied to another shard of the activations on each tensor parallel rank, so its gradient is a
    /// sum over that group: norm weights, biases after a row-parallel layer and positions under sequence parallelism;
    /// norms of the rank's own heads always.
    pub partial_gradient: bool,
    /// Where it is used.
    pub unit: Unit,
    /// Weight decay applies; false for one-dimensional parameters, as in Megatron-LM
    /// (`megatron/core/optimizer/__init__.py`).
    pub weight_decay: bool,
    /// Gradients change it; false for state that a model keeps with its weights, such as the bias of a router that
    /// balances its experts, and for weights that are frozen by name.
    pub trained: bool,
    /// A weight that does not change because adapters are trained in its place: it has no gradient, and checkpoints do
    /// not have it.
    pub frozen: bool,
}

/// Rows of a parameter whose gradient is a partial sum on each of some neighbouring tensor parallel ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientSum {
    /// Flat local elements, row-major.
    pub elements: Range<usize>,
    /// Number of neighbouring ranks of the tensor parallel group to sum over.
    pub ranks: usize,
}

impl ParamSpec {
    /// A parameter of some sections, used in the embedding. Weight decay follows from the number of dimensions.
    ///
    /// # Panics
    /// If there is no section, or sections differ in a dimension other than the first.
    pub fn new(sections: Vec<Section>, partial_gradient: bool) -> Self {
        let first = sections.first().expect("a parameter has at least one section");
        let tail = first.local_shape()[1..].to_vec();
        for section in &sections {
            assert_eq!(section.local_shape()[1..], tail, "{} does not fit under {}", section.name, first.name);
        }
        let weight_decay = first.global_shape.len() > 1;
        Self {
            id: stable_hash(&first.name),
            sections,
            partial_gradient,
            unit: Unit::default(),
            weight_decay,
            trained: true,
            frozen: false,
        }
    }

    /// Name of the first section, which names the parameter in messages.
    pub fn name(&self) -> &str {
        &self.sections[0].name
    }

    /// Shape of the local parameter, padding included.
    pub fn local_shape(&self) -> Vec<usize> {
        let mut shape = self.sections[0].local_shape();
        shape[0] = self.sections.iter().map(|section| section.local_shape()[0]).sum();
        shape
    }

    /// Number of local elements, padding included.
    pub fn local_len(&self) -> usize {
        self.sections.iter().map(Section::local_len).sum()
    }

    /// The flat local elements of each section; sections follow each other along the first dimension, so each is one
    /// contiguous range.
    pub fn elements(&self) -> Vec<Range<usize>> {
        let mut start = 0;
        let lengths = self.sections.iter().map(Section::local_len);
        lengths
            .map(|length| {
                start += length;
                start - length..start
            })
            .collect()
    }

    /// Each section with its slice of the local values.
    ///
    /// # Panics
    /// If `local` does not have [`ParamSpec::local_len`] elements.
    pub fn sections_of<'a, T>(&'a self, local: &'a [T]) -> impl Iterator<Item = (&'a Section, &'a [T])> {
        assert_eq!(local.len(), self.local_len(), "{}: local {:?}", self.name(), self.local_shape());
        self.sections.iter().zip(self.elements()).map(|(section, range)| (section, &local[range]))
    }

    /// What the gradient of this parameter still misses after backward: sums over neighbouring tensor parallel ranks.
    ///
    /// A slice that several ranks hold because there are fewer shards than ranks is used by each with its own heads,
    /// so every copy has a partial gradient. A replicated parameter has the whole gradient on every rank, unless
    /// each rank applies it to another shard of the activations.
    pub fn gradient_sums(&self) -> Vec<GradientSum> {
        let sections = self.sections.iter().zip(self.elements());
        let partial = sections.filter(|(s, _)| s.copies > 1 && (s.split.is_some() || self.partial_gradient));
        partial.map(|(section, elements)| GradientSum { elements, ranks: section.copies }).collect()
    }
}
