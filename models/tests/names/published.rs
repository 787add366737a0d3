//! Presets are the published models.

use models::hf::parse_config;
use models::{FamilyConfig, LlamaConfig, Mamba2Config, NemotronHConfig};

use crate::parse;

/// `config.json` of version 0.1, whose later versions have no window: all of its keys are known.
#[test]
fn the_first_mistral_is_its_preset() {
    let mistral = r#"{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
        "use_cache": true, "vocab_size": 32000}"#;
    let preset = LlamaConfig { make_vocab_size_divisible_by: 1, ..LlamaConfig::mistral_7b() };
    assert_eq!(FamilyConfig::from_hf(&parse(mistral)).unwrap(), FamilyConfig::Llama(preset));
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
