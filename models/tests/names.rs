//! Configurations and names of other systems, both ways; see `golden/README.md`.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use models::names::NameMap;
use models::{GptConfig, LlamaConfig, ModelConfig};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const LLAMA3: &str = include_str!("golden/hf/llama3.json");
const GPT2: &str = include_str!("golden/hf/gpt2.json");
const DENSE: &str = include_str!("golden/megatron/dense_shapes.json");
const TIED: &str = include_str!("golden/megatron/tied_shapes.json");

type Tensors = BTreeMap<String, HostTensor>;

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Tensors of the given shapes in which every element is another number.
fn numbered(shapes: impl IntoIterator<Item = (String, Vec<usize>)>) -> Tensors {
    let mut next = 0;
    let mut fill = |shape: Vec<usize>| {
        let first = next;
        next += shape.iter().product::<usize>();
        HostTensor { shape, data: (first..next).map(|number| number as f64).collect() }
    };
    shapes.into_iter().map(|(name, shape)| (name, fill(shape))).collect()
}

fn hf_model(bytes: &[u8]) -> Tensors {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let model = |(name, view): (&str, safetensors::tensor::TensorView)| {
        Some((name.strip_prefix("model:")?.to_string(), view.shape().to_vec()))
    };
    numbered(file.iter().filter_map(model))
}

fn megatron_model(text: &str) -> Tensors {
    numbered(serde_json::from_str::<BTreeMap<String, Vec<usize>>>(text).unwrap())
}

/// Every tensor of the other system is known, with its shape, and comes back as it was.
fn assert_round_trip(map: &NameMap, theirs: &Tensors) -> Tensors {
    let ours = map.import(theirs).unwrap();
    assert_eq!(&map.export(&ours).unwrap(), theirs);
    ours
}

fn megatron_config(tied: bool) -> LlamaConfig {
    LlamaConfig { vocab_size: 128, num_hidden_layers: 4, tie_word_embeddings: tied, ..LlamaConfig::tiny() }
}

#[test]
fn hugging_face_names() {
    let llama = LlamaConfig::from_hf(&parse(LLAMA3)).unwrap();
    assert_round_trip(&llama.hf_names(), &hf_model(include_bytes!("golden/hf/llama3.safetensors")));
    let gpt = GptConfig::from_hf(&parse(GPT2)).unwrap();
    assert_round_trip(&gpt.hf_names(), &hf_model(include_bytes!("golden/hf/gpt2.safetensors")));
}

#[test]
fn megatron_names() {
    let dense = megatron_model(DENSE);
    let ours = assert_round_trip(&megatron_config(false).megatron_names(), &dense);
    assert_round_trip(&megatron_config(true).megatron_names(), &megatron_model(TIED));

    // 8 heads of 8 over 4 groups: rows of a group are 16 of the queries, 8 of the key, 8 of the value.
    let (columns, fused) = (64, &dense["decoder.layers.1.self_attention.linear_qkv.weight"].data);
    let row = |index: usize| &fused[index * columns..(index + 1) * columns];
    let our_row = |part: &str, index: usize| {
        &ours[&format!("layers.1.attention.{part}_proj.weight")].data[index * columns..(index + 1) * columns]
    };
    assert_eq!(our_row("q", 17), row(32 + 1));
    assert_eq!(our_row("k", 9), row(32 + 16 + 1));
    assert_eq!(our_row("v", 31), row(3 * 32 + 24 + 7));
}

/// All biases, learned positions and a plain MLP.
#[test]
fn megatron_names_of_a_gpt() {
    let config = GptConfig {
        vocab_size: 10,
        hidden_size: 8,
        intermediate_size: 12,
        num_attention_heads: 2,
        ..GptConfig::tiny()
    };
    let map = config.megatron_names();
    let shapes: BTreeMap<String, Vec<usize>> = map.iter().map(|(_, f)| (f.name.clone(), f.shape.clone())).collect();
    assert_eq!(shapes["embedding.position_embeddings.weight"], [128, 8]);
    assert_eq!(shapes["decoder.layers.0.self_attention.linear_qkv.bias"], [24]);
    assert_eq!(shapes["decoder.layers.1.mlp.linear_fc1.bias"], [12]);
    assert_eq!(shapes["decoder.final_layernorm.bias"], [8]);
    assert_round_trip(&map, &numbered(shapes));
}

#[test]
fn config_json_round_trip() {
    let llama = LlamaConfig::from_hf(&parse(LLAMA3)).unwrap();
    assert_eq!((llama.num_key_value_heads, llama.head_dim, llama.rope_theta), (4, 4, 500_000.0));
    assert_eq!(llama.rope_scaling.unwrap().original_max_position_embeddings, 64);
    assert_eq!(LlamaConfig::from_hf(&llama.to_hf()).unwrap(), llama);
    let tied = LlamaConfig { tie_word_embeddings: true, rope_scaling: None, attention_bias: true, ..llama };
    assert_eq!(LlamaConfig::from_hf(&tied.to_hf()).unwrap(), tied);

    let gpt = GptConfig::from_hf(&parse(GPT2)).unwrap();
    assert_eq!((gpt.intermediate_size, gpt.max_position_embeddings, gpt.tie_word_embeddings), (128, 128, true));
    assert_eq!(GptConfig::from_hf(&gpt.to_hf().unwrap()).unwrap(), gpt);
}

/// transformers 4 wrote `rope_theta` and `rope_scaling` at the top level.
#[test]
fn older_rope_keys() {
    let mut config = parse(LLAMA3);
    let object = config.as_object_mut().unwrap();
    let mut rope = object.remove("rope_parameters").unwrap();
    object.insert("rope_theta".into(), rope.as_object_mut().unwrap().remove("rope_theta").unwrap());
    object.insert("rope_scaling".into(), rope);
    assert_eq!(LlamaConfig::from_hf(&config).unwrap(), LlamaConfig::from_hf(&parse(LLAMA3)).unwrap());
}

#[test]
fn what_the_models_lack_is_refused() {
    let refuse = |base: &str, key: &str, value: Value| {
        let mut config = parse(base);
        config[key] = value;
        match base == GPT2 {
            true => GptConfig::from_hf(&config).unwrap_err().to_string(),
            false => LlamaConfig::from_hf(&config).unwrap_err().to_string(),
        }
    };
    assert_eq!(
        refuse(GPT2, "attn_pdrop", json!(0.1)),
        "config.json: `attn_pdrop` is 0.1, which this model does not have; nearest legal: 0"
    );
    assert_eq!(
        refuse(GPT2, "scale_attn_weights", json!(false)),
        "config.json: `scale_attn_weights` is false, which this model does not have; nearest legal: true"
    );
    assert!(refuse(LLAMA3, "attention_dropout", json!(0.1)).contains("`attention_dropout` is 0.1"));
    assert!(refuse(LLAMA3, "hidden_act", json!("gelu")).contains("nearest legal: silu"));
    assert!(refuse(LLAMA3, "rope_parameters", json!({"rope_type": "yarn"})).contains("`rope_type` is yarn"));
    assert_eq!(refuse(LLAMA3, "vocab_size", json!(-1)), "config.json: `vocab_size` is -1, not a positive integer");
    assert_eq!(refuse(LLAMA3, "hidden_size", Value::Null), "config.json: `hidden_size` is missing");
}
