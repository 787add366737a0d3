//! Runs of Megatron-Core's other families: biases, norms of queries and keys, latent attention, layers of several kinds,
//! shared experts, multi-token prediction.

use burn_megatron::dcp::DcpObjects;

use super::*;
use crate::round_trip::fail;

const DENSE: &str = "TP2 DP2 ZeRO1";
const EXPERTS: &str = "TP2 DP2 EP2 ETP1 ZeRO1";
const FAMILIES: [&str; 7] = ["qwen2", "qwen3", "gpt", "qwen2_moe", "glm4_moe", "deepseek_v3", "gpt_oss"];

/// Biases of queries, keys and values.
#[test]
fn qwen2() {
    continues_and_goes_back("qwen2", DENSE);
}

/// Norms of queries and keys.
#[test]
fn qwen3() {
    continues_and_goes_back("qwen3", DENSE);
}

/// Biases everywhere, learned positions, tied embeddings.
#[test]
fn gpt() {
    continues_and_goes_back("gpt", DENSE);
}

/// A shared expert with a gate.
#[test]
fn qwen2_moe() {
    continues_and_goes_back("qwen2_moe", EXPERTS);
}

/// A layer without experts first, and a bias that balances experts.
#[test]
fn glm4_moe() {
    continues_and_goes_back("glm4_moe", EXPERTS);
}

/// Latent attention and multi-token prediction, whose experts are balanced over positions without a prediction too: a token there
/// other than Megatron-Core's moves later losses by 3e-5.
#[test]
fn deepseek_v3() {
    continues_and_goes_back("deepseek_v3", EXPERTS);
}

/// Sinks, windows, biases of experts and routers.
#[test]
fn gpt_oss() {
    continues_and_goes_back("gpt_oss", EXPERTS);
}

/// Weights, names and states are right: the next twenty losses are Megatron-Core's. Ten of them later, what goes out
/// is under the names that TransformerEngine's layers have, and comes back with the rest of the losses. With `BURN_MEGATRON_DCP_OUT` the
/// folders stay there, for `check` of make_megatron_families.py.
fn continues_and_goes_back(family: &str, layout: &str) {
    let name = format!("megatron_{family}");
    let (folder, root) = (copied(&name), tempfile::tempdir().unwrap());
    let [from, trained, out, again] = ["from", "trained", "out", "again"].map(|name| root.path().join(name));
    let out = std::env::var_os("BURN_MEGATRON_DCP_OUT").map_or(out, |out| Path::new(&out).join(&name));
    let (from, said) = imported(folder.path(), &from);
    assert!(!said.contains("note:"), "{family}: {said}");
    let (theirs, batches) = recorded(&name);
    let alone = worst(&train(&from, "TP1", Some(1.0), &batches, None), &theirs);
    assert!(alone < 5e-7, "{family}: {alone:e}");
    let ours = train(&from, layout, Some(1.0), &batches[..10], Some(&trained));
    let shared = worst(&ours, &theirs[..10]);
    assert!(shared < 5e-7, "{family} in {layout}: {shared:e}");
    succeed(&["export", "--torch-dist", text(&out), "--checkpoint", text(&trained), "--optimizer", "--dtype", "f32"]);
    let again = imported(&out, &again).0;
    assert_eq!(tensors(&Checkpoint::open(&trained).unwrap()).len(), tensors(&again).len());
    let ours = worst(&train(&again, "TP1", Some(1.0), &batches[10..], None), &theirs[10..]);
    assert!(ours < 5e-7, "{family} again: {ours:e}");
}

/// The names are those of Megatron-Core's own file, but for norms that only TransformerEngine fuses.
#[test]
fn names_of_families_are_those_of_megatron_core() {
    for family in FAMILIES {
        let (folder, root) = (copied(&format!("megatron_{family}")), tempfile::tempdir().unwrap());
        let [from, out] = ["from", "out"].map(|name| root.path().join(name));
        imported(folder.path(), &from);
        succeed(&["export", "--torch-dist", text(&out), "--checkpoint", text(&from)]);
        let names = |folder: &Path| {
            let all = DcpObjects::open(folder).unwrap().names.into_iter();
            let weights = all.filter(|name| !name.starts_with("optimizer") && !name.contains("/shard_"));
            weights.map(|name| as_local(&name)).collect::<std::collections::BTreeSet<String>>()
        };
        assert_eq!(names(&out), names(folder.path()), "{family}");
        if family == "deepseek_v3" {
            let stored = DcpObjects::open(&out).unwrap().names;
            let theirs =
                ["self_attention.linear_kv_up_proj.layer_norm_weight", "mlp.experts.experts.linear_fc1.weight"];
            for name in theirs
                .map(|part| [format!("decoder.layers.1.{part}"), format!("mtp.layers.0.transformer_layer.{part}")])
            {
                assert!(name.iter().all(|name| stored.contains(name.as_str())), "{name:?}: {stored:?}");
            }
        }
    }
}

/// The name of a norm without TransformerEngine, wherever a file may have it.
fn as_local(name: &str) -> String {
    let fused = [
        ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
        ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
        ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
        ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
    ];
    fused.iter().fold(name.to_string(), |name, (theirs, plain)| name.replace(theirs, plain))
}

/// What Megatron-Core has no layer for is refused with that reason.
#[test]
fn families_without_a_layer_in_megatron_core_are_refused_by_name() {
    for (model, why) in [
        ("gemma2", "Megatron-Core has no norm behind attention"),
        ("olmo2", "Megatron-Core has no norm behind attention"),
        ("gemma", "Megatron-Core has no factor of embeddings"),
        ("granite", "Megatron-Core has no factor of embeddings"),
        ("olmoe", "Megatron-Core has no norm of whole queries and keys"),
        ("mamba2", "Megatron-Core's Mamba-2 layers, which need a GPU, were not compared"),
        ("qwen3_next", "Megatron-Core's Gated DeltaNet, which needs TransformerEngine, were not compared"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let [from, out] = ["from", "out"].map(|name| root.path().join(name));
        succeed(&["import", "--hf", text(&crate::files::golden(model)), "--output", text(&from)]);
        let said = fail(&["export", "--torch-dist", text(&out), "--checkpoint", text(&from)]);
        says!(said, why, "nearest legal: --dcp");
    }
}
