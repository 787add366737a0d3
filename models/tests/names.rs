//! Configurations and names of other systems, both ways; see `golden/README.md`, and `tests/golden/README.md` of the
//! workspace for Hugging Face's.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use models::layers::RopeScaling;
use models::names::NameMap;
use models::{FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, MixtralConfig, MixtralVariant, ModelConfig};
use safetensors::SafeTensors;
use serde_json::{Value, json};

macro_rules! hf {
    ($folder:literal) => {
        include_str!(concat!("../../tests/golden/hf/", $folder, "/config.json"))
    };
}

const LLAMA2: &str = hf!("llama2");
const LLAMA3: &str = hf!("llama3");
const MISTRAL: &str = hf!("mistral");
const QWEN3: &str = hf!("qwen3");
const MIXTRAL: &str = hf!("mixtral");
const QWEN3_MOE: &str = hf!("qwen3_moe");
const GPT2: &str = hf!("gpt2");
const DENSE: &str = include_str!("golden/megatron/dense_shapes.json");
const MOE: &str = include_str!("golden/megatron/moe_shapes.json");
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

fn hf_model(folder: &str) -> Tensors {
    let path = format!("{}/../tests/golden/hf/{folder}/model.safetensors", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    numbered(file.iter().map(|(name, view)| (name.to_string(), view.shape().to_vec())))
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
    for (folder, config) in [
        ("llama2", LLAMA2),
        ("llama3", LLAMA3),
        ("mistral", MISTRAL),
        ("qwen3", QWEN3),
        ("mixtral", MIXTRAL),
        ("qwen3_moe", QWEN3_MOE),
        ("gpt2", GPT2),
    ] {
        let config = FamilyConfig::from_hf(&parse(config)).unwrap();
        assert_round_trip(&config.hf_names(), &hf_model(folder));
    }
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

#[test]
fn megatron_names_of_a_mixture() {
    let theirs = megatron_model(MOE);
    let config = MixtralConfig { vocab_size: 128, num_hidden_layers: 4, ..MixtralConfig::tiny() };
    let ours = assert_round_trip(&config.megatron_names(), &theirs);
    let fc1 = &theirs["decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"].data;
    assert_eq!(ours["layers.2.mlp.experts.3.gate_proj.weight"].data, fc1[..64 * 64]);
    assert_eq!(ours["layers.2.mlp.experts.3.up_proj.weight"].data, fc1[64 * 64..]);
    assert_eq!(ours["layers.1.mlp.router.weight"], theirs["decoder.layers.1.mlp.router.weight"]);
}

/// Layers without experts have an MLP of its own width, under the names of a dense model.
#[test]
fn names_of_layers_without_experts() {
    let config = MixtralConfig {
        variant: MixtralVariant::Qwen3Moe,
        intermediate_size: 96,
        moe_intermediate_size: Some(24),
        decoder_sparse_step: 2,
        num_hidden_layers: 4,
        mlp_only_layers: vec![3],
        ..MixtralConfig::tiny()
    };
    for (map, dense, mixture) in [
        (config.hf_names(), "model.layers.3.mlp.up_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"),
        (
            config.megatron_names(),
            "decoder.layers.3.mlp.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
        ),
    ] {
        let shapes: BTreeMap<String, Vec<usize>> = map.iter().map(|(_, f)| (f.name.clone(), f.shape.clone())).collect();
        assert_eq!((shapes[dense][0] % 96, shapes[mixture][0] % 24), (0, 0));
        let routers = map.iter().filter(|(ours, _)| ours.contains("router"));
        assert_eq!(routers.map(|(ours, _)| ours).collect::<Vec<_>>(), ["layers.1.mlp.router.weight"]);
        assert_round_trip(&map, &numbered(shapes));
    }
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

fn llama(text: &str) -> LlamaConfig {
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
    for text in [LLAMA2, LLAMA3, MISTRAL, QWEN3, MIXTRAL, QWEN3_MOE, GPT2] {
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

/// transformers 4 wrote `rope_theta` and `rope_scaling` at the top level.
#[test]
fn older_rope_keys() {
    let mut config = parse(LLAMA3);
    let object = config.as_object_mut().unwrap();
    let mut rope = object.remove("rope_parameters").unwrap();
    object.insert("rope_theta".into(), rope.as_object_mut().unwrap().remove("rope_theta").unwrap());
    object.insert("rope_scaling".into(), rope);
    assert_eq!(FamilyConfig::from_hf(&config).unwrap(), FamilyConfig::Llama(llama(LLAMA3)));
}

/// YaRN in any family that rotates, with transformers' defaults and without them.
#[test]
fn yarn_is_read_and_written() {
    let keys = [
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        json!({"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": false}),
    ];
    for (base, rope) in [LLAMA2, QWEN3, MIXTRAL].into_iter().flat_map(|base| keys.iter().map(move |rope| (base, rope)))
    {
        let mut original = parse(base);
        original["rope_parameters"] = rope.clone();
        let config = FamilyConfig::from_hf(&original).unwrap();
        let written = config.to_hf().unwrap();
        assert_eq!(
            (&written["rope_parameters"]["rope_type"], &written["rope_parameters"]["factor"]),
            (&json!("yarn"), &json!(4.0))
        );
        assert_eq!(FamilyConfig::from_hf(&written).unwrap(), config);
        assert_eq!(serde_json::from_value::<FamilyConfig>(serde_json::to_value(&config).unwrap()).unwrap(), config);
    }
}

/// The message for a file in which one key was changed.
fn refuse(base: &str, key: &str, value: Value) -> String {
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
    assert!(refuse(LLAMA3, "rope_parameters", json!({"rope_type": "linear"})).contains("`rope_type` is linear"));
    let yarn = json!({"rope_type": "yarn", "original_max_position_embeddings": 64});
    assert_eq!(refuse(LLAMA3, "rope_parameters", yarn), "config.json: `factor` is missing");
    assert!(refuse(LLAMA3, "rope_scaling", json!({"rope_type": "default"})).contains("`rope_scaling` is given twice"));
    assert!(refuse(QWEN3, "use_sliding_window", json!(true)).contains("`use_sliding_window` is true"));
    assert!(refuse(QWEN3, "layer_types", json!(["sliding_attention"])).contains("nearest legal: 4 x full_attention"));
    assert!(refuse(MIXTRAL, "sliding_window", json!(4096)).contains("`sliding_window` is 4096, which"));
    assert!(refuse(MIXTRAL, "router_jitter_noise", json!(0.1)).contains("nearest legal: 0"));
    assert!(refuse(QWEN3_MOE, "num_experts", json!(4)).contains("`num_experts` is given twice"));
    assert!(refuse(QWEN3_MOE, "mlp_only_layers", json!([-1])).contains("`mlp_only_layers` is [-1], not a list"));
    assert!(refuse(LLAMA2, "pretraining_tp", json!(2)).contains("`pretraining_tp` is 2"));
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

#[test]
fn an_architecture_that_is_not_here_is_refused() {
    let message = refuse(LLAMA3, "model_type", json!("mamba"));
    assert_eq!(
        message,
        "config.json: there is no model for `model_type` mamba; supported: llama (LlamaForCausalLM), \
         mistral (MistralForCausalLM), qwen3 (Qwen3ForCausalLM), mixtral (MixtralForCausalLM), \
         qwen3_moe (Qwen3MoeForCausalLM), gpt2 (GPT2LMHeadModel), deepseek_v3 (DeepseekV3ForCausalLM)"
    );
    let message = refuse(LLAMA3, "architectures", json!(["LlamaForSequenceClassification"]));
    assert!(message.contains("`architectures` LlamaForSequenceClassification; supported: llama"), "{message}");
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
