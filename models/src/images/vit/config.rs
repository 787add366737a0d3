//! The sizes of a ViT under Hugging Face's names, and its `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::activation::Activation;
use crate::config::{ConfigError, divides};
use crate::hf::{ConfigReader, HfError, written};
use crate::images::labels;

/// The sizes of a [`Vit`](super::Vit).
///
/// ```
/// use models::images::VitConfig;
///
/// let mut file = VitConfig::tiny().to_hf();
/// assert_eq!(VitConfig::from_hf(&file)?, VitConfig::tiny());
/// file["patch_size"] = 3.into();
/// let refused = VitConfig::from_hf(&file).unwrap_err().to_string();
/// assert_eq!(refused, "config.json: patch_size = 3 does not divide image_size = 8; nearest legal: 2, 4");
/// # Ok::<(), models::hf::HfError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VitConfig {
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
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Classes of a model that classifies.
    pub num_labels: Option<usize>,
    /// Features of the pooling layer, which only a model without classes may have.
    pub pooler_output_size: Option<usize>,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
}

/// Keys that change nothing here: they belong to masked images, or to a pooling layer that a classifier does not have.
const HARMLESS: [&str; 3] = ["encoder_stride", "pooler_act", "pooler_output_size"];

/// Transformers' class of a model that classifies, and of one that does not.
pub(super) const CLASSES: [&str; 2] = ["ViTForImageClassification", "ViTModel"];

impl VitConfig {
    /// A few thousand parameters.
    pub fn tiny() -> Self {
        Self {
            hidden_size: 16,
            intermediate_size: 32,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            hidden_act: Activation::Gelu,
            layer_norm_eps: 1e-12,
            image_size: 8,
            patch_size: 4,
            num_channels: 3,
            qkv_bias: true,
            num_labels: Some(10),
            pooler_output_size: None,
            initializer_range: 0.02,
        }
    }

    /// Patches of an image.
    pub fn patches(&self) -> usize {
        (self.image_size / self.patch_size).pow(2)
    }

    /// Whether the sizes make a model.
    ///
    /// # Errors
    /// Names the sizes that contradict each other, and the nearest legal ones.
    pub fn check(&self) -> Result<(), ConfigError> {
        divides("patch_size", self.patch_size, "image_size", self.image_size)?;
        divides("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size)
    }

    /// Reads the `config.json` of `ViTForImageClassification` or `ViTModel`, whose files may lack the pooling layer. An absent
    /// key has transformers' default.
    ///
    /// # Errors
    /// Names the key that is unknown or asks for something this model does not do, or sizes that contradict each other.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        let classifies = config.expect_module("vit")?.first() != Some(&CLASSES[1]);
        for dropout in ["hidden_dropout_prob", "attention_probs_dropout_prob"] {
            config.expect_number(dropout, 0.0, 0.0)?;
        }
        let hidden_size = config.size_or("hidden_size", 768)?;
        let pooled = if classifies {
            None
        } else {
            config.expect_or_absent("pooler_act", "tanh")?;
            Some(config.optional_size("pooler_output_size")?.unwrap_or(hidden_size))
        };
        let read = Self {
            hidden_size,
            intermediate_size: config.size_or("intermediate_size", 3072)?,
            num_hidden_layers: config.size_or("num_hidden_layers", 12)?,
            num_attention_heads: config.size_or("num_attention_heads", 12)?,
            hidden_act: Activation::read(&config, "hidden_act", Activation::Gelu)?,
            layer_norm_eps: config.number("layer_norm_eps")?.unwrap_or(1e-12),
            image_size: config.size_or("image_size", 224)?,
            patch_size: config.size_or("patch_size", 16)?,
            num_channels: config.size_or("num_channels", 3)?,
            qkv_bias: config.flag_or("qkv_bias", true)?,
            num_labels: classifies.then(|| labels::read(&config)).transpose()?,
            pooler_output_size: pooled,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
        };
        config.finish(&HARMLESS)?;
        read.check()?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5.
    pub fn to_hf(&self) -> Value {
        let class = CLASSES[usize::from(self.num_labels.is_none())];
        let further = json!({"architectures": [class], "model_type": "vit"});
        let left_out: &[&str] = match self.pooler_output_size {
            None => &["num_labels", "pooler_output_size"],
            Some(_) => &["num_labels"],
        };
        let mut file = written(self, left_out, further);
        if let Some(classes) = self.num_labels {
            labels::write(&mut file, classes);
        }
        file
    }
}
