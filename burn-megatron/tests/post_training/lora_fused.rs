//! What peft computes with adapters of all kinds; of projections whose weights Hugging Face stores as one, or in another order of
//! rows, and of modules with ranks and scales of their own, every layout, training, and peft's files both ways.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use backend_dist::mesh::ParallelLayout;
use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType};
use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::config::RunConfig;
use burn_megatron::forward::{Output, Settings, forward, read_input};
use burn_megatron::hf::{HfFolder, read_adapter};
use burn_megatron::train::Plan;
use burn_megatron::verify::{self, LoraKind};
use models::layers::BalanceOver;
use models::{
    DeepSeekV3Config, Llama, LlamaConfig, LlamaVariant, LoraConfig, Mamba2, Mamba2Config, Mixtral, MixtralConfig,
    ModelConfig,
};
use serde_json::Value;

use super::{
    VERIFIED, adapters, assert_goes_on, assert_verified, fail, gap, golden, last_loss, read, resumed_as_whole, succeed,
    write,
};

/// Adapters, their base, and how many modules have one.
const ADAPTERS: [(&str, &str, usize); 12] = [
    ("lora_all", "lora/base", 4 * 7),
    ("lora_qv_rs", "lora/base", 4 * 2),
    ("dora", "lora/base", 4 * 3),
    ("phi3", "hf/phi3", 4 * 4),
    ("phi3_dora", "hf/phi3", 4 * 2),
    ("glm4", "hf/glm4", 4 * 6),
    ("patterns", "hf/llama3", 4 * 7),
    ("patterns_dora", "hf/phi3", 4 * 4),
    ("gpt_oss", "hf/gpt_oss", 4 * 3),
    ("gpt_oss_down", "hf/gpt_oss", 1),
    ("mixtral_experts", "hf/mixtral", 4 * (1 + 8 * 3)),
    ("qwen3_moe_experts", "hf/qwen3_moe", 8),
];

/// How far logits are from those of peft.
fn logits_gap(output: &Output, oracle: &BTreeMap<String, HostTensor>) -> f64 {
    let expected = oracle.get("logits_last4").or_else(|| oracle.get("logits")).unwrap();
    let of_sequence = output.logits.chunks(output.logits.len() / expected.shape[0]);
    let last = of_sequence.flat_map(|all| &all[all.len() - expected.shape[1] * output.vocab..]);
    gap(&last.copied().collect::<Vec<f64>>(), &expected.data)
}

#[test]
fn forward_and_gradients_are_those_of_peft_in_every_layout() {
    for (name, base, _) in ADAPTERS {
        let base = HfFolder::open(golden(base)).unwrap();
        let path = golden("lora").join(name).join("oracle.safetensors");
        let (input, oracle) = (read_input(&path).unwrap(), read(&path));
        let adapter = read_adapter(&golden("lora").join(name).join("adapter"), base.config()).unwrap();
        let trained = adapter.plan.export("", &adapter.tensors).unwrap();
        // TP4 has two ranks on each key-value head.
        let experts = if name.contains("gpt_oss") || name.ends_with("_experts") {
            vec!["DP2 EP2", "TP2 ETP2 SP", "TP2 EP2 DP2 ETP1"]
        } else {
            vec![]
        };
        for layout in [vec!["TP1", "TP2", "TP4", "TP4 SP", "CP2", "DP2", "TP2 SP CP2"], experts].concat() {
            let settings = Settings {
                gradients: true,
                adapter: Some(adapter.clone()),
                ..Settings::new([Device::flex()], layout.parse().unwrap(), FloatDType::F64)
            };
            let output = forward(base.config(), &base, &input, &settings).unwrap();
            let logits = logits_gap(&output, &oracle);
            // transformers has the routers' softmax of Mixtral and Qwen3-MoE in fp32.
            let bound = if name.ends_with("_experts") { 1e-6 } else { 1e-9 };
            assert!(logits < bound, "{name} {layout}: logits {logits:e}");
            assert!(output.gradients.keys().eq(trained.keys()), "{name}: only adapters have gradients");
            for (tensor, expected) in &oracle {
                let Some(tensor) = tensor.strip_prefix("grad.") else { continue };
                // One A of gate and up is here one of each.
                if name.ends_with("_experts") && tensor.contains(".experts.") {
                    continue;
                }
                let found = &output.gradients[tensor];
                assert_eq!(found.shape, expected.shape);
                let gradient = gap(&found.data, &expected.data);
                assert!(gradient < 1e-6, "{name} {layout}: {tensor} {gradient:e}");
            }
        }
    }
}

#[test]
fn merged_weights_are_those_of_peft() {
    let folder = tempfile::tempdir().unwrap();
    for (name, base, modules) in ADAPTERS {
        let (is_partial, base, from) = (base == "lora/base", golden(base), golden("lora").join(name));
        let [at, adapter] = [&base, &from.join("adapter")].map(|path| path.display().to_string());
        let said = succeed(folder.path(), &format!("merge --hf {at} --adapter {adapter} --output {name} --dtype f64"));
        let counted = format!("{modules} of the model's layers");
        says!(said, counted.as_str());
        let merged = read(&folder.path().join(name).join("model.safetensors"));
        let before = read(&base.join("model.safetensors"));
        let expected = read(&from.join("merged.safetensors"));
        let mut changed = 0;
        for (tensor, expected) in &expected {
            let gap = |found: &[f64]| gap(found, &expected.data);
            assert!(gap(&merged[tensor].data) < 1e-6, "{name}: {tensor}");
            changed += usize::from(gap(&before[tensor].data) > 1e-3);
        }
        // One layer's matrices, with adapters and without, or some with adapters, or none.
        assert_eq!(changed, if is_partial { modules / 4 } else { expected.len() }, "{name}");
        let merged = HfFolder::open(folder.path().join(name)).unwrap();
        let settings = Settings::new([Device::flex()], ParallelLayout::default(), FloatDType::F64);
        let oracle = from.join("oracle.safetensors");
        let output = forward(merged.config(), &merged, &read_input(&oracle).unwrap(), &settings).unwrap();
        let logits = logits_gap(&output, &read(&oracle));
        assert!(logits < 1e-6, "{name}: logits {logits:e}");
    }
}

#[test]
fn every_layout_trains_them_as_one_device() {
    let settings = |lora| verify::Settings { lora: Some(lora), ..VERIFIED };
    let layouts = "TP2 SP DP2 ZeRO1 x2, TP8 SP, PP2 DP2 ZeRO2 x2 uniform1, CP2 DP2 ZeRO3 selective, TP2 PP2 x2 zb-h1";
    for variant in [LlamaVariant::Phi3, LlamaVariant::Glm4] {
        let attention_bias = variant == LlamaVariant::Glm4;
        let config = LlamaConfig { variant, num_hidden_layers: 2, attention_bias, ..LlamaConfig::tiny() };
        for kind in [LoraKind::Lora, LoraKind::Rslora, LoraKind::Dora] {
            assert_verified::<Llama>(&config, &settings(kind), layouts);
        }
    }
    // An output gate between the rows of the queries, and two fused projections that read one input.
    let layouts = "TP2 SP DP2, DP2 EP2 ZeRO2, CP2";
    let qwen3_next = MixtralConfig { router_balance: BalanceOver::Sequence, ..MixtralConfig::qwen3_next_tiny() };
    assert_verified::<Mixtral>(&qwen3_next, &settings(LoraKind::Lora), layouts);
    let layouts = "TP2 SP DP2, PP2 DP2 ZeRO2 x2, CP2";
    assert_verified::<Mamba2>(&Mamba2Config::tiny(), &settings(LoraKind::Dora), layouts);
}

fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
    adapters(folder, name, ["hf/phi3", "target-modules = [\"qkv_proj\", \"gate_up_proj\"]"], overrides)
}

#[test]
fn a_run_trains_saves_resumes_and_exports_them() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let config = |name: &str, overrides: &[(&str, &str)]| config(folder.path(), name, overrides);
    let layout = [("parallel.tp", "2"), ("parallel.dp", "2"), ("parallel.zero", "2")];
    let whole = resumed_as_whole(config, &layout);

    // One A, and the rows of B by layer.
    let checkpoint = Checkpoint::open(at("whole/checkpoints")).unwrap();
    let has = |name: &str, shape: &[usize]| checkpoint.check(checkpoint.weights(), name, shape).is_ok();
    assert!(has("layers.3.attention.qkv_proj.lora_A.weight", &[4, 32]));
    assert!(has("layers.3.attention.k_proj.lora_B.weight", &[16, 4]));
    assert!(!has("layers.3.attention.k_proj.lora_A.weight", &[4, 32]));

    // As peft writes it, and with the base it computes what the run did.
    says!(succeed(folder.path(), "export --checkpoint whole/checkpoints --adapter adapter"), "adapters of 8 layers");
    let file = read(&at("adapter/adapter_model.safetensors"));
    assert_eq!(file.len(), 4 * 4);
    let name = "base_model.model.model.layers.3.mlp.gate_up_proj";
    assert_eq!(file[&format!("{name}.lora_A.weight")].shape, [4, 32]);
    assert_eq!(file[&format!("{name}.lora_B.weight")].shape, [128, 4]);
    let json: Value = serde_json::from_slice(&fs::read(at("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(json["target_modules"], serde_json::json!(["qkv_proj", "gate_up_proj"]));
    assert_goes_on(folder.path(), "hf/phi3", config, whole);
}

#[test]
fn a_moving_average_of_adapters_is_exported() {
    let folder = tempfile::tempdir().unwrap();
    last_loss(&config(folder.path(), "run", &[("training.ema-decay", "0.5")]));
    succeed(folder.path(), "export --checkpoint run/checkpoints --adapter plain");
    succeed(folder.path(), "export --checkpoint run/checkpoints --adapter average --ema");
    let [plain, average] =
        ["plain", "average"].map(|name| read(&folder.path().join(name).join("adapter_model.safetensors")));
    assert!(plain.keys().eq(average.keys()));
    let between = |name: &String| gap(&plain[name].data, &average[name].data);
    assert!(plain.keys().all(|name| (1e-6..1.0).contains(&between(name))), "near the last weights, but not they");
    last_loss(&config(folder.path(), "none", &[]));
    let said = fail(folder.path(), "export --checkpoint none/checkpoints --adapter other --ema");
    says!(said, "has no average of its weights");
}

#[test]
fn modules_have_ranks_and_scales_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let own = [
        ("lora.rank-pattern", "{ qkv_proj = 2 }"),
        ("lora.alpha-pattern", "{ \"layers.1.*.gate_up_proj\" = 4 }"),
        ("lora.dora", "true"),
    ];
    let with = |more: &[(&'static str, &'static str)]| [&own[..], more].concat();
    let before = last_loss(&config(folder.path(), "before", &with(&[("training.steps", "1"), ("lr.max", "1e-12")])));
    let whole = last_loss(&config(folder.path(), "whole", &with(&[])));
    assert!(whole < 0.9 * before, "{before} {whole}");
    let layout = [("parallel.tp", "2"), ("parallel.sp", "true"), ("parallel.dp", "2"), ("parallel.zero", "2")];
    let sharded = last_loss(&config(folder.path(), "sharded", &with(&layout)));
    assert!((sharded - whole).abs() < 1e-10 * whole, "{sharded} {whole}");
    succeed(folder.path(), "export --checkpoint whole/checkpoints --adapter adapter");
    let at = folder.path().join("adapter");
    let json: Value = serde_json::from_slice(&fs::read(at.join("adapter_config.json")).unwrap()).unwrap();
    let ranks: BTreeSet<String> = (0..4).map(|layer| format!("model.layers.{layer}.self_attn.qkv_proj")).collect();
    assert!(json["rank_pattern"].as_object().unwrap().keys().eq(&ranks));
    assert_eq!(json["alpha_pattern"], serde_json::json!({"model.layers.1.mlp.gate_up_proj": 4}));
    let adapter = read_adapter(&at, HfFolder::open(golden("hf/phi3")).unwrap().config()).unwrap();
    let of = |module: &str| adapter.plan.modules()[format!("model.layers.{module}").as_str()];
    assert_eq!((of("1.self_attn.qkv_proj"), of("1.mlp.gate_up_proj")), ((2, 16.0), (4, 4.0)));
    let start = at.display().to_string();
    let refused = |overrides: &[(&str, &str)]| {
        Plan::new(&config(folder.path(), "start", overrides), &[]).unwrap_err().to_string()
    };
    says!(refused(&[("lora.adapter", &start)]), "rank-pattern = {\"model.layers.0.self_attn.qkv_proj\":2,");
    says!(refused(&[("lora.rank-pattern", "{ q_proj = 2 }")]), "these are gate_up_proj, qkv_proj");
}

#[test]
fn names_are_those_of_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |of: &str| {
        let overrides = [("lora.target-modules", of)];
        Plan::new(&config(folder.path(), "run", &overrides), &[]).unwrap_err().to_string()
    };
    says!(
        refused("q_proj"),
        "no linear layer `q_proj`; it has down_proj, gate_up_proj, o_proj, qkv_proj, or all-linear"
    );
    let deepseek = DeepSeekV3Config::tiny().hf_names();
    let said = LoraConfig::default().plan(&deepseek).unwrap_err().to_string();
    says!(said, "it is whole on every rank, where adapters are not implemented");
}

/// As peft before 0.19.1 has them, which took the experts' matrices for their transposes.
#[test]
fn adapters_of_experts_the_other_way_round_are_refused() {
    let (folder, from) = (tempfile::tempdir().unwrap(), golden("lora/mixtral_experts/adapter"));
    let [config, file] = ["adapter_config.json", "adapter_model.safetensors"];
    fs::copy(from.join(config), folder.path().join(config)).unwrap();
    let turned = read(&from.join(file)).into_iter().map(|(name, mut tensor)| {
        let Some((module, part)) = name.split_once(".lora_").filter(|_| name.contains(".experts.")) else {
            return (name, tensor);
        };
        tensor.shape.reverse();
        let part = if part.starts_with('A') { "B" } else { "A" };
        (format!("{module}.lora_{part}.weight"), tensor)
    });
    write(&folder.path().join(file), &turned.collect());
    let base = HfFolder::open(golden("hf/mixtral")).unwrap();
    says!(
        read_adapter(folder.path(), base.config()).unwrap_err().to_string(),
        "layers.0.mlp.experts.base_layer.lora_A.weight` is [40, 96], the model's configuration needs [40, 32]"
    );
}
