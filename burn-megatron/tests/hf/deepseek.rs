//! DeepSeek-V3, GLM-4.5, Nemotron 3 and others of which transformers computes more than norms in fp32. It leaves out modules of multi-token prediction.
//! Here DeepSeek-V3, GLM-4.5 and Qwen3-Next have them too.

use backend_dist::mesh::ParallelLayout;
use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::{Settings, forward, read_input};
use burn_megatron::hf::HfFolder;
use models::ModelConfig;

use crate::files::{Stored, Tensors, changed, golden, read};
use crate::forward::{difference, last};
use crate::round_trip::succeed;

const MODEL: &str = "deepseek_v3";
const RELATIVES: [&str; 4] = ["deepseek_v2", "deepseek_v2_lite", "ernie4_5", "granite"];

/// transformers computes the router in fp32, so logits are as far apart as fp32 rounds; with its router in fp64 as far
/// as fp64 does.
#[test]
fn forward_is_transformers() {
    [MODEL, "glm4_moe"].into_iter().for_each(|model| compare(model, "router_fp64.safetensors", 2e-7));
}

/// Next to Mamba-2's recurrence, the logits and the weights of norms, which are fp32 too.
#[test]
fn forward_of_nemotron_3_is_transformers() {
    compare("nemotron3", "unrounded.safetensors", 1e-6);
}

/// Rotations of queries and keys, and routers, are fp32 too; Granite's norms round a residual stream of another size than ours.
#[test]
fn forward_of_relatives_is_transformers() {
    for model in RELATIVES {
        compare(model, "unrounded.safetensors", 2e-6);
    }
}

/// Logits within `rounding` of the library's, and within fp64 of those in the file without its casts to fp32.
fn compare(model: &str, without_casts: &str, rounding: f64) {
    let path = golden(model).join("oracle.safetensors");
    let (input, oracle, folder) = (read_input(&path).unwrap(), read(&path), HfFolder::open(golden(model)).unwrap());
    let unrounded = read(&golden(model).join(without_casts));
    let has_experts = folder.config().dims().experts.is_some();
    let layouts = ["TP1", "TP2 SP", "TP4", "DP2 EP2", "TP2 EP2 ETP1"];
    for layout in layouts.into_iter().filter(|layout| has_experts || !layout.contains("EP")) {
        let settings = Settings {
            gradients: true,
            exact: model == "nemotron3" || RELATIVES.contains(&model),
            ..Settings::new([Device::flex()], layout.parse::<ParallelLayout>().unwrap(), FloatDType::F64)
        };
        let output = forward(folder.config(), &folder, &input, &settings).unwrap();
        let gap = difference(&last(&output, &input), &oracle["logits_last8"].values());
        assert!(gap < rounding, "{model} {layout}: logits {gap:e}");
        let gap = difference(&last(&output, &input), &unrounded["logits_last8"].values());
        assert!(gap < 1e-13, "{model} {layout}: logits without the casts to fp32 {gap:e}");
        if let Some(exact) = unrounded.get("loss") {
            let gap = difference(output.loss.as_slice(), &exact.values());
            assert!(gap < 1e-13, "{model} {layout}: loss {gap:e}");
        }
        let mut compared = 0;
        for (name, expected) in
            oracle.iter().filter_map(|(name, expected)| Some((name.strip_prefix("grad.")?, expected)))
        {
            let gap = difference(&output.gradients[name].data, &expected.values());
            // Those of a head's decay are small sums of large fp32 terms.
            let is_decay = name.ends_with("A_log") || name.ends_with("dt_bias");
            let limit = if RELATIVES.contains(&model) { 5e-6 } else { 1e-6 };
            assert!(gap < if is_decay { 1e-4 } else { limit }, "{model} {layout}: gradient of {name} {gap:e}");
            compared += 1;
        }
        assert!(compared >= 20);
    }
}

/// The published GLM-4.5 has its module as a layer after the last one, Qwen3-Next under a prefix of its own.
#[test]
fn modules_that_a_model_does_not_have_are_passed_over() {
    for (model, tensor, weight) in [
        ("glm4_moe", "model.layers.3.eh_proj.weight", "model.layers.2.eh_proj.weight"),
        ("qwen3_next", "mtp.norm.weight", "mtq.norm.weight"),
        ("nemotron3", "mtp.layers.0.norm.weight", "mtq.layers.0.norm.weight"),
    ] {
        let with = |name: &str| changed(model, |tensors| drop(tensors.insert(name.into(), Stored::f32(&[2, 4], 1.0))));
        assert!(HfFolder::open(with(tensor).path()).is_ok(), "{model}");
        says!(HfFolder::open(with(weight).path()).err().unwrap(), weight, "is not part of the model");
    }
}

/// What comes out of `import` and `export`.
fn there_and_back(model: &str, change: impl FnOnce(&mut Tensors)) -> (Tensors, serde_json::Value) {
    let (from, root) = (changed(model, change), tempfile::tempdir().unwrap());
    let (checkpoint, to) = (root.path().join("checkpoint"), root.path().join("out"));
    succeed(&["import", "--hf", from.path().to_str().unwrap(), "--output", checkpoint.to_str().unwrap()]);
    succeed(&["export", "--hf", to.to_str().unwrap(), "--checkpoint", checkpoint.to_str().unwrap()]);
    let config = std::fs::read_to_string(to.join("config.json")).unwrap();
    (read(&to.join("model.safetensors")), serde_json::from_str(&config).unwrap())
}

#[test]
fn weights_go_in_and_out() {
    let (weights, config) = there_and_back(MODEL, |_| {});
    assert!(weights == read(&golden(MODEL).join("model.safetensors")));
    assert_eq!(config["num_nextn_predict_layers"], 0);
}

/// The published files have the modules as layers after the last one, with copies of embedding and output layer.
#[test]
fn modules_of_multi_token_prediction_go_in_and_out() {
    let mut whole = Tensors::new();
    let (weights, config) = there_and_back(MODEL, |tensors| {
        let layer = |name: &str| name.strip_prefix("model.layers.3.").map(|rest| format!("model.layers.4.{rest}"));
        let module: Tensors = tensors.iter().filter_map(|(name, value)| Some((layer(name)?, value.clone()))).collect();
        tensors.extend(module);
        let vector = tensors["model.norm.weight"].clone();
        for norm in ["enorm", "hnorm", "shared_head.norm"] {
            tensors.insert(format!("model.layers.4.{norm}.weight"), vector.clone());
        }
        let mut projection = tensors["model.layers.0.self_attn.o_proj.weight"].clone();
        assert_eq!(projection.shape, [32, 64]);
        projection.data.reverse();
        tensors.insert("model.layers.4.eh_proj.weight".into(), projection);
        whole = tensors.clone();
        let table = tensors["lm_head.weight"].clone();
        tensors.insert("model.layers.4.shared_head.head.weight".into(), table);
        let table = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("model.layers.4.embed_tokens.weight".into(), table);
    });
    assert!(weights == whole);
    assert_eq!(config["num_nextn_predict_layers"], 1);
}

#[test]
fn modules_of_its_relatives_go_in_and_out() {
    for model in ["glm4_moe", "qwen3_next"] {
        let mut whole = Tensors::new();
        let (weights, config) = there_and_back(model, |tensors| {
            let module = read(&golden(model).join("mtp.safetensors"));
            tensors.extend(module.into_iter().filter(|(name, _)| name != "mtp_losses"));
            whole = tensors.clone();
        });
        assert!(weights == whole, "{model}");
        assert_eq!(config["num_nextn_predict_layers"], 1, "{model}");
    }
}
