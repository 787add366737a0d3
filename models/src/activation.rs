//! What BERT, T5 and image encoders have between the layers of a feed-forward network.

use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, gelu_approximate, relu, sigmoid, silu};
use serde::{Deserialize, Serialize};

use crate::hf::{ConfigReader, HfError};

/// An activation under Hugging Face's name (transformers, `activations.py`, `ACT2FN`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x Φ(x)`.
    Gelu,
    /// The tanh approximation of GELU.
    GeluNew,
    /// The same as [`Activation::GeluNew`] under PyTorch's name of it.
    GeluPytorchTanh,
    /// `x σ(1.702 x)`, CLIP's approximation of GELU.
    QuickGelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²` (So et al. 2021, arXiv:2109.08668).
    Relu2,
    /// `x σ(x)`.
    Silu,
}

/// All of them with their names.
const ALL: [(Activation, &str); 7] = [
    (Activation::Gelu, "gelu"),
    (Activation::GeluNew, "gelu_new"),
    (Activation::GeluPytorchTanh, "gelu_pytorch_tanh"),
    (Activation::QuickGelu, "quick_gelu"),
    (Activation::Relu, "relu"),
    (Activation::Relu2, "relu2"),
    (Activation::Silu, "silu"),
];

impl Activation {
    /// Hugging Face's name.
    pub fn name(self) -> &'static str {
        ALL.iter().find(|(activation, _)| *activation == self).map_or("", |(_, name)| name)
    }

    /// That of a key of a `config.json`.
    pub(crate) fn read(config: &ConfigReader, key: &str, default: Self) -> Result<Self, HfError> {
        let Some(found) = config.text(key)? else { return Ok(default) };
        let known = ALL.iter().find(|(_, name)| *name == found).map(|(activation, _)| *activation);
        known.ok_or_else(|| config.unsupported(key, found, &ALL.map(|(_, name)| name).join(", ")))
    }

    /// Of each element.
    pub fn apply<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Gelu => gelu(x),
            Self::GeluNew | Self::GeluPytorchTanh => gelu_approximate(x),
            Self::QuickGelu => x.clone() * sigmoid(x * 1.702),
            Self::Relu => relu(x),
            Self::Relu2 => relu(x).square(),
            Self::Silu => silu(x),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::*;

    /// The formulas of transformers' `ACT2FN` in Python's doubles, at -1.5 and 0.75.
    #[test]
    fn values_are_those_of_the_formulas() {
        let expected: [(Activation, [f64; 2]); 7] = [
            (Activation::Gelu, [-0.10021080190328713, 0.5800294857173488]),
            (Activation::GeluNew, [-0.10042842301976707, 0.5799605551656203]),
            (Activation::GeluPytorchTanh, [-0.10042842301976707, 0.5799605551656203]),
            (Activation::QuickGelu, [-0.10833780155292343, 0.5863900575346379]),
            (Activation::Relu, [0.0, 0.75]),
            (Activation::Relu2, [0.0, 0.5625]),
            (Activation::Silu, [-0.2736382857095345, 0.5093840243815447]),
        ];
        for ((activation, expected), (known, _)) in expected.into_iter().zip(ALL) {
            assert_eq!(activation, known);
            let x = Tensor::<1>::from_data([-1.5f64, 0.75], (&Device::flex(), DType::F64));
            for (found, expected) in activation.apply(x).into_data().iter::<f64>().zip(expected) {
                assert!((found - expected).abs() < 1e-12, "{}: {found}, not {expected}", activation.name());
            }
        }
    }
}
