//! Keys of a `config.json` that tell layers and positions apart.

use models::layers::{DynamicScaling, LayerPattern, RopeScaling};
use models::{FamilyConfig, LlamaConfig, ModelConfig};
use serde_json::{Value, json};

use crate::config_json::{llama, refuse};
use crate::{GEMMA2, GEMMA3, GLM4_MOE, GPT_OSS, LLAMA3, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN3_NEXT, SMOLLM3, parse};

/// Layers of two kinds in an order that no number gives, and the words of each family for it.
#[test]
fn layers_in_any_order() {
    let changed = |base: &str, keys: &[(&str, Value)]| {
        let mut file = parse(base);
        keys.iter().for_each(|(key, value)| file[*key] = value.clone());
        let config = FamilyConfig::from_hf(&file).unwrap();
        assert_eq!(FamilyConfig::from_hf(&config.to_hf().unwrap()).as_ref(), Ok(&config), "{file}");
        config
    };
    let windows = |config: FamilyConfig| match config {
        FamilyConfig::Llama(config) => (0..4).map(|layer| config.window(layer)).collect::<Vec<_>>(),
        FamilyConfig::Mixtral(config) => (0..4).map(|layer| config.window(layer)).collect(),
        other => panic!("{other:?}"),
    };
    let [full, sliding] = ["full_attention", "sliding_attention"];
    let mixed = ("layer_types", json!([full, sliding, sliding, full]));
    for base in [GEMMA2, GEMMA3, GPT_OSS] {
        let window = parse(base)["sliding_window"].as_u64().map(|window| window as usize);
        assert_eq!(windows(changed(base, std::slice::from_ref(&mixed))), [None, window, window, None]);
    }
    let used = [("use_sliding_window", json!(true)), ("sliding_window", json!(6))];
    for base in [QWEN2, QWEN3] {
        let by_number = [used.to_vec(), vec![("max_window_layers", json!(3)), ("layer_types", Value::Null)]].concat();
        assert_eq!(windows(changed(base, &by_number)), [None, None, None, Some(6)]);
        assert_eq!(
            windows(changed(base, &[used.to_vec(), vec![mixed.clone()]].concat())),
            [None, Some(6), Some(6), None]
        );
    }
    assert_eq!(windows(changed(QWEN3_MOE, &used)), [Some(6); 4]);
    assert_eq!(windows(changed(MIXTRAL, &[("sliding_window", json!(4096))])), [Some(4096); 4]);
    let FamilyConfig::Llama(smollm3) = changed(SMOLLM3, &[("no_rope_layers", json!([1, 0, 0, 1]))]) else { panic!() };
    assert_eq!(smollm3.no_rope_layer_interval, Some(LayerPattern::At(vec![1, 2])));
    let hybrid = [full, "linear_attention", "linear_attention", full];
    let layers = parse(QWEN3_NEXT)["num_hidden_layers"].as_u64().unwrap() as usize;
    let FamilyConfig::Mixtral(next) = changed(QWEN3_NEXT, &[("layer_types", json!(hybrid[..layers]))]) else {
        panic!()
    };
    assert_eq!(next.linear_layers(), (1..layers.min(3)).collect::<Vec<_>>());
}

/// The context of dynamic NTK scaling is the model's.
#[test]
fn dynamic_scaling_is_read_and_written() {
    let mut file = parse(LLAMA3);
    file["rope_parameters"] = json!({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0});
    let config = llama(&file.to_string());
    let scaling = DynamicScaling { factor: 2.0, original_max_position_embeddings: 128 };
    assert_eq!(config.rope_scaling, Some(RopeScaling::Dynamic(scaling)));
    assert_eq!(config.to_hf()["rope_parameters"], file["rope_parameters"]);
    let said = LlamaConfig { max_position_embeddings: 256, ..config }.check().unwrap_err().to_string();
    assert!(said.contains("= 128 is not max_position_embeddings; nearest legal: 256"), "{said}");
}

/// One expert's sigmoid that is brought to a sum of one is 1 in transformers, which nothing could train.
#[test]
fn one_expert_is_not_normalised() {
    let said = refuse(GLM4_MOE, "num_experts_per_tok", json!(1));
    assert!(said.contains("`norm_topk_prob` is true with one expert for each token"), "{said}");
}
