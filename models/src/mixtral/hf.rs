//! Mixtral and its relatives in Hugging Face's words: names of tensors and `config.json`.

use serde_json::{Value, json};

use super::config::MixtralConfig;
use super::variant::MixtralVariant;
use crate::hf::{ConfigReader, HfError, class_of, rope};
use crate::names::NameMap;

/// The names of the tensors of `MixtralForCausalLM` and `Qwen3MoeForCausalLM` in files. (transformers 5 puts the experts of
/// a layer together in memory; in files each has its own matrices.)
pub(super) fn names(config: &MixtralConfig) -> NameMap {
    let (hidden, d) = (config.hidden_size, config.head_dim);
    let (queries, keys) = (config.num_attention_heads * d, config.num_key_value_heads * d);
    let dense_layers = config.dense_layers();
    let mut map = NameMap::default();
    let table = [config.vocab_size, hidden];
    map.same("embed_tokens.weight", "model.embed_tokens.weight", &table);
    for layer in 0..config.num_hidden_layers {
        let (ours, theirs) = (format!("layers.{layer}"), format!("model.layers.{layer}"));
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            map.same(format!("{ours}.{norm}.weight"), format!("{theirs}.{norm}.weight"), &[hidden]);
        }
        let attention = [("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)];
        for (part, out, input) in attention {
            let (ours, theirs) = (format!("{ours}.attention.{part}_proj"), format!("{theirs}.self_attn.{part}_proj"));
            map.same(format!("{ours}.weight"), format!("{theirs}.weight"), &[out, input]);
            if config.attention_bias {
                map.same(format!("{ours}.bias"), format!("{theirs}.bias"), &[out]);
            }
        }
        for part in ["q_norm", "k_norm"].iter().filter(|_| config.has_head_norms()) {
            map.same(format!("{ours}.attention.{part}.weight"), format!("{theirs}.self_attn.{part}.weight"), &[d]);
        }
        match dense_layers.contains(&layer) {
            true => {
                let (ours, theirs) = (format!("{ours}.mlp"), format!("{theirs}.mlp"));
                mlp(&mut map, &ours, &theirs, QWEN, hidden, config.intermediate_size);
            }
            false => experts(&mut map, config, &ours, &theirs),
        }
    }
    map.same("norm.weight", "model.norm.weight", &[hidden]);
    if !config.tie_word_embeddings {
        map.same("lm_head.weight", "lm_head.weight", &table);
    }
    map
}

/// What the matrices of an MLP are called: gate, up, down.
type Matrices = [&'static str; 3];
const MIXTRAL: Matrices = ["w1", "w3", "w2"];
const QWEN: Matrices = ["gate_proj", "up_proj", "down_proj"];

fn experts(map: &mut NameMap, config: &MixtralConfig, ours: &str, theirs: &str) {
    let (theirs, matrices) = match config.variant {
        MixtralVariant::Mixtral => (format!("{theirs}.block_sparse_moe"), MIXTRAL),
        MixtralVariant::Qwen3Moe => (format!("{theirs}.mlp"), QWEN),
    };
    let router = [config.num_experts, config.hidden_size];
    map.same(format!("{ours}.mlp.router.weight"), format!("{theirs}.gate.weight"), &router);
    for expert in 0..config.num_experts {
        let (ours, theirs) = (format!("{ours}.mlp.experts.{expert}"), format!("{theirs}.experts.{expert}"));
        mlp(map, &ours, &theirs, matrices, config.hidden_size, config.expert_size());
    }
}

fn mlp(map: &mut NameMap, ours: &str, theirs: &str, matrices: Matrices, hidden: usize, width: usize) {
    let parts = [("gate", [width, hidden]), ("up", [width, hidden]), ("down", [hidden, width])];
    for ((part, shape), matrix) in parts.into_iter().zip(matrices) {
        map.same(format!("{ours}.{part}_proj.weight"), format!("{theirs}.{matrix}.weight"), &shape);
    }
}

impl MixtralConfig {
    /// Reads the `config.json` of a relative, as transformers 5 or 4 writes it. An absent key has transformers' default,
    /// where all relatives have the same one.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value, variant: MixtralVariant) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        config.expect_model(variant.model_type())?;
        config.expect_or_absent("hidden_act", "silu")?;
        let (hidden_size, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let (rope_theta, rope_scaling) = rope::read(&config)?;
        let common = Self {
            variant,
            vocab_size: config.size("vocab_size")?,
            hidden_size,
            intermediate_size: config.size("intermediate_size")?,
            num_hidden_layers: config.size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: config.size("num_key_value_heads")?,
            num_experts: experts_of(&config)?,
            num_experts_per_tok: config.size("num_experts_per_tok")?,
            router_aux_loss_coef: config.number("router_aux_loss_coef")?.unwrap_or(0.001),
            max_position_embeddings: config.size("max_position_embeddings")?,
            rope_theta,
            rope_scaling,
            rms_norm_eps: config.required_number("rms_norm_eps")?,
            tie_word_embeddings: config.flag("tie_word_embeddings")?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
            attention_dropout: config.number("attention_dropout")?.unwrap_or(0.0),
            ..Self::tiny()
        };
        let read = match variant {
            MixtralVariant::Mixtral => {
                config.expect_number("router_jitter_noise", 0.0, 0.0)?;
                if let Some(window) = config.optional_size("sliding_window")? {
                    return Err(config.unsupported("sliding_window", &window.to_string(), "null"));
                }
                Self { head_dim: config.size_or("head_dim", hidden_size / heads)?, ..common }
            }
            MixtralVariant::Qwen3Moe => {
                config.expect_flag("use_sliding_window", false)?;
                Self {
                    head_dim: config.size("head_dim")?,
                    moe_intermediate_size: Some(config.size("moe_intermediate_size")?),
                    norm_topk_prob: config.flag("norm_topk_prob")?,
                    decoder_sparse_step: config.size_or("decoder_sparse_step", 1)?,
                    mlp_only_layers: config.indices("mlp_only_layers")?.unwrap_or_default(),
                    attention_bias: config.flag("attention_bias")?,
                    ..common
                }
            }
        };
        config.finish(variant.harmless())?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5.
    pub fn to_hf(&self) -> Value {
        let kind = self.variant.model_type();
        let mut config = json!({
            "architectures": [class_of(kind)],
            "model_type": kind,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "router_aux_loss_coef": self.router_aux_loss_coef,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": rope::written(self.rope_theta, self.rope_scaling),
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "attention_dropout": self.attention_dropout,
        });
        match self.variant {
            MixtralVariant::Mixtral => config["sliding_window"] = Value::Null,
            MixtralVariant::Qwen3Moe => {
                config["moe_intermediate_size"] = json!(self.expert_size());
                config["norm_topk_prob"] = json!(self.norm_topk_prob);
                config["decoder_sparse_step"] = json!(self.decoder_sparse_step);
                config["mlp_only_layers"] = json!(self.mlp_only_layers);
                config["attention_bias"] = json!(self.attention_bias);
                config["use_sliding_window"] = json!(false);
            }
        }
        config
    }
}

/// transformers 4 called a Qwen3-MoE's `num_experts`.
fn experts_of(config: &ConfigReader) -> Result<usize, HfError> {
    match (config.optional_size("num_local_experts")?, config.optional_size("num_experts")?) {
        (Some(experts), None) | (None, Some(experts)) => Ok(experts),
        (Some(experts), Some(same)) if experts == same => Ok(experts),
        (Some(experts), Some(_)) => Err(config.unsupported("num_experts", "given twice", &experts.to_string())),
        (None, None) => Err(HfError::Missing { key: "num_local_experts".into() }),
    }
}
