//! Reading and writing Hugging Face's `config.json`. Every key of a file is used, known not to change what the model
//! computes, or refused by name.

pub(crate) mod backbone;
pub(crate) mod decoder;
pub(crate) mod gemma3;
mod input_error;
mod inputs;
pub(crate) mod layers;
mod module;
mod python_json;
mod reader;
pub(crate) mod rope;
mod writes;

pub use gemma3::{has_images, name_in_language_model};
pub use input_error::InputError;
pub use inputs::{HostInput, IGNORED, ModuleInputs};
pub use module::{ForeignParam, HfModule, ModuleNames, ModuleOutput, module_classes};
pub use python_json::parse_config;
pub(crate) use reader::ConfigReader;
pub use writes::{ImageInput, WritingModule};

use std::fmt;

use serde::Serialize;
use serde_json::{Value, json};
use thiserror::Error;

use crate::config::ConfigError;

/// A list of keys, as many to a line as it takes.
macro_rules! keys {
    ($($key:literal)*) => { [$($key),*] };
}
pub(crate) use keys;

/// Why a `config.json` cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum HfError {
    /// A key is missing.
    #[error("config.json: `{key}` is missing")]
    Missing { key: String },
    /// A value has the wrong type.
    #[error("config.json: `{key}` is {value}, not {expected}")]
    Type { key: String, value: String, expected: &'static str },
    /// The file describes a model that is not here.
    #[error("config.json: there is no model for `model_type` {kind}; nearest legal: {nearest}; legal: {legal}")]
    ModelType { kind: String, nearest: &'static str, legal: String },
    /// The file is of state-spaces' own code.
    #[error(
        "config.json: `ssm_cfg` without `model_type`: this is a file of state-spaces' own code (mamba_ssm), which calls keys and \
         weights otherwise than transformers; nearest legal: a folder with `model_type` mamba2"
    )]
    StateSpaces,
    /// The file describes another model of this type.
    #[error("config.json: there is no model for `{key}` {value}; supported: {supported}")]
    Architecture { key: &'static str, value: String, supported: String },
    /// The file describes a model that trains and runs as a Burn module, not in the engine.
    #[error(
        "config.json: `model_type` {kind} is a plain Burn module here, which `train` reads from its folder (model.hf), as do `forward`, \
         `generate`, `merge`, `plan --hf` and `MegatronStrategy::mesh`; models of the engine, as are meant here: {supported}"
    )]
    Module { kind: String, supported: String },
    /// A key is neither used nor known to be harmless.
    #[error(
        "config.json: `{key}` is not a key that this model knows, and it might change what the model computes; known: \
         {known}; known to change nothing: {harmless}"
    )]
    Unknown { key: String, known: String, harmless: String },
    /// A size is beyond any model.
    #[error("config.json: `{key}` is {value}, more than this program can hold; nearest legal: {most}")]
    TooLarge { key: String, value: u64, most: u64 },
    /// The weights are stored in a form that is not read.
    #[error(
        "config.json: `quantization_config` says that the weights are stored in {method}; the weights that are read are \
         f64, f32, bf16 and f16, and those of compressed-tensors. Dequantise them to bf16 first (DeepSeek-V3's repository has `fp8_cast_bf16.py` for its \
         own files), and remove this key"
    )]
    Quantised { method: String },
    /// The sizes contradict each other.
    #[error("config.json: {0}")]
    Sizes(#[from] ConfigError),
    /// The configuration asks for something the model does not do.
    #[error("config.json: `{key}` is {value}, which this model does not have; nearest legal: {legal}")]
    Unsupported { key: String, value: String, legal: String },
    /// A model that Hugging Face's classes cannot be.
    #[error("{0}")]
    NotWritable(&'static str),
}

impl HfError {
    /// An error in the object of a key.
    pub(crate) fn inside(mut self, object: &str) -> Self {
        match &mut self {
            Self::Missing { key }
            | Self::Type { key, .. }
            | Self::Unknown { key, .. }
            | Self::TooLarge { key, .. }
            | Self::Unsupported { key, .. } => *key = format!("{object}.{key}"),
            Self::ModelType { .. }
            | Self::StateSpaces
            | Self::Architecture { .. }
            | Self::Module { .. }
            | Self::Quantised { .. }
            | Self::NotWritable(_)
            | Self::Sizes(_) => {}
        }
        self
    }
}

/// What Hugging Face calls a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HfArchitecture {
    /// `model_type`.
    pub model_type: &'static str,
    /// The class in `architectures`.
    pub class: &'static str,
}

impl HfArchitecture {
    /// The model of a `model_type` that a class has.
    pub const fn new(model_type: &'static str, class: &'static str) -> Self {
        Self { model_type, class }
    }
}

impl fmt::Display for HfArchitecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.model_type, self.class)
    }
}

/// Keys that say how to use, store or describe a model, not what it computes.
pub(crate) const HARMLESS: [&str; 63] = keys![
    "_attn_implementation" "_attn_implementation_autoset" "_commit_hash" "_name_or_path" "bos_token_id" "do_sample" "dtype"
    "early_stopping" "eos_token_id" "finetuning_task" "forced_bos_token_id" "forced_eos_token_id"
    "gradient_checkpointing" "id2label" "label2id" "length_penalty" "max_length" "min_length" "no_repeat_ngram_size"
    "num_beams" "num_labels" "num_return_sequences" "output_attentions" "output_hidden_states" "pad_token_id" "prefix"
    // How Megatron-LM divided the model while it was trained.
    "pretraining_tp" "problem_type" "repetition_penalty" "return_dict" "sep_token_id" "task_specific_params"
    "temperature" "tokenizer_class" "top_k" "top_p" "torch_dtype" "torchscript" "transformers.js_config"
    "transformers_version" "typical_p" "use_cache"
    // What `PretrainedConfig.to_dict` of transformers 4 has besides: how a text is written, and the loss of TensorFlow.
    "bad_words_ids" "begin_suppress_tokens" "decoder_start_token_id" "diversity_penalty" "encoder_no_repeat_ngram_size"
    "exponential_decay_length_penalty" "num_beam_groups" "output_scores" "remove_invalid_values"
    "return_dict_in_generate" "suppress_tokens" "tf_legacy_loss" "tie_encoder_decoder" "chunk_size_feed_forward"
    // Of versions before 3, and what transformers makes of a GGUF file.
    "output_past" "use_bfloat16" "_model_name_or_path" "unk_token_id"
    // What Unsloth writes.
    "model_name" "unsloth_fixed" "unsloth_version"
];

/// Whether a key that would change a model has the value that every model has in `PretrainedConfig`.
pub(crate) fn says_nothing(key: &str, value: &Value) -> bool {
    match key {
        "add_cross_attention" | "is_decoder" | "is_encoder_decoder" => value == false,
        "cross_attention_hidden_size" => value.is_null(),
        "pruned_heads" => value.as_object().is_some_and(serde_json::Map::is_empty),
        _ => false,
    }
}

/// A `config.json`: our configuration, whose keys are called so there too but for those of `ours`, and `further` keys.
pub(crate) fn written(config: &impl Serialize, ours: &[&str], further: Value) -> Value {
    let mut file = json!(config);
    let (Some(keys), Value::Object(further)) = (file.as_object_mut(), further) else { unreachable!("two objects") };
    keys.retain(|key, _| !ours.contains(&key.as_str()));
    keys.extend(further);
    file
}
