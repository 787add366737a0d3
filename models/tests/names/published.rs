//! Presets are the published models.

use models::hf::parse_config;
use models::{FamilyConfig, GptConfig, LlamaConfig, Mamba2Config, MixtralConfig, NemotronHConfig};

use crate::parse;

/// `config.json` of published models, word for word: all of their keys are known, and the presets are those models.
#[test]
fn published_configurations_are_the_presets() {
    let preset = |config: LlamaConfig| FamilyConfig::Llama(LlamaConfig { make_vocab_size_divisible_by: 1, ..config });
    let llama = r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}"#;
    assert_eq!(FamilyConfig::from_hf(&parse(llama)).unwrap(), preset(LlamaConfig::llama3_1b()));
    let mistral = r#"{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
        "use_cache": true, "vocab_size": 32000}"#;
    assert_eq!(FamilyConfig::from_hf(&parse(mistral)).unwrap(), preset(LlamaConfig::mistral_7b()));
    let qwen3 = r#"{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"#;
    assert_eq!(FamilyConfig::from_hf(&parse(qwen3)).unwrap(), preset(LlamaConfig::qwen3_0_6b()));
    let preset =
        |config: MixtralConfig| FamilyConfig::Mixtral(MixtralConfig { make_vocab_size_divisible_by: 1, ..config });
    let mixtral = r#"{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}"#;
    assert_eq!(FamilyConfig::from_hf(&parse(mixtral)).unwrap(), preset(MixtralConfig::mixtral_8x7b()));
    let qwen3_moe = r#"{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"#;
    assert_eq!(FamilyConfig::from_hf(&parse(qwen3_moe)).unwrap(), preset(MixtralConfig::qwen3_30b_a3b()));
    let gpt2 = r#"{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257}"#;
    let config = GptConfig::gpt2();
    let config = GptConfig { hidden_dropout: 0.1, attention_dropout: 0.1, make_vocab_size_divisible_by: 1, ..config };
    assert_eq!(FamilyConfig::from_hf(&parse(gpt2)).unwrap(), FamilyConfig::Gpt(config));
}

/// The keys of transformers 4, with infinity as Python writes it, and the sizes of arXiv 2405.21060.
#[test]
fn mamba2_as_python_writes_it() {
    let file = r#"{"architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4,
        "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 768,
        "initializer_range": 0.1, "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 1, "num_heads": 24,
        "num_hidden_layers": 24, "pad_token_id": 0, "rescale_prenorm_residual": false, "residual_in_fp32": true,
        "rms_norm": true, "state_size": 128, "tie_word_embeddings": true, "time_step_floor": 0.0001,
        "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 48,
        "torch_dtype": "float32", "transformers_version": "4.44.0", "use_bias": false, "use_cache": true,
        "use_conv_bias": true, "vocab_size": 50288}"#;
    let read = |file: &str| FamilyConfig::from_hf(&parse_config(file.as_bytes()).unwrap());
    let expected = Mamba2Config { initializer_range: 0.1, residual_in_fp32: true, ..Mamba2Config::mamba2_130m() };
    assert_eq!(read(file).unwrap(), FamilyConfig::Mamba2(expected));
    let narrow = read(&file.replace("Infinity", "0.5")).unwrap();
    assert!(matches!(&narrow, FamilyConfig::Mamba2(config) if config.time_step_limit_max == Some(0.5)));
    assert_eq!(FamilyConfig::from_hf(&narrow.to_hf().unwrap()), Ok(narrow));
    let refused = |from: &str, to: &str| read(&file.replace(from, to)).unwrap_err().to_string();
    assert!(
        refused("\"expand\": 2", "\"expand\": 3")
            .contains("`expand` is 3 for a hidden_size of 768, which this model does not have; nearest legal: 2")
    );
    assert!(refused("[0.0, Infinity]", "[0.0]").contains("a list of two numbers"));
    assert!(
        refused("\"n_groups\": 1", "\"n_groups\": 5")
            .contains("n_groups = 5 does not divide num_heads = 24; nearest legal: 4, 6")
    );
}

/// Nemotron 3 Nano is its preset, and what it would need besides is refused by name.
#[test]
fn nemotron_3_has_experts() {
    let file = include_str!("../../../tests/golden/published/nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16/config.json");
    let read = |file: &str| FamilyConfig::from_hf(&parse_config(file.as_bytes()).unwrap());
    let expected = FamilyConfig::NemotronH(NemotronHConfig::nemotron_3_nano_30b_a3b());
    assert_eq!(read(file), Ok(expected));
    for (from, to, message) in [
        (
            "\"n_shared_experts\": 1",
            "\"n_shared_experts\": 2",
            "`n_shared_experts` is 2, which this model does not have; nearest legal: 1",
        ),
        (
            "\"n_group\": 1",
            "\"moe_latent_size\": 1024",
            "`moe_latent_size` is 1024, which this model does not have; nearest legal: null",
        ),
        (
            "\"n_group\": 1",
            "\"mlp_bias\": true",
            "`mlp_bias` is true, which this model does not have; nearest legal: false",
        ),
        (
            "\"num_experts_per_tok\": 6",
            "\"num_experts_per_tok\": 1",
            "`norm_topk_prob` is true with one expert for each token",
        ),
        ("\"n_group\": 1", "\"n_group\": 3", "n_group = 3 does not divide n_routed_experts = 128; nearest legal: 2, 4"),
        ("MEMEM*", "MOMEM*", "layer 1 is `O`; legal: M (Mamba-2), * (attention), - (MLP), E (experts)"),
    ] {
        let refused = read(&file.replace(from, to)).unwrap_err().to_string();
        assert!(refused.contains(message), "{refused}");
    }
}

/// The keys of NVIDIA's own code, and the two forms of the pattern.
#[test]
fn nemotron_h_in_both_forms() {
    let file = include_str!("../../../tests/golden/published/nvidia--Nemotron-H-8B-Base-8K/config.json");
    let read = |file: &str| FamilyConfig::from_hf(&parse_config(file.as_bytes()).unwrap());
    let expected = FamilyConfig::NemotronH(NemotronHConfig::nemotron_h_8b());
    assert_eq!(read(file), Ok(expected.clone()));
    let (pattern, list) = ("\"hybrid_override_pattern\": \"M-M-M-M*", "\"layers_block_type\": [\"mamba\", \"mlp\"], ");
    let short = read(&file.replace(pattern, "\"hybrid_override_pattern\": \"M-M*")).unwrap_err().to_string();
    assert!(short.contains("`num_hidden_layers` is 52, which this model does not have; nearest legal: 48"), "{short}");
    let differs = read(&file.replace(pattern, &format!("{list}{pattern}"))).unwrap_err().to_string();
    assert!(differs.contains("nearest legal: M-, as layers_block_type says"), "{differs}");
    for (from, to, message) in [
        ("\"relu2\"", "\"silu\"", "`mlp_hidden_act` is silu, which this model does not have; nearest legal: relu2"),
        ("\"sliding_window\": null", "\"sliding_window\": 8", "`sliding_window` is 8"),
        ("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e-06", "`rms_norm_eps` is 0.000001"),
        ("\"use_cache\"", "\"time_step_limit\": [0.0, 0.5], \"use_cache\"", "`time_step_limit` is [0.0, 0.5]"),
        ("\"attention_bias\": false", "\"attention_bias\": true", "`attention_bias` is true"),
        ("\"residual_in_fp32\": false", "\"residual_in_fp32\": true", "`residual_in_fp32` is true"),
    ] {
        let refused = read(&file.replace(from, to)).unwrap_err().to_string();
        assert!(refused.contains(message), "{refused}");
    }
}
