//! Hugging Face's `config.json`: what it says, what is written, what is refused.

use models::layers::{LayerPattern, RopeScaling};
use models::{
    DecoderConfig, FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, MixtralConfig, MixtralVariant, ModelConfig,
};
use serde_json::{Value, json};

use crate::published_files::file;
use crate::{
    DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_V2_LITE, ERNIE, GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES, GLM4, GPT_OSS, GPT2, GRANITE,
    LLAMA2, LLAMA3, MISTRAL, MIXTRAL, OLMO2, OLMO3, OLMOE, PHI3, PHI3_LONGROPE, QWEN2, QWEN3, QWEN3_MOE, QWEN3_NEXT,
    SEED_OSS, SMOLLM3, parse,
};

pub(super) fn llama(text: &str) -> LlamaConfig {
    match FamilyConfig::from_hf(&parse(text)).unwrap() {
        FamilyConfig::Llama(config) => config,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_config_json_says() {
    let llama3 = llama(LLAMA3);
    assert_eq!((llama3.num_key_value_heads, llama3.head_dim, llama3.rope_theta), (4, 4, 500_000.0));
    let Some(RopeScaling::Llama3(scaling)) = llama3.rope_scaling else { panic!("{:?}", llama3.rope_scaling) };
    assert_eq!(scaling.original_max_position_embeddings, 64);
    assert_eq!(llama3.max_position_embeddings, 128);
    let mistral = llama(MISTRAL);
    assert_eq!((mistral.variant, mistral.sliding_window), (LlamaVariant::Mistral, Some(16)));
    let qwen3 = llama(QWEN3);
    assert_eq!((qwen3.variant, qwen3.head_dim, qwen3.sliding_window), (LlamaVariant::Qwen3, 8, None));
    let mixtral = MixtralConfig::from_hf(&parse(MIXTRAL), MixtralVariant::Mixtral).unwrap();
    assert_eq!((mixtral.num_experts, mixtral.num_experts_per_tok, mixtral.expert_size()), (8, 2, 48));
    assert_eq!((mixtral.head_dim, mixtral.rope_theta), (4, 1_000_000.0));
    let qwen3_moe = MixtralConfig::from_hf(&parse(QWEN3_MOE), MixtralVariant::Qwen3Moe).unwrap();
    assert_eq!((qwen3_moe.num_experts, qwen3_moe.expert_size(), qwen3_moe.head_dim), (8, 24, 8));
    assert!(qwen3_moe.norm_topk_prob && qwen3_moe.dense_layers().is_empty());
    let gpt = GptConfig::from_hf(&parse(GPT2)).unwrap();
    assert_eq!((gpt.intermediate_size, gpt.max_position_embeddings, gpt.tie_word_embeddings), (128, 128, true));
}

/// A configuration that was read is written again as it was, key by key; one that was made here says the same when it
/// is read.
#[test]
fn config_json_round_trip() {
    let relatives = [QWEN2, SMOLLM3, OLMO2, GEMMA2, GEMMA3, PHI3, GLM4, GPT_OSS, QWEN3_NEXT, DEEPSEEK, DEEPSEEK_V2];
    let relatives = relatives.into_iter().chain([DEEPSEEK_V2_LITE, ERNIE, GEMMA, GRANITE, OLMO3, OLMOE, SEED_OSS]);
    for text in [LLAMA2, LLAMA3, MISTRAL, QWEN3, MIXTRAL, QWEN3_MOE, GPT2].into_iter().chain(relatives) {
        let original = parse(text);
        let config = FamilyConfig::from_hf(&original).unwrap();
        assert_eq!(config.to_hf_like(&original).unwrap(), original);
        assert_eq!(FamilyConfig::from_hf(&config.to_hf().unwrap()).unwrap(), config);
        assert_eq!(serde_json::from_value::<FamilyConfig>(serde_json::to_value(&config).unwrap()).unwrap(), config);
    }
    let tied = LlamaConfig { tie_word_embeddings: true, rope_scaling: None, attention_bias: true, ..llama(LLAMA3) };
    let written = FamilyConfig::Llama(tied.clone()).to_hf_like(&parse(LLAMA3)).unwrap();
    assert_eq!(FamilyConfig::from_hf(&written).unwrap(), FamilyConfig::Llama(tied));
    assert_eq!((&written["bos_token_id"], &written["attention_bias"]), (&json!(1), &json!(true)));
}

/// The message for a file in which one key was changed.
pub fn refuse(base: &str, key: &str, value: Value) -> String {
    let mut config = parse(base);
    config[key] = value;
    FamilyConfig::from_hf(&config).unwrap_err().to_string()
}

#[test]
fn what_the_models_lack_is_refused() {
    assert_eq!(
        refuse(GPT2, "scale_attn_weights", json!(false)),
        "config.json: `scale_attn_weights` is false, which this model does not have; nearest legal: true"
    );
    assert!(refuse(LLAMA3, "hidden_act", json!("gelu")).contains("nearest legal: silu"));
    for kind in ["axial", "proportional"] {
        let said = refuse(LLAMA3, "rope_parameters", json!({"rope_type": kind, "factor": 2.0}));
        let words = format!(
            "`rope_type` is {kind}, which this model does not have; nearest legal: default, linear, dynamic, llama3, yarn, longrope"
        );
        assert!(said.contains(&words), "{said}");
    }
    assert_eq!(refuse(LLAMA3, "rope_parameters", json!({"rope_type": "linear"})), "config.json: `factor` is missing");
    let yarn = json!({"rope_type": "yarn", "original_max_position_embeddings": 64});
    assert_eq!(refuse(LLAMA3, "rope_parameters", yarn), "config.json: `factor` is missing");
    assert!(refuse(LLAMA3, "rope_scaling", json!({"rope_type": "default"})).contains("`rope_scaling` is given twice"));
    assert!(refuse(QWEN3, "layer_types", json!(["sliding_attention"])).contains("nearest legal: 4 x full_attention"));
    assert!(refuse(MIXTRAL, "router_jitter_noise", json!(0.1)).contains("nearest legal: 0"));
    assert!(refuse(QWEN3_MOE, "num_experts", json!(4)).contains("`num_experts` is given twice"));
    assert!(refuse(QWEN3_MOE, "mlp_only_layers", json!([-1])).contains("`mlp_only_layers` is [-1], not a list"));
    assert!(refuse(LLAMA2, "rope_interleaved", json!(true)).contains("`rope_interleaved` is true"));
    assert!(refuse(GEMMA2, "sliding_window_size", json!(3)).contains("`sliding_window_size` is 3"));
    assert_eq!(refuse(LLAMA3, "vocab_size", json!(-1)), "config.json: `vocab_size` is -1, not a positive integer");
    assert_eq!(refuse(LLAMA3, "hidden_size", Value::Null), "config.json: `hidden_size` is missing");
}

#[test]
fn a_key_that_nobody_knows_is_refused() {
    let message = refuse(LLAMA3, "logit_softcap", json!(30.0));
    assert!(message.starts_with("config.json: `logit_softcap` is not a key that this model knows"), "{message}");
    assert!(message.contains("rms_norm_eps") && message.contains("use_cache"), "{message}");
    assert!(refuse(LLAMA3, "sliding_window", json!(16)).contains("`sliding_window` is not a key"));
    assert!(refuse(MIXTRAL, "norm_topk_prob", json!(true)).contains("`norm_topk_prob` is not a key"));
    let rope = json!({"rope_type": "default", "rope_theta": 1e4, "beta_fast": 32});
    assert!(refuse(QWEN3, "rope_parameters", rope).contains("`beta_fast` is not a key"));
    // transformers gives a Mistral without this key a window of 4096.
    let mut config = parse(MISTRAL);
    config.as_object_mut().unwrap().remove("sliding_window");
    assert_eq!(FamilyConfig::from_hf(&config).unwrap_err().to_string(), "config.json: `sliding_window` is missing");
}

/// Keys that transformers writes after it has read a GGUF file, and that its first versions always wrote.
#[test]
fn keys_of_gguf_files_and_of_old_versions_change_nothing() {
    let with = |keys: Value| {
        let mut config = parse(GEMMA3);
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        FamilyConfig::from_hf(&config)
    };
    let plain = with(json!({})).unwrap();
    assert_eq!(with(json!({"_model_name_or_path": "Gemma 3 270m", "unk_token_id": 3})).unwrap(), plain);
    let old = json!({"output_past": true, "pruned_heads": {}, "tokenizer_class": "Any", "use_bfloat16": false});
    assert_eq!(with(old).unwrap(), plain);
    let error = with(json!({"pruned_heads": {"0": [1]}})).unwrap_err().to_string();
    assert!(error.contains("`pruned_heads` is not a key that this model knows"), "{error}");
}

/// `PretrainedConfig.to_dict` of transformers 4, which programs that save a whole configuration write, and Unsloth's marks.
#[test]
fn whole_configurations_of_transformers_4_are_read() {
    let whole = r#"{
        "_attn_implementation_autoset": false, "_commit_hash": null, "_name_or_path": "", "add_cross_attention": false,
        "bad_words_ids": null, "begin_suppress_tokens": null, "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": null, "decoder_start_token_id": null, "diversity_penalty": 0.0, "do_sample": false,
        "early_stopping": false, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": null,
        "finetuning_task": null, "forced_bos_token_id": null, "forced_eos_token_id": null,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": false, "is_encoder_decoder": false,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
        "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
        "output_attentions": false, "output_hidden_states": false, "output_scores": false, "prefix": null,
        "problem_type": null, "pruned_heads": {}, "remove_invalid_values": false, "repetition_penalty": 1.0,
        "return_dict": true, "return_dict_in_generate": false, "sep_token_id": null, "suppress_tokens": null,
        "task_specific_params": null, "temperature": 1.0, "tf_legacy_loss": false, "tie_encoder_decoder": false,
        "tokenizer_class": null, "top_k": 50, "top_p": 1.0, "torchscript": false, "typical_p": 1.0, "use_bfloat16": false,
        "model_name": "unsloth/Llama-3.2-1B", "unsloth_fixed": true, "unsloth_version": "2026.3.3"
    }"#;
    for file in [LLAMA2, LLAMA3, MISTRAL, QWEN3, GEMMA3, MIXTRAL] {
        let mut config = parse(file);
        let plain = FamilyConfig::from_hf(&config).unwrap();
        config.as_object_mut().unwrap().extend(parse(whole).as_object().unwrap().clone());
        assert_eq!(FamilyConfig::from_hf(&config).unwrap(), plain);
    }
    for (key, value) in [
        ("is_encoder_decoder", json!(true)),
        ("add_cross_attention", json!(true)),
        ("cross_attention_hidden_size", json!(8)),
    ] {
        assert!(refuse(LLAMA3, key, value).contains(&format!("`{key}` is not a key")), "{key}");
    }
}

#[test]
fn an_architecture_that_is_not_here_is_refused() {
    let message = refuse(LLAMA3, "model_type", json!("mamba"));
    assert_eq!(
        message,
        "config.json: there is no model for `model_type` mamba; nearest legal: mamba2; legal: llama, mistral, qwen2, qwen3, \
         smollm3, olmo2, olmo3, gemma, gemma2, gemma3_text, gemma3, phi3, glm4, seed_oss, ernie4_5, granite, mixtral, qwen2_moe, \
         qwen3_moe, qwen3_next, glm4_moe, olmoe, deepseek, gpt_oss, gpt2, deepseek_v3, kimi_k2, deepseek_v2, mamba2, nemotron_h"
    );
    assert!(refuse(LLAMA3, "model_type", json!("lama3")).contains("nearest legal: llama; legal"));
    let of_state_spaces = json!({"d_model": 2560, "n_layer": 64, "ssm_cfg": {"layer": "Mamba2"}});
    let message = FamilyConfig::from_hf(&of_state_spaces).unwrap_err().to_string();
    assert!(message.contains("file of state-spaces' own code (mamba_ssm)"), "{message}");
    let message = FamilyConfig::from_hf(&json!({"d_model": 2560})).unwrap_err().to_string();
    assert_eq!(message, "config.json: `model_type` is missing");
    let message = refuse(LLAMA3, "architectures", json!(["LlamaForSequenceClassification"]));
    assert!(message.contains("`architectures` LlamaForSequenceClassification; supported: llama"), "{message}");
}

/// Patterns of layers as lists, as keys and by default; whatever is no pattern is refused.
#[test]
fn layers_that_differ() {
    let gemma = llama(GEMMA3);
    assert_eq!((gemma.sliding_window, gemma.sliding_window_pattern.clone()), (Some(8), Some(LayerPattern::Every(4))));
    assert_eq!((gemma.rope_theta, gemma.rope_local_base_freq), (1e6, Some(1e4)));
    assert_eq!((0..4).map(|layer| gemma.window(layer).is_some()).collect::<Vec<_>>(), [true, true, true, false]);
    // As transformers 4 wrote it.
    let mut old = parse(GEMMA3);
    let keys = old.as_object_mut().unwrap();
    keys.retain(|key, _| !["layer_types", "rope_parameters", "_sliding_window_pattern"].contains(&key.as_str()));
    keys.extend([("sliding_window_pattern", json!(4)), ("rope_theta", json!(1e6))].map(|(k, v)| (k.to_string(), v)));
    keys.insert("rope_local_base_freq".into(), json!(1e4));
    assert_eq!(llama(&old.to_string()), gemma);
    let unknown = json!(["full_attention", "chunked_attention", "sliding_attention", "full_attention"]);
    assert!(refuse(GEMMA2, "layer_types", unknown).contains("`layer_types` is full_attention, chunked"));
    let smollm3 = llama(SMOLLM3);
    assert_eq!(smollm3.no_rope_layer_interval, Some(LayerPattern::Every(4)));
    assert!(refuse(SMOLLM3, "no_rope_layers", json!([1, 0, 1])).contains("nearest legal: 4 times 0 or 1"));
    let all = FamilyConfig::from_hf(&{
        let mut config = parse(SMOLLM3);
        config["no_rope_layers"] = json!([1, 1, 1, 1]);
        config
    });
    let Ok(FamilyConfig::Llama(all)) = all else { panic!("{all:?}") };
    assert_eq!(all.no_rope_layer_interval, None);
    assert_eq!(llama(GLM4).partial_rotary_factor, Some(0.5));
}

/// What a relative does not have is refused by name.
#[test]
fn keys_of_other_relatives_are_refused() {
    assert!(refuse(QWEN2, "attention_bias", json!(true)).contains("`attention_bias` is true"));
    assert!(refuse(GEMMA3, "use_bidirectional_attention", json!(true)).contains("nearest legal: false"));
    assert!(refuse(GEMMA3, "attn_logit_softcapping", json!(20.0)).contains("`attn_logit_softcapping` is given"));
    assert!(refuse(GEMMA2, "hidden_activation", json!("gelu")).contains("nearest legal: gelu_pytorch_tanh"));
    assert!(refuse(GEMMA2, "sliding_window", Value::Null).contains("`sliding_window` is missing"));
    assert!(
        refuse(GEMMA2, "attn_logit_softcapping", json!(-1.0))
            .contains("attn_logit_softcapping = -1 is not at least 0.001")
    );
    assert!(refuse(OLMO2, "clip_qkv", json!(8.0)).contains("`clip_qkv` is not a key"));
    assert!(refuse(PHI3, "resid_pdrop", json!(0.1)).contains("`resid_pdrop` is 0.1"));
    let long = vec![1.0; 3];
    let longrope = |short: &[f64]| json!({"rope_type": "longrope", "short_factor": short, "long_factor": long});
    let said = refuse(PHI3_LONGROPE, "rope_parameters", longrope(&[1.0]));
    assert!(
        said.contains("short_factor = 1 is not a number for each pair of rotated features, head_dim × partial_rotary_factor / 2 of them; nearest legal: 3"),
        "{said}"
    );
    let said = refuse(PHI3_LONGROPE, "rope_parameters", longrope(&[1.0, 0.0, 1.0]));
    assert!(said.contains("short_factor = 0 is not at least 0.01"), "{said}");
    let rope = json!({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2});
    assert!(refuse(GLM4, "rope_parameters", rope.clone()).contains("partial_rotary_factor"));
    assert!(refuse(LLAMA3, "rope_parameters", rope).contains("`partial_rotary_factor` is not a key"));
    let tiny = LlamaConfig { no_rope_layer_interval: Some(LayerPattern::Every(4)), ..LlamaConfig::tiny() };
    let said = tiny.check().unwrap_err().to_string();
    assert_eq!(said, "no_rope_layer_interval = 4: models of smollm3 have it, this model is llama; nearest legal: none");
}

/// A key that is not there has the default of transformers' class, `null` is none.
#[test]
fn gemmas_soft_caps_and_scale_have_the_defaults_of_their_class() {
    const KEYS: [&str; 3] = ["query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"];
    for (text, absent) in [(GEMMA2, [Some(256.0), Some(50.0), Some(30.0)]), (GEMMA3, [Some(256.0), None, None])] {
        let read = |change: fn(&mut Value)| {
            let mut config = parse(text);
            change(&mut config);
            let of = llama(&config.to_string());
            assert_eq!(FamilyConfig::Llama(of.clone()).to_hf_like(&config).unwrap(), config);
            [of.query_pre_attn_scalar, of.attn_logit_softcapping, of.final_logit_softcapping]
        };
        let without = |config: &mut Value| config.as_object_mut().unwrap().retain(|key, _| !KEYS.contains(&&**key));
        assert_eq!(read(without), absent);
        assert_eq!(read(|config| KEYS.iter().for_each(|key| config[*key] = Value::Null)), [None; 3]);
    }
}

/// transformers' Gemmas refuse `null` and `256.0`.
#[test]
fn gemmas_scale_is_written_as_a_whole_number() {
    let gemma = || llama(GEMMA3);
    for (scalar, written) in [(None, json!(16)), (Some(256.0), json!(256))] {
        let config = FamilyConfig::Llama(LlamaConfig { query_pre_attn_scalar: scalar, ..gemma() });
        assert_eq!(config.to_hf().unwrap()["query_pre_attn_scalar"].to_string(), written.to_string());
    }
    let fraction = FamilyConfig::Llama(LlamaConfig { query_pre_attn_scalar: Some(24.6), ..gemma() });
    let refused = fraction.to_hf().unwrap_err().to_string();
    assert!(
        refused.contains("`query_pre_attn_scalar` is 24.6, which this model does not have; nearest legal: 25"),
        "{refused}"
    );
}

/// Of a Gemma 3 with images the language model is read, and what is written of it is one.
#[test]
fn gemma_3_with_images_is_its_language_model() {
    let original = parse(GEMMA3_IMAGES);
    let config = llama(GEMMA3_IMAGES);
    assert_eq!(
        (config.variant, config.sliding_window, config.query_pre_attn_scalar),
        (LlamaVariant::Gemma3, Some(8), Some(256.0))
    );
    assert_eq!((config.max_position_embeddings, config.rope_local_base_freq), (131_072, Some(1e4)));
    assert_eq!(
        (0..6).map(|layer| config.window(layer).is_none()).collect::<Vec<_>>(),
        [false, false, false, false, false, true]
    );
    let family = FamilyConfig::Llama(config);
    let written = family.to_hf_like(&original).unwrap();
    assert_eq!(
        (&written["model_type"], &written["architectures"]),
        (&json!("gemma3_text"), &json!(["Gemma3ForCausalLM"]))
    );
    assert!(written.get("vision_config").is_none() && written.get("text_config").is_none(), "{written}");
    assert_eq!(FamilyConfig::from_hf(&written), Ok(family));
    let refused = |key: &str, value: Value| {
        let mut file = original.clone();
        file["text_config"][key] = value;
        FamilyConfig::from_hf(&file).unwrap_err().to_string()
    };
    assert!(
        refused("use_bidirectional_attention", json!(true))
            .contains("`text_config.use_bidirectional_attention` is true")
    );
    assert!(refused("altup_num_inputs", json!(4)).contains("`text_config.altup_num_inputs` is not a key"));
}

#[test]
fn attention_dropout_is_read_and_written() {
    for (base, key) in [(GPT2, "attn_pdrop"), (LLAMA3, "attention_dropout"), (MISTRAL, "attention_dropout")] {
        let mut original = parse(base);
        original[key] = json!(0.1);
        let config = FamilyConfig::from_hf(&original).unwrap();
        assert_eq!(config.to_hf().unwrap()[key], json!(0.1));
        assert_eq!(config.check(), Ok(()));
    }
}

/// Its biases are no key of transformers 4.
#[test]
fn qwen2_moe_is_read_and_written() {
    let file = file("Qwen/Qwen1.5-MoE-A2.7B-Chat");
    let FamilyConfig::Mixtral(config) = FamilyConfig::from_hf(&file).unwrap() else { panic!("no experts") };
    let biases = config.block(0).attention().unwrap().input.bias;
    assert_eq!((config.shared_expert(), config.expert_size(), biases), (Some(5632), 1408, true));
    let names = config.hf_names();
    assert!(names.iter().any(|(_, foreign)| foreign.name == "model.layers.3.mlp.shared_expert.up_proj.weight"));
    let gate = names.get("layers.3.mlp.shared_experts.gate.weight").unwrap();
    assert_eq!((gate.name.as_str(), &gate.shape[..]), ("model.layers.3.mlp.shared_expert_gate.weight", &[1, 2048][..]));
    let family = FamilyConfig::Mixtral(config);
    assert_eq!(FamilyConfig::from_hf(&family.to_hf().unwrap()).unwrap(), family);
}
