//! The network of each token, plain or gated.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use crate::activation::Activation;

use super::config::{T5Config, T5FeedForwardKind};

/// Two or three matrices without biases.
#[derive(Module, Debug)]
pub struct T5FeedForward {
    /// `[d_model, d_ff]`.
    pub inner: T5Inner,
    /// `[d_ff, d_model]`.
    pub outer: Linear,
    /// Between them.
    #[module(skip)]
    pub activation: Activation,
    /// After the activation.
    pub dropout: Dropout,
}

/// What comes before `outer`.
#[derive(Module, Debug)]
pub enum T5Inner {
    /// The activation of one matrix (T5).
    Plain(Linear),
    /// The activation of one, times another (T5 1.1).
    Gated(T5Gated),
}

/// Two matrices `[d_model, d_ff]`.
#[derive(Module, Debug)]
pub struct T5Gated {
    /// Goes through the activation.
    pub gate: Linear,
    /// Does not.
    pub up: Linear,
}

impl T5FeedForward {
    /// With random weights.
    pub fn new(config: &T5Config, device: &Device) -> Self {
        let linear = |from: usize, to: usize| {
            let std = config.initializer_factor / (from as f64).sqrt();
            let normal = Initializer::Normal { mean: 0.0, std };
            LinearConfig::new(from, to).with_bias(false).with_initializer(normal).init(device)
        };
        let [model, inner] = [config.d_model, config.d_ff];
        Self {
            inner: match config.feed_forward_proj {
                T5FeedForwardKind::Plain(_) => T5Inner::Plain(linear(model, inner)),
                T5FeedForwardKind::Gated(_) => {
                    T5Inner::Gated(T5Gated { gate: linear(model, inner), up: linear(model, inner) })
                }
            },
            outer: linear(inner, model),
            activation: config.feed_forward_proj.activation(),
            dropout: DropoutConfig::new(config.dropout_rate).init(),
        }
    }

    /// From and to `[batch, sequence, d_model]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = match &self.inner {
            T5Inner::Plain(inner) => self.activation.apply(inner.forward(x)),
            T5Inner::Gated(inner) => self.activation.apply(inner.gate.forward(x.clone())) * inner.up.forward(x),
        };
        self.outer.forward(self.dropout.forward(x))
    }
}
