//! The sizes of CLIP's or SigLIP's image tower under Hugging Face's names, and its `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::activation::Activation;
use crate::config::{ConfigError, divides};
use crate::hf::{ConfigReader, HfError, written};

/// Whose image tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VisionFamily {
    /// A class token, a norm before the first block, and a patch convolution without biases.
    Clip,
    /// Patches alone, whose convolution has biases.
    Siglip,
}

/// The sizes of a [`ClipVision`](super::ClipVision).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClipVisionConfig {
    /// Whose tower.
    pub family: VisionFamily,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Of the MLP.
    pub hidden_act: Activation,
    /// Added to the variance.
    pub layer_norm_eps: f64,
    /// Height and width of an image.
    pub image_size: usize,
    /// Height and width of a patch.
    pub patch_size: usize,
    /// Channels of an image.
    pub num_channels: usize,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
}

/// Keys of CLIP's projection to the space that it shares with texts, which the tower alone does not have.
const HARMLESS: [&str; 3] = ["initializer_factor", "projection_dim", "vocab_size"];

impl ClipVisionConfig {
    /// A few thousand parameters.
    pub fn tiny() -> Self {
        Self {
            family: VisionFamily::Clip,
            hidden_size: 16,
            intermediate_size: 32,
            num_hidden_layers: 3,
            num_attention_heads: 4,
            hidden_act: Activation::QuickGelu,
            layer_norm_eps: 1e-5,
            image_size: 8,
            patch_size: 4,
            num_channels: 3,
            initializer_range: 0.02,
        }
    }

    /// Patches of an image.
    pub fn patches(&self) -> usize {
        (self.image_size / self.patch_size).pow(2)
    }

    /// Length of the sequence of an image: its patches, and CLIP's class token.
    pub fn positions(&self) -> usize {
        self.patches() + usize::from(self.family == VisionFamily::Clip)
    }

    /// Whether the sizes make a model.
    ///
    /// # Errors
    /// Names the sizes that contradict each other, and the nearest legal ones.
    pub fn check(&self) -> Result<(), ConfigError> {
        divides("patch_size", self.patch_size, "image_size", self.image_size)?;
        divides("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size)
    }

    /// Reads the `config.json` of `CLIPVisionModel` or of a `SiglipVisionModel` without a head, or the `vision_config`
    /// of another model's. An absent key has transformers' default.
    ///
    /// # Errors
    /// Names the key that is unknown or asks for something this model does not do, or sizes that contradict each other.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        match Self::with_head(config)? {
            (read, false) => Ok(read),
            (_, true) => Err(ConfigReader::new(config)?.unsupported("vision_use_head", "true, or absent", "false")),
        }
    }

    /// [`from_hf`](Self::from_hf), and whether SigLIP's has a pooling head, which transformers gives it unless the file says
    /// no.
    ///
    /// # Errors
    /// As [`from_hf`](Self::from_hf).
    pub fn with_head(config: &Value) -> Result<(Self, bool), HfError> {
        let config = ConfigReader::new(config)?;
        let (family, class) = match config.text("model_type")?.unwrap_or("clip_vision_model") {
            "clip_vision_model" => (VisionFamily::Clip, "CLIPVisionModel"),
            "siglip_vision_model" => (VisionFamily::Siglip, "SiglipVisionModel"),
            other => return Err(config.unsupported("model_type", other, "clip_vision_model, siglip_vision_model")),
        };
        if let Some(classes) = config.texts("architectures")?.filter(|classes| classes != &[class]) {
            return Err(config.unsupported("architectures", &classes.join(", "), class));
        }
        let (patch_size, hidden_act, layer_norm_eps) = match family {
            VisionFamily::Clip => (32, Activation::QuickGelu, 1e-5),
            VisionFamily::Siglip => (16, Activation::GeluPytorchTanh, 1e-6),
        };
        let has_head = family == VisionFamily::Siglip && config.flag_or("vision_use_head", true)?;
        config.expect_number("attention_dropout", 0.0, 0.0)?;
        let read = Self {
            family,
            hidden_size: config.size_or("hidden_size", 768)?,
            intermediate_size: config.size_or("intermediate_size", 3072)?,
            num_hidden_layers: config.size_or("num_hidden_layers", 12)?,
            num_attention_heads: config.size_or("num_attention_heads", 12)?,
            hidden_act: Activation::read(&config, "hidden_act", hidden_act)?,
            layer_norm_eps: config.number("layer_norm_eps")?.unwrap_or(layer_norm_eps),
            image_size: config.size_or("image_size", 224)?,
            patch_size: config.size_or("patch_size", patch_size)?,
            num_channels: config.size_or("num_channels", 3)?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
        };
        config.finish(&HARMLESS)?;
        read.check()?;
        Ok((read, has_head))
    }

    /// The `config.json` of this model, in the form of transformers 5.
    pub fn to_hf(&self) -> Value {
        let kind = match self.family {
            VisionFamily::Clip => "clip_vision_model",
            VisionFamily::Siglip => "siglip_vision_model",
        };
        let mut file = written(self, &["family"], json!({"model_type": kind}));
        if self.family == VisionFamily::Siglip {
            file["vision_use_head"] = false.into();
        }
        file
    }
}
