//! What a device is told of collectives with ranks that have other tensors.

use burn::tensor::Shape;
use burn_ir::{TensorId, TensorIr};
use ranks::collective_ops::Collective;
use serde::{Deserialize, Serialize};

/// Collectives over the group of this name, with ranks that have tensors of their own.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Across {
    /// At least one.
    pub parts: Vec<Part>,
    pub group: String,
    /// Whether a sum is divided by the number of members.
    pub mean: bool,
    /// Whether the device may compute meanwhile: the outputs are used after [`Message::Wait`], which names the first.
    pub is_async: bool,
}

/// One of them, on the rank's share of `x`.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Part {
    pub x: TensorIr,
    pub out: TensorId,
    /// Of what is communicated. `x` has one element on a rank that only receives.
    pub shape: Shape,
    pub what: Collective,
    /// Whether half precision is enough, if autocast computes with that.
    pub half: bool,
}

impl Across {
    pub fn outs(&self) -> Vec<TensorId> {
        self.parts.iter().map(|part| part.out).collect()
    }
}
