//! Sizes of a BERT, and Hugging Face's `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::activation::Activation;
use crate::hf::{ConfigReader, HfError, keys, written};

/// Keys of other heads and of training, which do not change what this model computes.
const HARMLESS: [&str; 14] = keys![
    "add_cross_attention" "classifier_dropout" "directionality" "gradient_checkpointing" "initializer_range"
    "is_decoder" "pooler_fc_size" "pooler_num_attention_heads" "pooler_num_fc_layers" "pooler_size_per_head"
    "pooler_type" "position_embedding_type" "tie_encoder_decoder" "chunk_size_feed_forward"
];

/// Sizes of a BERT, under Hugging Face's names.
///
/// ```
/// use models::BertConfig;
///
/// let config = BertConfig { num_hidden_layers: 6, next_sentence: false, ..BertConfig::base() };
/// assert_eq!(config.hidden_size / config.num_attention_heads, 64);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BertConfig {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Features of a token.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of attention; they divide `hidden_size`.
    pub num_attention_heads: usize,
    /// Features inside a feed-forward network.
    pub intermediate_size: usize,
    /// What is between its matrices.
    pub hidden_act: Activation,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// Kinds of tokens: those of the first and of the second sentence.
    pub type_vocab_size: usize,
    /// Added to variances.
    pub layer_norm_eps: f64,
    /// Dropout of embeddings and of what layers add.
    pub hidden_dropout_prob: f64,
    /// Dropout of attention weights.
    pub attention_probs_dropout_prob: f64,
    /// Standard deviation of new weights.
    pub initializer_range: f64,
    /// Whether there are a pooler and a head that tells whether the second sentence follows the first.
    pub next_sentence: bool,
    /// Whether there is the head of a masked language model; without it this is Hugging Face's `BertModel`, which has no
    /// other either.
    pub predictions: bool,
    /// Whether there is a pooler without next-sentence prediction too, as a `BertModel` may have.
    pub pooler: bool,
}

impl BertConfig {
    /// BERT base (arXiv:1810.04805, section 3): 12 layers of 768 features, a vocabulary of 30522.
    pub fn base() -> Self {
        Self {
            vocab_size: 30522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: Activation::Gelu,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            layer_norm_eps: 1e-12,
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
            initializer_range: 0.02,
            next_sentence: true,
            predictions: true,
            pooler: false,
        }
    }

    pub(super) fn read(config: &Value) -> Result<Self, HfError> {
        let reader = ConfigReader::new(config)?;
        let classes = reader.expect_module("bert")?;
        let (base, headless) = (Self::base(), classes.first() == Some(&"BertModel"));
        let number = |key: &str, default: f64| Ok::<_, HfError>(reader.number(key)?.unwrap_or(default));
        reader.expect_flag("is_decoder", false)?;
        reader.expect_flag("add_cross_attention", false)?;
        reader.expect_flag("tie_word_embeddings", true)?;
        reader.expect_or_absent("position_embedding_type", "absolute")?;
        let read = Self {
            vocab_size: reader.size("vocab_size")?,
            hidden_size: reader.size("hidden_size")?,
            num_hidden_layers: reader.size("num_hidden_layers")?,
            num_attention_heads: reader.size("num_attention_heads")?,
            intermediate_size: reader.size("intermediate_size")?,
            hidden_act: Activation::read(&reader, "hidden_act", base.hidden_act)?,
            max_position_embeddings: reader.size_or("max_position_embeddings", base.max_position_embeddings)?,
            type_vocab_size: reader.size_or("type_vocab_size", base.type_vocab_size)?,
            layer_norm_eps: number("layer_norm_eps", base.layer_norm_eps)?,
            hidden_dropout_prob: number("hidden_dropout_prob", base.hidden_dropout_prob)?,
            attention_probs_dropout_prob: number("attention_probs_dropout_prob", base.attention_probs_dropout_prob)?,
            initializer_range: number("initializer_range", base.initializer_range)?,
            next_sentence: classes.contains(&"BertForPreTraining"),
            predictions: !headless,
            pooler: headless,
        };
        reader.finish(&HARMLESS)?;
        let (hidden, heads) = (read.hidden_size, read.num_attention_heads);
        if !hidden.is_multiple_of(heads) {
            let legal = (1..=heads).rev().find(|heads| hidden.is_multiple_of(*heads)).unwrap_or(1);
            return Err(reader.unsupported("num_attention_heads", &heads.to_string(), &legal.to_string()));
        }
        for key in ["hidden_dropout_prob", "attention_probs_dropout_prob"] {
            let value = reader.number(key)?.unwrap_or_default();
            if !(0.0..1.0).contains(&value) {
                return Err(reader.unsupported(key, &value.to_string(), "0 to below 1"));
            }
        }
        Ok(read)
    }

    pub(super) fn write(&self) -> Value {
        let class = match (self.predictions, self.next_sentence) {
            (false, _) => "BertModel",
            (true, true) => "BertForPreTraining",
            (true, false) => "BertForMaskedLM",
        };
        let further = json!({"architectures": [class], "model_type": "bert", "tie_word_embeddings": true});
        written(self, &["next_sentence", "predictions", "pooler"], further)
    }
}
