//! What layers must know of the micro-batch that they compute.

use backend_dist::ops::context::{ContextParallel, Documents};

use crate::layers::DropoutKey;

/// What layers must know of a micro-batch besides its activations. The default is a whole sequence on each rank, of one
/// document, without dropout.
#[derive(Clone, Debug, Default)]
pub struct MicroBatch {
    /// With a key, dropout is applied.
    pub dropout: Option<DropoutKey>,
    /// The ranks that share the sequences, each with some of the positions.
    pub context: Option<ContextParallel>,
    /// Attention does not cross the borders of documents.
    pub documents: Option<Documents>,
    /// What the gradients of auxiliary losses, means over the tokens of the micro-batch, are multiplied with.
    pub auxiliary: f64,
}

impl MicroBatch {
    /// With dropout from this key, if there is one.
    pub fn with_dropout(dropout: Option<DropoutKey>) -> Self {
        Self { dropout, ..Self::default() }
    }
}
