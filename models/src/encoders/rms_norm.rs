//! RMSNorm, in at least single precision.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};

use super::single::at_least_single;

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
        let wide = at_least_single(x);
        let root = (wide.clone().square().mean_dim(2) + self.epsilon).sqrt();
        (wide / root).cast(dtype) * self.gamma.val().unsqueeze::<3>()
    }
}
