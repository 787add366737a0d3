//! Which part of a model a pipeline stage builds.

use std::ops::Range;

/// Consecutive layers, perhaps with the embedding before them and the head after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Layers, counted over the whole model; may be none.
    pub layers: Range<usize>,
    /// It begins with the embedding.
    pub embedding: bool,
    /// It ends with the output layer and the loss.
    pub head: bool,
}

impl Part {
    /// All of a model of `layers` layers.
    pub fn whole(layers: usize) -> Self {
        Self { layers: 0..layers, embedding: true, head: true }
    }
}
