//! What image encoders have between the two layers of their MLP.

use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, gelu_approximate, relu, sigmoid};
use serde::{Deserialize, Serialize};

use crate::hf::{ConfigReader, HfError};

/// An activation under Hugging Face's name (transformers, `activations.py`, `ACT2FN`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x Φ(x)`.
    Gelu,
    /// The tanh approximation of GELU.
    GeluPytorchTanh,
    /// `x σ(1.702 x)`, CLIP's approximation of GELU.
    QuickGelu,
    /// `max(x, 0)`.
    Relu,
}

/// All of them with their names.
const ALL: [(Activation, &str); 4] = [
    (Activation::Gelu, "gelu"),
    (Activation::GeluPytorchTanh, "gelu_pytorch_tanh"),
    (Activation::QuickGelu, "quick_gelu"),
    (Activation::Relu, "relu"),
];

impl Activation {
    /// Hugging Face's name.
    pub fn name(self) -> &'static str {
        ALL.iter().find(|(activation, _)| *activation == self).map_or("", |(_, name)| name)
    }

    /// That of a key of a `config.json`.
    pub(super) fn read(config: &ConfigReader, key: &str, default: Self) -> Result<Self, HfError> {
        let Some(found) = config.text(key)? else { return Ok(default) };
        let known = ALL.iter().find(|(_, name)| *name == found).map(|(activation, _)| *activation);
        known.ok_or_else(|| config.unsupported(key, found, &ALL.map(|(_, name)| name).join(", ")))
    }

    /// Of each element.
    pub fn apply<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Gelu => gelu(x),
            Self::GeluPytorchTanh => gelu_approximate(x),
            Self::QuickGelu => x.clone() * sigmoid(x * 1.702),
            Self::Relu => relu(x),
        }
    }
}
