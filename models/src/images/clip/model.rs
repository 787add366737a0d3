//! The forward pass of CLIP's and SigLIP's image tower.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Initializer, LayerNorm, LayerNormConfig};
use burn::tensor::{Device, Tensor};

use super::config::{ClipVisionConfig, VisionFamily};
use crate::images::block::{Block, BlockSizes};
use crate::images::patch_sequence;

/// CLIP's or SigLIP's image tower; SigLIP's has no class token and no first norm.
#[derive(Module, Debug)]
pub struct ClipVision {
    patches: Conv2d,
    /// `[hidden]`.
    class: Option<Param<Tensor<1>>>,
    /// `[positions, hidden]`.
    positions: Param<Tensor<2>>,
    first_norm: Option<LayerNorm>,
    blocks: Vec<Block>,
    /// Not of [`features`](Self::features); files have it.
    last_norm: LayerNorm,
}

impl ClipVision {
    /// With initial weights from the generator of `device`, whose float type the parameters have.
    pub fn new(config: &ClipVisionConfig, device: &Device) -> Self {
        let (hidden, patch) = (config.hidden_size, [config.patch_size; 2]);
        let normal = Initializer::Normal { mean: 0.0, std: config.initializer_range };
        let clip = config.family == VisionFamily::Clip;
        let patches = Conv2dConfig::new([config.num_channels, hidden], patch).with_stride(patch).with_bias(!clip);
        let norm = || LayerNormConfig::new(hidden).with_epsilon(config.layer_norm_eps).init(device);
        let block = BlockSizes {
            hidden,
            intermediate: config.intermediate_size,
            heads: config.num_attention_heads,
            eps: config.layer_norm_eps,
            qkv_bias: true,
            activation: config.hidden_act,
            std: config.initializer_range,
        };
        Self {
            patches: patches.with_initializer(normal.clone()).init(device),
            class: clip.then(|| normal.init([hidden], device)),
            positions: normal.init([config.positions(), hidden], device),
            first_norm: clip.then(norm),
            blocks: (0..config.num_hidden_layers).map(|_| block.init(device)).collect(),
            last_norm: norm(),
        }
    }

    /// `[batch, positions, hidden]` of `pixels [batch, channels, image_size, image_size]`, before the first block.
    pub fn embed(&self, pixels: Tensor<4>) -> Tensor<3> {
        let class = self.class.as_ref().map(|class| class.val().unsqueeze());
        let x = patch_sequence(&self.patches, class, self.positions.val().unsqueeze(), pixels);
        self.first_norm.iter().fold(x, |x, norm| norm.forward(x))
    }

    /// Block `index` of `x [batch, positions, hidden]`.
    pub fn block(&self, index: usize, x: Tensor<3>) -> Tensor<3> {
        self.blocks[index].forward(x)
    }

    /// The hidden states `[batch, positions, hidden]` after the first `blocks` blocks, of
    /// `pixels [batch, channels, image_size, image_size]`.
    pub fn features(&self, pixels: Tensor<4>, blocks: usize) -> Tensor<3> {
        (0..blocks).fold(self.embed(pixels), |x, index| self.block(index, x))
    }

    /// The normalised hidden states `[batch, positions, hidden]` after the last block.
    pub fn states(&self, pixels: Tensor<4>) -> Tensor<3> {
        self.last_norm.forward(self.features(pixels, self.blocks.len()))
    }
}
