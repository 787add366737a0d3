//! The forward pass of LLaVA.

use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use super::config::LlavaConfig;
use super::decoder::Decoder;
use crate::encoders::cross_entropy;
use crate::hf::IGNORED;
use crate::images::{ClipVision, Mlp};

/// A language model that sees.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use models::images::{Llava, LlavaConfig};
///
/// let (config, device) = (LlavaConfig::tiny(), Device::flex());
/// let model = Llava::new(&config, &device);
/// // 255 is the image token; an image of 8 × 8 pixels has four patches.
/// let tokens = Tensor::<2, Int>::from_data([[7, 255, 255, 255, 255, 8, 9]], &device);
/// let logits = model.forward(tokens.clone(), Tensor::ones([1, 3, 8, 8], &device));
/// assert_eq!(logits.dims(), [1, 7, 256]);
/// assert!(Llava::loss(logits, tokens).into_scalar::<f32>() > 0.0);
/// ```
#[derive(Module, Debug)]
pub struct Llava {
    tower: ClipVision,
    projector: Mlp,
    decoder: Decoder,
    image_token: usize,
    /// Of one image.
    image_tokens: usize,
    feature_blocks: usize,
    patches_only: bool,
    /// Channels, and height and width.
    #[module(skip)]
    image: [usize; 2],
}

impl Llava {
    /// With initial weights from the generator of `device`, whose float type the parameters have.
    pub fn new(config: &LlavaConfig, device: &Device) -> Self {
        let (vision, text) = (&config.vision_config, &config.text_config);
        let sizes = [vision.hidden_size, text.hidden_size, text.hidden_size];
        let (bias, act) = (config.multimodal_projector_bias, config.projector_hidden_act);
        Self {
            tower: ClipVision::new(vision, device),
            projector: Mlp::new(sizes, bias, act, text.initializer_range, device),
            decoder: Decoder::new(text, device),
            image_token: config.image_token_index,
            feature_blocks: config.feature_blocks,
            patches_only: config.patches_only,
            image_tokens: config.image_tokens(),
            image: [vision.num_channels, vision.image_size],
        }
    }

    /// Which parameters tensor parallelism shards: attention by heads, MLPs by their inner features, embedding and output
    /// layer by the vocabulary.
    pub fn plan() -> Plan {
        Plan::auto().columns("query|key|value|inner|gate|up").rows("output|outer|down")
    }

    /// The same model whose image tower is not trained, as in LLaVA's own training.
    pub fn with_frozen_tower(self) -> Self {
        Self { tower: self.tower.no_grad(), ..self }
    }

    /// The token that stands for one feature of an image.
    pub fn image_token(&self) -> usize {
        self.image_token
    }

    /// Image tokens of one image.
    pub fn image_tokens(&self) -> usize {
        self.image_tokens
    }

    /// Channels, and the height and width, of an image.
    pub fn image(&self) -> [usize; 2] {
        self.image
    }

    /// After how many blocks of the tower its hidden states are taken.
    pub fn feature_blocks(&self) -> usize {
        self.feature_blocks
    }

    /// The image tower.
    pub fn tower(&self) -> &ClipVision {
        &self.tower
    }

    /// The language model.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// What takes the place of image tokens, `[images · tokens of one, hidden]`, of
    /// `pixels [images, channels, image_size, image_size]`.
    pub fn image_features(&self, pixels: Tensor<4>) -> Tensor<2> {
        self.project(self.tower.features(pixels, self.feature_blocks))
    }

    /// What takes the place of image tokens, `[images · tokens of one, hidden]`, of the tower's hidden states
    /// `[images, positions, hidden]`.
    pub fn project(&self, states: Tensor<3>) -> Tensor<2> {
        let first = usize::from(self.patches_only);
        let patches = states.dims()[1] - first;
        self.projector.forward(states.narrow(1, first, patches)).flatten(0, 1)
    }

    /// Hidden states `[batch, length, hidden]` before the first block: those of `tokens [batch, length]`, and
    /// `features [image tokens, hidden]` in place of the image tokens, in order over all sequences.
    pub fn embed(&self, tokens: Tensor<2, Int>, features: Tensor<2>) -> Tensor<3> {
        let [batch, length] = tokens.dims();
        let hidden = features.dims()[1];
        let is_image = tokens.clone().equal_elem(self.image_token as i64);
        // Which feature: that of the image tokens so far. Before the first one any will do.
        let feature = (is_image.clone().int().reshape([batch * length]).cumsum(0) - 1).clamp_min(0);
        let chosen = features.select(0, feature).reshape([batch, length, hidden]);
        let is_image = is_image.unsqueeze_dim::<3>(2).expand([batch, length, hidden]);
        self.decoder.embed(tokens).mask_where(is_image, chosen)
    }

    /// Logits `[batch, length, vocabulary]` of `tokens [batch, length]` with as many image tokens as
    /// `pixels [images, channels, image_size, image_size]` have features.
    pub fn forward(&self, tokens: Tensor<2, Int>, pixels: Tensor<4>) -> Tensor<3> {
        let x = self.embed(tokens, self.image_features(pixels));
        self.decoder.logits((0..self.decoder.blocks()).fold(x, |x, index| self.decoder.block(index, x)))
    }

    /// The mean cross-entropy `[1]` of predicting each next token, from `logits [batch, length, vocabulary]` and `labels
    /// [batch, length]`, which are the tokens themselves, or -100 where a prediction does not count.
    pub fn loss(logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = labels.dims();
        // Labels move, not logits: these may be shards of sequences.
        let none = Tensor::full([batch, 1], IGNORED, &labels.device());
        cross_entropy(logits, Tensor::cat(vec![labels, none], 1).narrow(1, 1, length))
    }
}
