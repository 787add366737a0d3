//! Adapters of routed experts: every layout, training, peft's files and merged weights.

use std::path::Path;

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::config::RunConfig;
use burn_megatron::train::Plan;
use burn_megatron::verify::{self, LoraKind};
use models::layers::BalanceOver;
use models::{Mixtral, MixtralConfig, MixtralVariant};

use super::{
    VERIFIED, adapters, assert_goes_on, assert_verified, fail, gap, golden, last_loss, planned_gib, read,
    resumed_as_whole, succeed,
};

#[test]
fn every_layout_trains_adapters_of_experts_as_one_device() {
    let settings = |lora| verify::Settings { lora: Some(lora), ..VERIFIED };
    let layouts = "DP2 EP2 ZeRO2, TP2 SP DP2, TP2 ETP1 EP2, TP2 SP DP2 EP2 ETP2, DP2 ETP2, DP4 EP2 ZeRO3 x2, CP2 EP2 selective, \
        PP2 DP2 EP2 ZeRO1 x2 uniform1, PP2 x2 zb-h1";
    let mixtral =
        MixtralConfig { router_balance: BalanceOver::Sequence, num_hidden_layers: 2, ..MixtralConfig::tiny() };
    let shared = MixtralConfig {
        variant: MixtralVariant::Qwen2Moe,
        moe_intermediate_size: Some(16),
        shared_expert_intermediate_size: Some(32),
        ..mixtral.clone()
    };
    let one_tensor = MixtralConfig { variant: MixtralVariant::GptOss, attention_bias: true, ..mixtral.clone() };
    let kinds = [
        (mixtral.clone(), LoraKind::Lora),
        (one_tensor, LoraKind::Lora),
        (shared, LoraKind::Rslora),
        (mixtral, LoraKind::Dora),
    ];
    for (config, kind) in kinds {
        assert_verified::<Mixtral>(&config, &settings(kind), layouts);
    }
}

fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
    adapters(folder, name, ["hf/mixtral", "target-modules = [\"q_proj\", \"w1\", \"w2\"]"], overrides)
}

/// Merges the trained adapters: the weights compute what the adapter computes next to its base, in every layout.
/// Returns the base.
fn merged(folder: &Path) -> String {
    let base = golden("hf/mixtral").display().to_string();
    succeed(folder, &format!("merge --hf {base} --adapter adapter --output merged --dtype f64"));
    let input = golden("hf/mixtral/oracle.safetensors").display().to_string();
    let forward = |model: &str, output: &str| {
        let flags = format!("{model} --input {input} --output {output}.safetensors --dtype f64 --exact");
        succeed(folder, &format!("forward {flags}"));
        read(&folder.join(format!("{output}.safetensors"))).remove("logits").unwrap().data
    };
    let merged = forward("--hf merged", "merged");
    assert!(gap(&forward(&format!("--hf {base}"), "base"), &merged) > 1e-3);
    for (index, layout) in ["", "--expert-parallel 2 --data-parallel 2"].into_iter().enumerate() {
        let apart = forward(&format!("--hf {base} --adapter adapter {layout}"), &format!("apart{index}"));
        assert!(gap(&apart, &merged) < 1e-9, "{layout}");
    }
    base
}

#[test]
fn adapters_of_experts_are_trained_saved_exported_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let config = |name: &str, overrides: &[(&str, &str)]| config(folder.path(), name, overrides);
    // With the experts elsewhere.
    let layout = [("parallel.tp", "2"), ("parallel.dp", "2"), ("parallel.ep", "2"), ("parallel.zero", "2")];
    let whole = resumed_as_whole(config, &layout);

    // Frozen experts are not in checkpoints, so they have no moments and no master weights.
    let checkpoint = Checkpoint::open(at("whole/checkpoints")).unwrap();
    let has = |name: &str, shape: &[usize]| checkpoint.check(checkpoint.weights(), name, shape).is_ok();
    let expert = "layers.3.mlp.experts.7";
    assert!(!has(&format!("{expert}.gate_proj.weight"), &[48, 32]));
    assert!(has(&format!("{expert}.gate_proj.lora_A.weight"), &[4, 32]));
    assert!(has(&format!("{expert}.down_proj.lora_B.weight"), &[32, 4]));
    assert!(!has(&format!("{expert}.up_proj.lora_A.weight"), &[4, 32]));

    succeed(folder.path(), "export --checkpoint whole/checkpoints --adapter adapter");
    let file = read(&at("adapter/adapter_model.safetensors"));
    let name = "base_model.model.model.layers.3.block_sparse_moe.experts.7";
    assert_eq!(file[&format!("{name}.w1.lora_A.weight")].shape, [4, 32]);
    assert_eq!(file[&format!("{name}.w1.lora_B.weight")].shape, [48, 4]);
    assert_eq!(file[&format!("{name}.w2.lora_A.weight")].shape, [4, 48]);
    let adapter = assert_goes_on(folder.path(), "hf/mixtral", config, whole);
    assert_eq!(adapter.plan.len(), 4 * (1 + 2 * 8));

    let base = merged(folder.path());
    let generate = |model: &str| {
        let flags = "--tokens 7,201,45,9 --max-new-tokens 8 --greedy --dtype f64";
        succeed(folder.path(), &format!("generate {model} {flags}"))
    };
    assert_eq!(generate(&format!("--hf {base} --adapter adapter")), generate("--hf merged"));
}

/// The merged weights divide by the norms of `W + s B A` itself.
#[test]
fn magnitudes_of_experts_are_trained_exported_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    let dora = ("lora.dora", "true");
    let before = last_loss(&config(folder.path(), "before", &[dora, ("training.steps", "1"), ("lr.max", "1e-12")]));
    assert!(last_loss(&config(folder.path(), "run", &[dora])) < 0.9 * before);
    succeed(folder.path(), "export --checkpoint run/checkpoints --adapter adapter");
    let file = read(&folder.path().join("adapter/adapter_model.safetensors"));
    let name = "base_model.model.model.layers.3.block_sparse_moe.experts.7";
    assert_eq!(file[&format!("{name}.w1.lora_magnitude_vector")].shape, [48]);
    assert_eq!(file[&format!("{name}.w2.lora_magnitude_vector")].shape, [32]);
    merged(folder.path());
}

#[test]
fn what_experts_cannot_have_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused =
        |overrides: &[(&str, &str)]| Plan::new(&config(folder.path(), "run", overrides), &[]).unwrap_err().to_string();
    let said = refused(&[("lora.target-modules", "experts.3.w1")]);
    says!(said, "experts.0.w1` are not supported: the experts of a layer have adapters all or none");
    let run = "[model]\npreset = \"mixtral-8x7b\"\n[data]\ntext = \"a\"\n[training]\ndtype = \"bf16\"\nseq-length = 2048\n\
               [lora]\nrank = 16\n[recompute]\ngranularity = \"full\"\n[parallel]\nexpert-parallel = 8\ndata-parallel = 8\n";
    std::fs::write(folder.path().join("run.toml"), run).unwrap();
    let gib = |flags: &str| planned_gib(folder.path(), flags);
    let [all, attention, experts] = ["--lora.rank none", "", "--lora.target-modules all-linear,w1,w2,w3"].map(gib);
    assert!(attention < experts && experts < 0.6 * all, "{all} {attention} {experts} GiB");
    let said = fail(folder.path(), "plan run.toml --gpu h200 --lora.target-modules layers.1.*.w1");
    says!(said, "of some layers only cannot be predicted");
}
