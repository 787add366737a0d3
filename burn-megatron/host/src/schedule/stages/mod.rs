//! How the layers of a model are divided over the stages of a pipeline.
//!
//! A [`StageLayout`] comes from a [`Split`] (equal stages, a first or last rank with its own number of layers,
//! embedding and loss counted as layers), from what layers cost ([`PartCosts`]), from the number of layers of every
//! stage, or from Megatron-LM's `--pipeline-model-parallel-layout` string.

mod cost;
mod error;
mod split;
#[cfg(test)]
mod tests;
mod text;

use std::ops::Range;

pub use cost::PartCosts;
pub use error::StageError;
pub use split::Split;
pub use text::Expected;

/// What one stage computes, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// It begins with the embedding.
    pub embedding: bool,
    /// Its transformer layers; may be none.
    pub layers: Range<usize>,
    /// Its multi-token-prediction layers.
    pub mtp_layers: Range<usize>,
    /// It ends with the output layer and the loss.
    pub loss: bool,
}

/// The stages of a model in the order of its layers: the first has the embedding, the last the loss, every layer is in
/// one of them. Which rank holds which stage, says a [`Placement`](super::Placement).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageLayout {
    stages: Vec<Stage>,
}

impl StageLayout {
    /// Stages with so many transformer layers each.
    ///
    /// # Panics
    /// If there is no stage.
    pub fn from_layer_counts(counts: &[usize]) -> Self {
        assert!(!counts.is_empty(), "a model has at least one stage");
        let mut first = 0;
        let stage = |(index, &count): (usize, &usize)| {
            let layers = first..first + count;
            first = layers.end;
            let (embedding, loss) = (index == 0, index + 1 == counts.len());
            Stage { embedding, layers, mtp_layers: 0..0, loss }
        };
        Self { stages: counts.iter().enumerate().map(stage).collect() }
    }

    /// The most even division: stages differ by at most one layer, and those with one more are not at the ends, where
    /// embedding and loss are, if that can be.
    ///
    /// # Panics
    /// If there is no stage.
    pub fn balanced(layers: usize, stages: usize) -> Self {
        let (each, more) = (layers / stages, layers % stages);
        let first = usize::from(more + 2 <= stages);
        let counts: Vec<usize> =
            (0..stages).map(|stage| each + usize::from((first..first + more).contains(&stage))).collect();
        Self::from_layer_counts(&counts)
    }

    /// The stages in the order of the layers.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// Transformer layers of each stage.
    pub fn layer_counts(&self) -> Vec<usize> {
        self.stages.iter().map(|stage| stage.layers.len()).collect()
    }

    /// Transformer layers of the model.
    pub fn num_layers(&self) -> usize {
        self.stages.last().map_or(0, |stage| stage.layers.end)
    }
}
