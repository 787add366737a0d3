//! Nemotron-H in Hugging Face's words: names of tensors and `config.json`.

use serde_json::{Value, json};

use super::config::{HybridLayer, NemotronHConfig};
use crate::hf::{ConfigReader, HfArchitecture, HfError, keys, written};

/// What Hugging Face calls it.
pub(super) const ARCHITECTURE: HfArchitecture = HfArchitecture::new("nemotron_h", "NemotronHForCausalLM");

/// Keys that say how a new model begins and how positions are chunked, of experts in a model without them and of
/// multi-token prediction, whose modules are not read, and `expand`, next to which the heads have sizes of their own.
const HARMLESS: [&str; 25] = keys![
    "auto_map" "chunk_size" "expand" "mamba_ssm_cache_dtype" "moe_intermediate_size" "moe_latent_size"
    "moe_shared_expert_intermediate_size" "moe_shared_expert_overlap" "mtp_hybrid_override_pattern"
    "mtp_layers_block_type" "n_group" "n_routed_experts" "n_shared_experts" "norm_topk_prob" "num_experts_per_tok"
    "num_logits_to_keep" "num_nextn_predict_layers" "output_router_logits" "rescale_prenorm_residual"
    "routed_scaling_factor" "time_step_floor" "time_step_max" "time_step_min" "topk_group"
    "use_mamba_kernels"
];

/// The smallest step size of transformers, which takes the key `time_step_min` for it. Megatron-LM and NVIDIA's own code take
/// the key for that of a new model and have no smallest one, so files say that it is below every step.
const NO_SMALLEST_STEP: f64 = 1e-9;

/// transformers' words for the layers, those of older files too.
const KINDS: [(char, &str, &str); 4] = [
    ('M', "linear_attention", "mamba"),
    ('*', "full_attention", "attention"),
    ('-', "mlp", "mlp"),
    ('E', "moe", "moe"),
];

/// What files do not have.
const OURS: [&str; 7] = keys![
    "hidden_dropout" "make_vocab_size_divisible_by" "moe_router_bias_update_rate" "router_aux_loss_coef"
    "router_balance" "moe_capacity" "moe_dispatcher"
];
/// What the files of models without experts do not have either.
const OF_EXPERTS: [&str; 8] = keys![
    "moe_intermediate_size" "moe_shared_expert_intermediate_size" "n_routed_experts" "num_experts_per_tok" "n_group"
    "topk_group" "norm_topk_prob" "routed_scaling_factor"
];

impl NemotronHConfig {
    /// Reads a `config.json` with `"model_type": "nemotron_h"`. An absent key has transformers' default.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        config.expect_model(ARCHITECTURE)?;
        config.expect_or_absent("mamba_hidden_act", "silu")?;
        config.expect_or_absent("mlp_hidden_act", "relu2")?;
        for key in ["attention_bias", "mamba_proj_bias", "residual_in_fp32"] {
            config.expect_flag(key, false)?;
        }
        config.expect_number("hidden_dropout", 0.0, 0.0)?;
        if let Some(window) = config.optional_size("sliding_window")? {
            return Err(config.unsupported("sliding_window", &window.to_string(), "null"));
        }
        let steps = config.limits("time_step_limit")?.unwrap_or([0.0, f64::INFINITY]);
        if steps != [0.0, f64::INFINITY] {
            return Err(config.unsupported("time_step_limit", &format!("{steps:?}"), "[0.0, Infinity]"));
        }
        let pattern = read_pattern(&config)?;
        let layers = pattern.chars().count();
        let epsilon = config.number("layer_norm_epsilon")?.unwrap_or(1e-5);
        // Published files name both.
        config.expect_number("rms_norm_eps", epsilon, epsilon)?;
        config.expect_number("num_hidden_layers", layers as f64, layers as f64)?;
        let head_dim = config.optional_size("head_dim")?.or(config.optional_size("attention_head_dim")?);
        let read = Self {
            vocab_size: config.size_or("vocab_size", 131_072)?,
            hidden_size: config.size_or("hidden_size", 4096)?,
            hybrid_override_pattern: pattern,
            num_attention_heads: config.size_or("num_attention_heads", 32)?,
            num_key_value_heads: config.size_or("num_key_value_heads", 8)?,
            head_dim: head_dim.unwrap_or(128),
            intermediate_size: config.size_or("intermediate_size", 21_504)?,
            mamba_num_heads: config.size_or("mamba_num_heads", 128)?,
            mamba_head_dim: config.size_or("mamba_head_dim", 64)?,
            ssm_state_size: config.size_or("ssm_state_size", 128)?,
            n_groups: config.size_or("n_groups", 8)?,
            conv_kernel: config.size_or("conv_kernel", 4)?,
            use_conv_bias: config.flag_or("use_conv_bias", true)?,
            use_bias: config.flag("use_bias")?,
            mlp_bias: config.flag("mlp_bias")?,
            max_position_embeddings: config.size_or("max_position_embeddings", 4096)?,
            layer_norm_epsilon: epsilon,
            tie_word_embeddings: config.flag("tie_word_embeddings")?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
            hidden_dropout: 0.0,
            attention_dropout: config.number("attention_dropout")?.unwrap_or(0.0),
            make_vocab_size_divisible_by: 1,
            ..Self::tiny()
        };
        let read = if read.has_experts() { read.with_experts(&config)? } else { read };
        config.finish(&HARMLESS)?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5, with the pattern that other programs read.
    pub fn to_hf(&self) -> Value {
        let word = |layer| match self.kind(layer) {
            HybridLayer::Mamba2 => KINDS[0].1,
            HybridLayer::Attention => KINDS[1].1,
            HybridLayer::Mlp => KINDS[2].1,
            HybridLayer::Moe => KINDS[3].1,
        };
        let mut further = json!({
            "architectures": [ARCHITECTURE.class],
            "model_type": "nemotron_h",
            "num_hidden_layers": self.num_hidden_layers(),
            "layers_block_type": (0..self.num_hidden_layers()).map(word).collect::<Vec<_>>(),
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "time_step_min": NO_SMALLEST_STEP,
        });
        if self.has_experts() {
            further["n_shared_experts"] = json!(1);
            further["norm_topk_prob"] = json!(self.norm_topk_prob && self.num_experts_per_tok > 1);
            return written(self, &OURS, further);
        }
        written(self, &[&OURS[..], &OF_EXPERTS].concat(), further)
    }
}

impl NemotronHConfig {
    /// The same with the experts of the file. Those in a latent space, as larger models of the series have them, are
    /// refused.
    fn with_experts(self, config: &ConfigReader) -> Result<Self, HfError> {
        if let Some(size) = config.optional_size("moe_latent_size")? {
            return Err(config.unsupported("moe_latent_size", &size.to_string(), "null"));
        }
        config.expect_flag("mlp_bias", false)?;
        // transformers' shared expert is one MLP, whatever this number is.
        config.expect_number("n_shared_experts", 1.0, 1.0)?;
        let top_k = config.size_or("num_experts_per_tok", 2)?;
        Ok(Self {
            moe_intermediate_size: config.size_or("moe_intermediate_size", 7688)?,
            moe_shared_expert_intermediate_size: config.size_or("moe_shared_expert_intermediate_size", 7688)?,
            n_routed_experts: config.size_or("n_routed_experts", 8)?,
            num_experts_per_tok: top_k,
            n_group: config.size_or("n_group", 1)?,
            topk_group: config.size_or("topk_group", 1)?,
            norm_topk_prob: config.norm_topk_prob(top_k)?,
            routed_scaling_factor: config.number("routed_scaling_factor")?.unwrap_or(1.0),
            ..self
        })
    }
}

/// The pattern of `hybrid_override_pattern` or of the list `layers_block_type`, which must agree if both are there.
fn read_pattern(config: &ConfigReader) -> Result<String, HfError> {
    let pattern = config.text("hybrid_override_pattern")?;
    let Some(list) = config.texts("layers_block_type")? else {
        return Ok(pattern.ok_or_else(|| HfError::Missing { key: "hybrid_override_pattern".into() })?.into());
    };
    let character = |word: &str| KINDS.iter().find(|(_, new, old)| [*new, *old].contains(&word)).map(|kind| kind.0);
    let legal = "linear_attention, full_attention, mlp, moe";
    let read = |word: &&str| character(word).ok_or_else(|| config.unsupported("layers_block_type", word, legal));
    let of_list: String = list.iter().map(read).collect::<Result<_, _>>()?;
    match pattern {
        Some(pattern) if pattern != of_list => Err(config.unsupported(
            "hybrid_override_pattern",
            pattern,
            &format!("{of_list}, as layers_block_type says"),
        )),
        _ => Ok(of_list),
    }
}
