//! RMSNorm, in at least single precision.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{DType, Device, Tensor};

/// `x / √(mean(x²) + ε) · gamma` (arXiv:1910.07467), without a mean and a bias. What is half precision is normalized in
/// fp32; what is double precision stays so.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[features]`.
    pub gamma: Param<Tensor<1>>,
    epsilon: f64,
}

impl RmsNorm {
    /// Of so many features.
    pub fn new(features: usize, epsilon: f64, device: &Device) -> Self {
        Self { gamma: Initializer::Ones.init([features], device), epsilon }
    }

    /// From and to `[batch, sequence, features]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = x.dtype();
        let wide = if matches!(dtype, DType::F16 | DType::BF16) { x.cast(DType::F32) } else { x };
        let root = (wide.clone().square().mean_dim(2) + self.epsilon).sqrt();
        (wide / root).cast(dtype) * self.gamma.val().unsqueeze::<3>()
    }
}
