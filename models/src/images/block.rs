//! The block of an image encoder: each half normalises first.

use burn::module::Module;
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::attention::{attend, split_heads};
use crate::activation::Activation;

/// Attention between all patches and an MLP, of `x [batch, length, hidden]`.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: LayerNorm,
    attention: SelfAttention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
}

#[derive(Module, Debug)]
struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    n_heads: usize,
}

/// Two linear layers.
#[derive(Module, Debug)]
pub struct Mlp {
    inner: Linear,
    outer: Linear,
    #[module(skip)]
    activation: Activation,
}

/// The sizes of a [`Block`].
pub(super) struct BlockSizes {
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub eps: f64,
    pub qkv_bias: bool,
    pub activation: Activation,
    /// Standard deviation of initial weights.
    pub std: f64,
}

impl BlockSizes {
    pub fn init(&self, device: &Device) -> Block {
        let norm = || LayerNormConfig::new(self.hidden).with_epsilon(self.eps).init(device);
        let linear = |bias| {
            let initializer = Initializer::Normal { mean: 0.0, std: self.std };
            LinearConfig::new(self.hidden, self.hidden).with_bias(bias).with_initializer(initializer).init(device)
        };
        Block {
            attention_norm: norm(),
            attention: SelfAttention {
                query: linear(self.qkv_bias),
                key: linear(self.qkv_bias),
                value: linear(self.qkv_bias),
                output: linear(true),
                n_heads: self.heads,
            },
            mlp_norm: norm(),
            mlp: Mlp::new([self.hidden, self.intermediate, self.hidden], true, self.activation, self.std, device),
        }
    }
}

impl Block {
    /// `[batch, length, hidden]`, as `x`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x));
        x.clone() + self.mlp.forward(self.mlp_norm.forward(x))
    }
}

impl SelfAttention {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let of = |layer: &Linear| split_heads(layer.forward(x.clone()), self.n_heads);
        self.output.forward(attend(of(&self.query), of(&self.key), of(&self.value), None))
    }
}

impl Mlp {
    /// From `sizes[0]` features over `sizes[1]` to `sizes[2]`.
    pub(super) fn new(sizes: [usize; 3], bias: bool, activation: Activation, std: f64, device: &Device) -> Self {
        let linear = |from, to| {
            let initializer = Initializer::Normal { mean: 0.0, std };
            LinearConfig::new(from, to).with_bias(bias).with_initializer(initializer).init(device)
        };
        Self { inner: linear(sizes[0], sizes[1]), outer: linear(sizes[1], sizes[2]), activation }
    }

    /// `[batch, length, features]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.outer.forward(self.activation.apply(self.inner.forward(x)))
    }
}
