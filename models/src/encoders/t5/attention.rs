//! Attention without scaling, with what relative positions add.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Initializer, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Tensor};

use super::config::T5Config;
use crate::encoders::attention_weights;

/// Keys and values `[batch, heads, sequence, d_kv]`.
pub type KeysValues = [Tensor<4>; 2];

/// Self-attention, or attention of the decoder to the encoder.
#[derive(Module, Debug)]
pub struct T5Attention {
    /// `[d_model, heads · d_kv]`.
    pub query: Linear,
    /// `[d_model, heads · d_kv]`.
    pub key: Linear,
    /// `[d_model, heads · d_kv]`.
    pub value: Linear,
    /// `[heads · d_kv, d_model]`.
    pub output: Linear,
    /// Of attention weights.
    pub dropout: Dropout,
    n_heads: usize,
}

impl T5Attention {
    /// With random weights.
    pub fn new(config: &T5Config, device: &Device) -> Self {
        let inner = config.num_heads * config.d_kv;
        let linear = |from: usize, to: usize, fan: usize| {
            let std = config.initializer_factor / (fan as f64).sqrt();
            let normal = Initializer::Normal { mean: 0.0, std };
            LinearConfig::new(from, to).with_bias(false).with_initializer(normal).init(device)
        };
        let model = config.d_model;
        Self {
            query: linear(model, inner, model * config.d_kv),
            key: linear(model, inner, model),
            value: linear(model, inner, model),
            output: linear(inner, model, inner),
            dropout: DropoutConfig::new(config.dropout_rate).init(),
            n_heads: config.num_heads,
        }
    }

    fn heads(&self, x: Tensor<3>) -> Tensor<4> {
        let [batch, length, features] = x.dims();
        x.reshape([batch, length, self.n_heads, features / self.n_heads]).swap_dims(1, 2)
    }

    /// Of `[batch, sequence, d_model]`.
    pub fn keys_values(&self, x: Tensor<3>) -> KeysValues {
        [self.heads(self.key.forward(x.clone())), self.heads(self.value.forward(x))]
    }

    /// From and to `[batch, queries, d_model]`. `bias` and `mask` are added to, or hide, scores `[batch, heads, queries, keys]`.
    pub fn forward(
        &self,
        x: Tensor<3>,
        [keys, values]: KeysValues,
        bias: Option<Tensor<4>>,
        mask: Option<Tensor<4, Bool>>,
    ) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let mut scores = self.heads(self.query.forward(x)).matmul(keys.transpose());
        if let Some(bias) = bias {
            scores = scores + bias;
        }
        let weights = self.dropout.forward(attention_weights(scores, mask));
        let [_, heads, _, d_kv] = values.dims();
        let context = weights.matmul(values).swap_dims(1, 2).reshape([batch, length, heads * d_kv]);
        self.output.forward(context)
    }
}
