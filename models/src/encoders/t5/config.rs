//! Sizes of a T5, and Hugging Face's `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::activation::Activation;
use crate::hf::{ConfigReader, HfError, written};

/// Keys that follow from others, or of other heads.
const HARMLESS: [&str; 4] = ["classifier_dropout", "n_positions", "use_cache", "gradient_checkpointing"];

/// The form of feed-forward networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum T5FeedForwardKind {
    /// `act(x W) V`.
    Plain(Activation),
    /// `(act(x W) ⊙ x U) V`.
    Gated(Activation),
}

impl T5FeedForwardKind {
    /// `gated-gelu` is GELU by a hyperbolic tangent.
    const NAMES: [(&'static str, Self); 3] = [
        ("relu", Self::Plain(Activation::Relu)),
        ("gated-gelu", Self::Gated(Activation::GeluNew)),
        ("gated-silu", Self::Gated(Activation::Silu)),
    ];

    /// The function of the first layer's output.
    pub fn activation(self) -> Activation {
        let (Self::Plain(activation) | Self::Gated(activation)) = self;
        activation
    }
}

/// Sizes of a T5, under Hugging Face's names.
///
/// ```
/// use models::T5Config;
///
/// let config = T5Config { num_decoder_layers: 2, ..T5Config::small() };
/// assert_eq!((config.num_layers, config.decoder_start_token_id), (6, 0));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct T5Config {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Features of a token.
    pub d_model: usize,
    /// Features of a head; their number times this need not be `d_model`.
    pub d_kv: usize,
    /// Features inside a feed-forward network.
    pub d_ff: usize,
    /// Layers of the encoder.
    pub num_layers: usize,
    /// Layers of the decoder.
    pub num_decoder_layers: usize,
    /// Heads of attention.
    pub num_heads: usize,
    /// Ranges of distances.
    pub relative_attention_num_buckets: usize,
    /// Distances from here on are one range.
    pub relative_attention_max_distance: usize,
    /// Dropout everywhere.
    pub dropout_rate: f64,
    /// Added to mean squares.
    pub layer_norm_epsilon: f64,
    /// Scale of new weights.
    pub initializer_factor: f64,
    /// The form of feed-forward networks.
    pub feed_forward_proj: T5FeedForwardKind,
    /// Whether the head's weight is the embedding of tokens.
    pub tie_word_embeddings: bool,
    /// Whether hidden states are divided by √`d_model` before the head.
    pub scale_decoder_outputs: bool,
    /// What the decoder begins with.
    pub decoder_start_token_id: usize,
    /// Stands for labels that do not count where the decoder reads them.
    pub pad_token_id: usize,
    /// Ends a generated sequence.
    pub eos_token_id: usize,
}

impl T5Config {
    /// T5 small (arXiv:1910.10683, section 3.7): 6 and 6 layers of 512 features.
    pub fn small() -> Self {
        Self {
            vocab_size: 32128,
            d_model: 512,
            d_kv: 64,
            d_ff: 2048,
            num_layers: 6,
            num_decoder_layers: 6,
            num_heads: 8,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            dropout_rate: 0.1,
            layer_norm_epsilon: 1e-6,
            initializer_factor: 1.0,
            feed_forward_proj: T5FeedForwardKind::Plain(Activation::Relu),
            tie_word_embeddings: true,
            scale_decoder_outputs: true,
            decoder_start_token_id: 0,
            pad_token_id: 0,
            eos_token_id: 1,
        }
    }

    pub(super) fn read(config: &Value) -> Result<Self, HfError> {
        let reader = ConfigReader::new(config)?;
        reader.expect_module("t5")?;
        let small = Self::small();
        let number = |key: &str, default: f64| Ok::<_, HfError>(reader.number(key)?.unwrap_or(default));
        let form = reader.text("feed_forward_proj")?.unwrap_or("relu");
        let known = T5FeedForwardKind::NAMES.iter().find(|(name, _)| *name == form);
        let names = T5FeedForwardKind::NAMES.map(|(name, _)| name).join(", ");
        let (_, feed_forward_proj) = *known.ok_or_else(|| reader.unsupported("feed_forward_proj", form, &names))?;
        let is_gated = matches!(feed_forward_proj, T5FeedForwardKind::Gated(_));
        reader.expect_flag("is_gated_act", is_gated)?;
        reader.expect_or_absent("dense_act_fn", feed_forward_proj.activation().name())?;
        reader.expect_flag("is_encoder_decoder", true)?;
        reader.expect_flag("is_decoder", false)?;
        let num_layers = reader.size("num_layers")?;
        let tie_word_embeddings = reader.flag_or("tie_word_embeddings", true)?;
        let read = Self {
            vocab_size: reader.size("vocab_size")?,
            d_model: reader.size("d_model")?,
            d_kv: reader.size("d_kv")?,
            d_ff: reader.size("d_ff")?,
            num_layers,
            num_decoder_layers: reader.size_or("num_decoder_layers", num_layers)?,
            num_heads: reader.size("num_heads")?,
            relative_attention_num_buckets: reader.size_or("relative_attention_num_buckets", 32)?,
            relative_attention_max_distance: reader.size_or("relative_attention_max_distance", 128)?,
            dropout_rate: number("dropout_rate", small.dropout_rate)?,
            layer_norm_epsilon: number("layer_norm_epsilon", small.layer_norm_epsilon)?,
            initializer_factor: number("initializer_factor", small.initializer_factor)?,
            feed_forward_proj,
            tie_word_embeddings,
            scale_decoder_outputs: reader.flag_or("scale_decoder_outputs", tie_word_embeddings)?,
            decoder_start_token_id: reader.count_or("decoder_start_token_id", small.decoder_start_token_id)?,
            pad_token_id: reader.count_or("pad_token_id", small.pad_token_id)?,
            eos_token_id: reader.count_or("eos_token_id", small.eos_token_id)?,
        };
        reader.finish(&HARMLESS)?;
        let refuse = |key: &str, value: String, legal: &str| Err(reader.unsupported(key, &value, legal));
        let buckets = read.relative_attention_num_buckets;
        if buckets < 4 || !buckets.is_multiple_of(4) {
            return refuse("relative_attention_num_buckets", buckets.to_string(), "a multiple of 4, such as 32");
        }
        let distance = read.relative_attention_max_distance;
        if distance <= buckets / 2 {
            let legal = format!("above {}", buckets / 2);
            return refuse("relative_attention_max_distance", distance.to_string(), &legal);
        }
        if !(0.0..1.0).contains(&read.dropout_rate) {
            return refuse("dropout_rate", read.dropout_rate.to_string(), "0 to below 1");
        }
        let special = [
            ("decoder_start_token_id", read.decoder_start_token_id),
            ("pad_token_id", read.pad_token_id),
            ("eos_token_id", read.eos_token_id),
        ];
        match special.into_iter().find(|(_, token)| *token >= read.vocab_size) {
            Some((key, token)) => refuse(key, token.to_string(), &format!("below {}", read.vocab_size)),
            None => Ok(read),
        }
    }

    pub(super) fn write(&self) -> Value {
        let form = T5FeedForwardKind::NAMES.iter().find(|(_, kind)| *kind == self.feed_forward_proj);
        let further = json!({
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": true,
            "feed_forward_proj": form.map_or("relu", |(name, _)| name),
        });
        written(self, &[], further)
    }
}
