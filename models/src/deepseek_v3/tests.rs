//! Names and configurations against a checkpoint of transformers and published files.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::DeepSeekV3Config;
use crate::causal_lm::ModelConfig;
use crate::family::FamilyConfig;
use crate::layers::BalanceOver;
use crate::names::NameMap;

const CONFIG: &str = include_str!("../../../tests/golden/hf/deepseek_v3/config.json");
const MODEL: &[u8] = include_bytes!("../../../tests/golden/hf/deepseek_v3/model.safetensors");

/// As DeepSeek published it.
const PUBLISHED: &str = include_str!("../../../tests/golden/published/deepseek-ai--DeepSeek-R1/config.json");

/// As Moonshot published it.
const MOONLIGHT: &str = r#"{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11264, "kv_lora_rank": 512, "max_position_embeddings": 8192, "model_type": "deepseek_v3",
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": true, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": null,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": true,
    "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0", "use_cache": true, "v_head_dim": 128, "vocab_size": 163840}"#;

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn read(text: &str) -> DeepSeekV3Config {
    DeepSeekV3Config::from_hf(&parse(text)).unwrap()
}

/// Tensors of the map's shapes in which every element is another number.
fn numbered(map: &NameMap) -> BTreeMap<String, HostTensor> {
    let shapes: BTreeMap<&str, &[usize]> = map.iter().map(|(_, f)| (f.name.as_str(), f.shape.as_slice())).collect();
    let mut next = 0;
    let mut fill = |shape: &[usize]| {
        let first = next;
        next += shape.iter().product::<usize>();
        HostTensor { shape: shape.to_vec(), data: (first..next).map(|number| number as f64).collect() }
    };
    shapes.into_iter().map(|(name, shape)| (name.to_string(), fill(shape))).collect()
}

#[test]
fn moonlight_is_its_preset() {
    let unpadded = DeepSeekV3Config { make_vocab_size_divisible_by: 1, ..DeepSeekV3Config::moonlight_16b() };
    assert_eq!(read(MOONLIGHT), unpadded);
}

/// The keys of DeepSeek's own code are used, and written again.
#[test]
fn the_load_balancing_loss_is_that_of_the_file() {
    let with = |keys: &[(&str, Value)]| {
        let mut config = parse(MOONLIGHT);
        let fields = config.as_object_mut().unwrap();
        fields.remove("aux_loss_alpha");
        fields.remove("seq_aux");
        fields.extend(keys.iter().map(|(key, value)| (key.to_string(), value.clone())));
        DeepSeekV3Config::from_hf(&config)
    };
    let balance = |keys: &[(&str, Value)]| {
        let read = with(keys).unwrap();
        assert_eq!(DeepSeekV3Config::from_hf(&read.to_hf()).unwrap(), read, "{keys:?}");
        (read.router_aux_loss_coef, read.router_balance)
    };
    assert_eq!(read(MOONLIGHT).to_hf()["aux_loss_alpha"], json!(0.001));
    assert_eq!(balance(&[]), (0.0001, BalanceOver::Sequence));
    assert_eq!(balance(&[("aux_loss_alpha", json!(0.001))]), (0.001, BalanceOver::Sequence));
    assert_eq!(balance(&[("router_aux_loss_coef", json!(0.02))]), (0.02, BalanceOver::Sequence));
    let plain = [("aux_loss_alpha", json!(0.5)), ("seq_aux", json!(false)), ("router_aux_loss_coef", json!(0.5))];
    assert_eq!(balance(&plain), (0.5, BalanceOver::MicroBatch));
    let contradiction = [("aux_loss_alpha", json!(0.5)), ("router_aux_loss_coef", json!(0.1))];
    let refused = with(&contradiction).unwrap_err().to_string();
    assert!(refused.contains("`router_aux_loss_coef` is 0.1") && refused.contains("aux_loss_alpha (0.5)"), "{refused}");
    let negative = FamilyConfig::DeepSeekV3(with(&[("aux_loss_alpha", json!(-1))]).unwrap()).to_hf().unwrap();
    let refused = FamilyConfig::from_hf(&negative).unwrap_err().to_string();
    assert_eq!(refused, "config.json: router_aux_loss_coef = -1 is not at least 0; nearest legal: 0");
}

#[test]
fn config_json_round_trip() {
    for text in [CONFIG, PUBLISHED, MOONLIGHT] {
        let (mut original, config) = (parse(text), FamilyConfig::from_hf(&parse(text)).unwrap());
        // Weights are written as bf16.
        original.as_object_mut().unwrap().remove("quantization_config");
        assert_eq!(config.to_hf_like(&parse(text)).unwrap(), original);
        assert_eq!(FamilyConfig::from_hf(&config.to_hf().unwrap()).unwrap(), config);
        assert_eq!(serde_json::from_value::<FamilyConfig>(serde_json::to_value(&config).unwrap()).unwrap(), config);
    }
}

#[test]
fn what_the_model_lacks_is_refused() {
    let refuse = |key: &str, value: Value| {
        let mut config = parse(PUBLISHED);
        config[key] = value;
        DeepSeekV3Config::from_hf(&config).unwrap_err().to_string()
    };
    assert!(refuse("scoring_func", json!("softmax")).contains("`scoring_func` is softmax"));
    assert!(refuse("topk_method", json!("greedy")).contains("nearest legal: noaux_tc"));
    assert!(refuse("attention_bias", json!(true)).contains("`attention_bias` is true"));
    assert!(refuse("tie_word_embeddings", json!(true)).contains("`tie_word_embeddings` is true"));
    assert!(refuse("qk_head_dim", json!(128)).contains("nearest legal: 192"));
    assert!(refuse("first_k_dense_replace", json!(-1)).contains("`first_k_dense_replace` is -1"));
    let quantised = refuse("quantization_config", json!({"quant_method": "awq"}));
    assert!(quantised.contains("stored in awq") && quantised.contains("Dequantise them to bf16 first"), "{quantised}");
    assert!(refuse("n_routed_experts", json!(1u64 << 31)).contains("`n_routed_experts` is 2147483648, more than"));
    assert!(refuse("rope_scaling", json!({"type": "dynamic", "factor": 2})).contains("`rope_type` is dynamic"));
    let llama3 = json!({"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 64});
    assert!(refuse("rope_scaling", llama3).contains("nearest legal: default, yarn"));
}

/// The configuration speaks of a module of multi-token prediction, the file has none.
#[test]
fn names_are_those_of_transformers() {
    let file = SafeTensors::deserialize(MODEL).unwrap();
    let names: BTreeMap<String, Vec<usize>> =
        file.iter().map(|(name, view)| (name.to_string(), view.shape().to_vec())).collect();
    let family = FamilyConfig::DeepSeekV3(read(CONFIG));
    let FamilyConfig::DeepSeekV3(present) = family.clone().hf_present(|name| names.contains_key(name)) else {
        panic!()
    };
    assert_eq!((read(CONFIG).num_nextn_predict_layers, present.num_nextn_predict_layers), (1, 0));
    let theirs = numbered(&present.hf_names());
    assert_eq!(
        theirs.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect::<BTreeMap<_, _>>(),
        names
    );
    // With the module's tensors, and the copies that the published files have, nothing is taken away or left over.
    let whole = read(CONFIG).hf_names();
    let published = |name: &str| names.contains_key(name) || name.starts_with("model.layers.4.");
    assert!(whole.iter().all(|(_, foreign)| published(&foreign.name)));
    assert_eq!(family.clone().hf_present(published), family);
    assert!(family.hf_is_derived("model.layers.4.embed_tokens.weight"));
    assert!(family.hf_is_derived("model.layers.4.shared_head.head.weight"));
    assert!(whole.iter().all(|(_, foreign)| !family.hf_is_derived(&foreign.name)));
}

/// Names and matrix rows, the module of multi-token prediction among them, come back as they were.
#[test]
fn weights_go_to_other_systems_and_back() {
    let without_latent = DeepSeekV3Config { q_lora_rank: None, n_shared_experts: 0, ..DeepSeekV3Config::tiny() };
    for config in [DeepSeekV3Config::tiny(), without_latent] {
        for map in [config.hf_names(), config.megatron_names()] {
            let theirs = numbered(&map);
            let ours = map.import(&theirs).unwrap();
            assert_eq!(map.export(&ours).unwrap(), theirs);
            assert!(ours.contains_key("layers.3.eh_proj.weight"));
        }
    }
    let names = DeepSeekV3Config::tiny().megatron_names();
    let place = |ours: &str| names.get(ours).unwrap().name.clone();
    assert_eq!(
        place("layers.1.attention.kv_b_proj.weight"),
        "decoder.layers.1.self_attention.linear_kv_up_proj.weight"
    );
    assert_eq!(place("layers.3.mlp.router.weight"), "mtp.layers.0.transformer_layer.mlp.router.weight");
}
