//! The pooling head: attention of one learned query to all patches, and an MLP (`SiglipMultiheadAttentionPoolingHead`).

use burn::module::{Module, Param};
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use crate::images::attention::{attend, split_heads};
use crate::images::{ClipVisionConfig, Mlp};

/// One vector of an image.
#[derive(Module, Debug)]
pub struct PoolingHead {
    /// The query, `[1, 1, hidden]`.
    probe: Param<Tensor<3>>,
    /// `[3 hidden, hidden]`, as PyTorch's `MultiheadAttention` has it: of queries, of keys, of values.
    joint: Param<Tensor<2>>,
    joint_bias: Param<Tensor<1>>,
    /// Not sharded, for there is one query.
    out: Linear,
    norm: LayerNorm,
    mlp: Mlp,
    #[module(skip)]
    heads: usize,
}

impl PoolingHead {
    /// With initial weights from the generator of `device`, as transformers draws query and attention.
    pub fn new(config: &ClipVisionConfig, device: &Device) -> Self {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let xavier = Initializer::XavierUniform { gain: 1.0 };
        let out = LinearConfig::new(hidden, hidden).with_initializer(xavier.clone()).init(device);
        let mlp = [hidden, intermediate, hidden];
        Self {
            probe: xavier.init_with([1, 1, hidden], Some(hidden), Some(hidden), device),
            joint: xavier.init_with([3 * hidden, hidden], Some(hidden), Some(3 * hidden), device),
            joint_bias: Initializer::Zeros.init([3 * hidden], device),
            out,
            norm: LayerNormConfig::new(hidden).with_epsilon(config.layer_norm_eps).init(device),
            mlp: Mlp::new(mlp, true, config.hidden_act, config.initializer_range, device),
            heads: config.num_attention_heads,
        }
    }

    /// `[batch, hidden]` of the tower's normalised hidden states `[batch, patches, hidden]`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<2> {
        let [batch, _, hidden] = x.dims();
        let projected = |index: usize, x: Tensor<3>| {
            let weight = self.joint.val().narrow(0, index * hidden, hidden);
            let bias = self.joint_bias.val().narrow(0, index * hidden, hidden);
            split_heads(x.matmul(weight.transpose().unsqueeze()) + bias.unsqueeze(), self.heads)
        };
        let probe = self.probe.val().repeat_dim(0, batch);
        let pooled = attend(projected(0, probe), projected(1, x.clone()), projected(2, x), None);
        let x = self.out.forward(pooled);
        (x.clone() + self.mlp.forward(self.norm.forward(x))).reshape([batch, hidden])
    }
}
