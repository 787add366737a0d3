//! Names and shapes of tensors.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use models::names::NameMap;
use models::{FamilyConfig, GptConfig, LlamaConfig, MixtralConfig, MixtralVariant, ModelConfig, NemotronHConfig};
use safetensors::SafeTensors;

use crate::{
    GPT2, LLAMA2, LLAMA3, MAMBA2, MISTRAL, MIXTRAL, NEMOTRON_3, NEMOTRON_H, QWEN3, QWEN3_MOE, QWEN3_NEXT, parse,
};

const DENSE: &str = include_str!("../golden/megatron/dense_shapes.json");
const MOE: &str = include_str!("../golden/megatron/moe_shapes.json");
const TIED: &str = include_str!("../golden/megatron/tied_shapes.json");

type Tensors = BTreeMap<String, HostTensor>;

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
        ("qwen3_next", QWEN3_NEXT),
        ("mamba2", MAMBA2),
        ("nemotron_h", NEMOTRON_H),
        ("nemotron3", NEMOTRON_3),
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

    // Eight heads with head_dim 8 over 4 groups: a group has 16 matrix rows of queries, 8 of the key, 8 of the value.
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
fn megatron_names_of_a_moe() {
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
    let config = models::sized! { MixtralConfig::tiny();
        variant: MixtralVariant::Qwen3Moe, intermediate_size: 96, moe_intermediate_size: Some(24),
        decoder_sparse_step: 2, num_hidden_layers: 4, mlp_only_layers: vec![3]
    };
    for (map, dense, moe) in [
        (config.hf_names(), "model.layers.3.mlp.up_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"),
        (
            config.megatron_names(),
            "decoder.layers.3.mlp.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
        ),
    ] {
        let shapes: BTreeMap<String, Vec<usize>> = map.iter().map(|(_, f)| (f.name.clone(), f.shape.clone())).collect();
        assert_eq!((shapes[dense][0] % 96, shapes[moe][0] % 24), (0, 0));
        let routers = map.iter().filter(|(ours, _)| ours.contains("router"));
        assert_eq!(routers.map(|(ours, _)| ours).collect::<Vec<_>>(), ["layers.1.mlp.router.weight"]);
        assert_round_trip(&map, &numbered(shapes));
    }
}

/// All biases, learned positions and a plain MLP.
#[test]
fn megatron_names_of_a_gpt() {
    let config = models::sized! { GptConfig::tiny();
        vocab_size: 10, hidden_size: 8, intermediate_size: 12, num_attention_heads: 2
    };
    let map = config.megatron_names();
    let shapes: BTreeMap<String, Vec<usize>> = map.iter().map(|(_, f)| (f.name.clone(), f.shape.clone())).collect();
    assert_eq!(shapes["embedding.position_embeddings.weight"], [128, 8]);
    assert_eq!(shapes["decoder.layers.0.self_attention.linear_qkv.bias"], [24]);
    assert_eq!(shapes["decoder.layers.1.mlp.linear_fc1.bias"], [12]);
    assert_eq!(shapes["decoder.final_layernorm.bias"], [8]);
    assert_round_trip(&map, &numbered(shapes));
}

/// Megatron-Core's `MambaModel`: the norm of a Mamba-2 layer has another name, as has the last one.
#[test]
fn megatron_names_of_a_hybrid() {
    let config = NemotronHConfig { hybrid_override_pattern: "M*-E".into(), ..NemotronHConfig::tiny() };
    let map = config.megatron_names();
    let mut names: Vec<&str> = map.iter().map(|(_, foreign)| foreign.name.as_str()).collect();
    names.dedup();
    let expected = [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.norm.weight",
        "decoder.layers.0.mixer.in_proj.weight",
        "decoder.layers.0.mixer.conv1d.weight",
        "decoder.layers.0.mixer.A_log",
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.layers.2.mlp.linear_fc1.weight",
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.layers.3.mlp.router.weight",
        "decoder.layers.3.mlp.router.expert_bias",
        "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
        "decoder.layers.3.mlp.shared_experts.linear_fc2.weight",
        "decoder.final_norm.weight",
        "output_layer.weight",
    ];
    for name in expected {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    let up = map.get("layers.2.mlp.up_proj.weight").unwrap();
    assert_eq!((&up.rows, &up.shape), (&None, &vec![config.intermediate_size, config.hidden_size]));
}
