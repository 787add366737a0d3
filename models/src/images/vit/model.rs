//! The forward pass of a ViT.

use backend_dist::parallelize::Plan;
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};

use super::config::VitConfig;
use crate::encoders::cross_entropy;
use crate::images::block::{Block, BlockSizes};
use crate::images::patch_sequence;

/// A ViT, which may classify images.
#[derive(Module, Debug)]
pub struct Vit {
    patches: Conv2d,
    /// `[1, 1, hidden]`.
    class: Param<Tensor<3>>,
    /// `[1, 1 + patches, hidden]`.
    positions: Param<Tensor<3>>,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Option<Linear>,
    /// Of the class token, in a model without a head.
    pooler: Option<Linear>,
    /// Channels, and height and width.
    #[module(skip)]
    image: [usize; 2],
}

impl Vit {
    /// With initial weights from the generator of `device`, whose float type the parameters have.
    pub fn new(config: &VitConfig, device: &Device) -> Self {
        let (hidden, patch) = (config.hidden_size, [config.patch_size; 2]);
        let normal = Initializer::Normal { mean: 0.0, std: config.initializer_range };
        let patches = Conv2dConfig::new([config.num_channels, hidden], patch).with_stride(patch);
        let block = BlockSizes {
            hidden,
            intermediate: config.intermediate_size,
            heads: config.num_attention_heads,
            eps: config.layer_norm_eps,
            qkv_bias: config.qkv_bias,
            activation: config.hidden_act,
            std: config.initializer_range,
        };
        Self {
            patches: patches.with_initializer(normal.clone()).init(device),
            class: normal.init([1, 1, hidden], device),
            positions: normal.init([1, 1 + config.patches(), hidden], device),
            blocks: (0..config.num_hidden_layers).map(|_| block.init(device)).collect(),
            norm: LayerNormConfig::new(hidden).with_epsilon(config.layer_norm_eps).init(device),
            head: config.num_labels.map(|classes| head(config, classes, device)),
            pooler: config.pooler_output_size.map(|features| head(config, features, device)),
            image: [config.num_channels, config.image_size],
        }
    }

    /// The same model with a new head, for the classes of `config`, and without a pooling layer.
    pub fn with_new_head(self, config: &VitConfig, device: &Device) -> Self {
        Self { head: config.num_labels.map(|classes| head(config, classes, device)), pooler: None, ..self }
    }

    /// Which parameters tensor parallelism shards: attention by heads, the MLP by its inner features.
    pub fn plan() -> Plan {
        Plan::auto().columns("query|key|value|inner").rows("output|outer")
    }

    /// Channels, and the height and width, of an image.
    pub fn image(&self) -> [usize; 2] {
        self.image
    }

    /// Number of classes, if it classifies.
    pub fn classes(&self) -> Option<usize> {
        self.head.as_ref().map(|head| head.weight.lazy_shape().dims::<2>()[1])
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// `[batch, 1 + patches, hidden]` of `pixels [batch, channels, image_size, image_size]`, before the first block.
    pub fn embed(&self, pixels: Tensor<4>) -> Tensor<3> {
        patch_sequence(&self.patches, Some(self.class.val()), self.positions.val(), pixels)
    }

    /// Block `index` of `x [batch, 1 + patches, hidden]`.
    pub fn block(&self, index: usize, x: Tensor<3>) -> Tensor<3> {
        self.blocks[index].forward(x)
    }

    /// Logits `[batch, classes]` of what comes out of the last block.
    ///
    /// # Panics
    /// If the model does not classify.
    pub fn classify(&self, x: Tensor<3>) -> Tensor<2> {
        let head = self.head.as_ref().expect("a ViT with a head classifies");
        head.forward(first(self.norm.forward(x)))
    }

    /// Logits `[batch, classes]` of `pixels [batch, channels, image_size, image_size]`.
    ///
    /// # Panics
    /// If the model does not classify.
    pub fn forward(&self, pixels: Tensor<4>) -> Tensor<2> {
        self.classify(self.encode(pixels))
    }

    /// Hidden states `[batch, 1 + patches, hidden]` of `pixels [batch, channels, image_size, image_size]`, after the last norm.
    pub fn states(&self, pixels: Tensor<4>) -> Tensor<3> {
        self.norm.forward(self.encode(pixels))
    }

    /// `[batch, features]` of hidden states of [`states`](Self::states), if there is a pooling layer.
    pub fn pool(&self, states: Tensor<3>) -> Option<Tensor<2>> {
        self.pooler.as_ref().map(|pooler| pooler.forward(first(states)).tanh())
    }

    fn encode(&self, pixels: Tensor<4>) -> Tensor<3> {
        (0..self.blocks()).fold(self.embed(pixels), |x, index| self.block(index, x))
    }

    /// The mean cross-entropy `[1]` of `logits [batch, classes]`.
    pub fn loss(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
        cross_entropy(logits.unsqueeze_dim(1), classes.unsqueeze_dim(1))
    }
}

/// The class token `[batch, hidden]` of `x [batch, 1 + patches, hidden]`.
fn first(x: Tensor<3>) -> Tensor<2> {
    let [batch, _, hidden] = x.dims();
    x.slice([0..batch, 0..1]).reshape([batch, hidden])
}

/// From the class token to logits, or to what a pooling layer gives.
fn head(config: &VitConfig, features: usize, device: &Device) -> Linear {
    let normal = Initializer::Normal { mean: 0.0, std: config.initializer_range };
    LinearConfig::new(config.hidden_size, features).with_initializer(normal).init(device)
}
