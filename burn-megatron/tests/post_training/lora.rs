//! Adapters: every layout, training, and peft's files both ways. `lora_fused.rs` compares with what peft computes.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::config::RunConfig;
use burn_megatron::element::Element;
use burn_megatron::hf::{HfFolder, Merged, TensorReader, read_adapter};
use burn_megatron::train::Plan;
use burn_megatron::verify::{self, LoraKind};
use models::layers::BalanceOver;
use models::{Llama, LlamaConfig, LlamaVariant, Mixtral, MixtralConfig, MixtralVariant};
use serde_json::Value;

use super::{
    VERIFIED, adapters, assert_goes_on, assert_verified, fail, gap, planned_gib, read, resumed_as_whole, succeed,
};

fn golden() -> PathBuf {
    super::golden("lora")
}

/// A rank reads its part of a merged weight.
#[test]
fn boxes_of_merged_weights_are_parts_of_the_whole() {
    let base = HfFolder::open(golden().join("base")).unwrap();
    let (name, shape) = ("layers.0.attention.q_proj.weight", [32, 32]);
    for kind in ["lora_all", "lora_qv_rs", "dora"] {
        let adapter = read_adapter(&golden().join(kind).join("adapter"), base.config()).unwrap();
        let merged = Merged { base: &base, adapters: &[(adapter, 1.0)], element: None };
        let read = |ranges: [Range<usize>; 2]| Element::F32.decode(&merged.read_bytes(name, &shape, &ranges).unwrap());
        let whole = read([0..32, 0..32]);
        assert_eq!(read([3..5, 1..4]), [3, 4].map(|row| whole[row * 32 + 1..row * 32 + 4].to_vec()).concat());
    }
}

#[test]
fn several_adapters_are_added_with_their_factors() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| golden().join(name).display().to_string();
    let (base, all, few) = (at("base"), at("lora_all/adapter"), at("lora_qv_rs/adapter"));
    let merge = |flags: &str, name: &str| {
        let said = succeed(folder.path(), &format!("merge --hf {base} {flags} --output {name} --dtype f64"));
        (said, read(&folder.path().join(name).join("model.safetensors")))
    };
    let large = format!("merge --hf {base} --adapter {all} --weight 1e6 --output large --dtype f16");
    says!(fail(folder.path(), &large), "and f16 has nothing above 6.5504e4; take a wider type");
    let (_, first) = merge(&format!("--adapter {all}"), "first");
    let (_, second) = merge(&format!("--adapter {few}"), "second");
    let (said, both) = merge(&format!("--adapter {all} --adapter {few} --weight 0.25 --weight -2"), "both");
    says!(said, "28 of the model's layers");
    for (name, base) in read(&golden().join("base/model.safetensors")) {
        let sum = |at: usize| {
            let base = base.data[at];
            base + 0.25 * (first[&name].data[at] - base) - 2.0 * (second[&name].data[at] - base)
        };
        let expected: Vec<f64> = (0..base.data.len()).map(sum).collect();
        assert!(gap(&both[&name].data, &expected) < 1e-7, "{name}");
    }
    let refused =
        fail(folder.path(), &format!("merge --hf {base} --adapter {all} --weight 1 --weight 2 --output none"));
    says!(refused, "2 factors (--weight) for 1 adapters; nearest legal: 1, or none");
}

#[test]
fn every_layout_trains_adapters_as_one_device() {
    let settings = |lora| verify::Settings { lora: Some(lora), ..VERIFIED };
    let layouts = "TP2 SP DP2 ZeRO1 x2, TP8 SP, PP2 DP2 ZeRO2 x2 uniform1, CP2 DP2 ZeRO3 selective, TP2 PP2 x2 zb-h1, \
        PP2 x4 gpipe uniform1 keep-attention";
    let llama = LlamaConfig { num_hidden_layers: 2, attention_bias: true, ..LlamaConfig::tiny() };
    for kind in [LoraKind::Lora, LoraKind::Rslora, LoraKind::Dora] {
        assert_verified::<Llama>(&llama, &settings(kind), layouts);
    }
    // Norms after, norms of projections, 1 + w norms, windows: every linear layer has an adapter.
    for variant in [LlamaVariant::Olmo2, LlamaVariant::Gemma3] {
        let config = LlamaConfig { variant, num_hidden_layers: 2, ..LlamaConfig::tiny() };
        assert_verified::<Llama>(&config, &settings(LoraKind::Dora), layouts);
    }
    // Attention of a model with experts, whose router is frozen too.
    let layouts = "TP2 SP DP2, DP2 EP2 ZeRO2";
    let moe = MixtralConfig { router_balance: BalanceOver::Sequence, ..MixtralConfig::tiny() };
    let gpt_oss = MixtralConfig { variant: MixtralVariant::GptOss, attention_bias: true, ..moe.clone() };
    for config in [moe, gpt_oss] {
        assert_verified::<Mixtral>(&config, &settings(LoraKind::Lora), layouts);
    }
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let base = HfFolder::open(golden().join("base")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let original: Value =
        serde_json::from_str(&fs::read_to_string(golden().join("lora_all/adapter/adapter_config.json")).unwrap())
            .unwrap();
    fs::copy(
        golden().join("lora_all/adapter/adapter_model.safetensors"),
        folder.path().join("adapter_model.safetensors"),
    )
    .unwrap();
    let refused = |key: &str, value: Value| {
        let mut config = original.clone();
        config[key] = value;
        fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        read_adapter(folder.path(), base.config()).unwrap_err().to_string()
    };
    for (key, value, words) in [
        (
            "r",
            serde_json::json!(5),
            "lora_A.weight` is [4, 32], the model's configuration needs [5, 32]; the adapter belongs to another",
        ),
        ("target_modules", serde_json::json!(["q_proj"]), "is not part of the model"),
        ("target_modules", serde_json::json!(["query"]), "no linear layer `query`; it has"),
        ("target_modules", serde_json::json!(".*q_proj"), "is not part of the model"),
        ("target_modules", serde_json::json!("(?!q).*"), "no regular expression without look-around"),
        ("exclude_modules", serde_json::json!(".*"), "leaves no linear layer"),
        ("peft_type", serde_json::json!("IA3"), "peft_type = IA3 is not supported; legal: LORA"),
        ("init_lora_weights", serde_json::json!("pissa_niter_4"), "an adapter of changed base weights"),
        ("modules_to_save", serde_json::json!(["lm_head"]), "modules_to_save"),
        ("kasa_config", serde_json::json!({"beta": 1e-4}), "kasa_config"),
        ("use_dora", serde_json::json!(true), "lora_magnitude_vector` is missing"),
    ] {
        says!(refused(key, value), words, "adapter_");
    }
}

fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
    adapters(folder, name, ["lora/base", ""], overrides)
}

#[test]
fn a_run_trains_saves_resumes_and_exports_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let config = |name: &str, overrides: &[(&str, &str)]| config(folder.path(), name, overrides);
    let layout = [("parallel.tp", "2"), ("parallel.dp", "2"), ("parallel.zero", "2")];
    let whole = resumed_as_whole(config, &layout);

    // Frozen weights are not in checkpoints, and nothing but adapters has moments.
    let checkpoint = Checkpoint::open(at("whole/checkpoints")).unwrap();
    let shape = [160, 32];
    assert!(checkpoint.check(checkpoint.weights(), "embed_tokens.weight", &shape).is_err());
    assert!(checkpoint.check(checkpoint.weights(), "layers.0.attention.q_proj.weight", &[32, 32]).is_err());
    assert!(checkpoint.check(checkpoint.weights(), "layers.0.attention.q_proj.lora_A.weight", &[4, 32]).is_ok());

    // As peft writes it, and with the base it computes what the run did.
    succeed(folder.path(), "export --checkpoint whole/checkpoints --adapter adapter");
    for command in
        ["export --checkpoint whole/checkpoints --hf model", "generate --checkpoint whole/checkpoints --tokens 1,2"]
    {
        says!(fail(folder.path(), command), "has adapters only", "merge");
    }
    assert_eq!(assert_goes_on(folder.path(), "lora/base", config, whole).plan.len(), 7 * 4);

    let base = golden().join("base").display().to_string();
    succeed(folder.path(), &format!("merge --hf {base} --adapter adapter --output merged --dtype f64"));
    let input = golden().join("lora_all/oracle.safetensors").display().to_string();
    succeed(
        folder.path(),
        &format!("forward --hf merged --input {input} --output merged.safetensors --dtype f64 --exact"),
    );
    succeed(
        folder.path(),
        &format!(
            "forward --hf {base} --adapter adapter --input {input} --output apart.safetensors --dtype f64 --exact"
        ),
    );
    let [merged, apart] = ["merged.safetensors", "apart.safetensors"].map(|name| read(&at(name)));
    assert!(gap(&merged["logits"].data, &apart["logits"].data) < 1e-9);

    // A run that resumes needs the base that it had, wherever that is now.
    fs::create_dir(at("moved")).unwrap();
    for entry in fs::read_dir(golden().join("base")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), at("moved").join(entry.file_name())).unwrap();
    }
    let on = |base: &str, allowed: &[String]| {
        Plan::new(&config("half", &[("model.hf", base)]), allowed).map(drop).map_err(|error| error.to_string())
    };
    let [moved, merged] = ["moved", "merged"].map(|name| at(name).display().to_string());
    assert_eq!(on(&moved, &[]), Ok(()));
    says!(on(&merged, &[]).unwrap_err(), "model.hf has other weights than when", "--allow-change model.hf");
    assert_eq!(on(&merged, &["model.hf".into()]), Ok(()));
    let mut random = config("half", &[]);
    random.model.hf = None;
    let on_none = |allowed: &[String]| Plan::new(&random, allowed).map(drop).map_err(|error| error.to_string());
    says!(on_none(&[]).unwrap_err(), "model.hf was \"", "now it is none", "--allow-change model.hf");
    assert_eq!(on_none(&["model.hf".into()]), Ok(()));
}

#[test]
fn adapters_that_a_model_cannot_have_are_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let refused =
        |overrides: &[(&str, &str)]| Plan::new(&config(folder.path(), "run", overrides), &[]).unwrap_err().to_string();
    assert!(
        refused(&[("lora.target-modules", "q_prj")])
            .contains("lora.target-modules: the model has no linear layer `q_prj`")
    );
    let run = "[model]\npreset = \"llama3-8b\"\n[data]\ntext = \"a\"\n[lora]\nrank = 8\n";
    std::fs::write(folder.path().join("run.toml"), run).unwrap();
    let gib = |flags: &str| planned_gib(folder.path(), flags);
    let short = "--training.seq-length 2048 --training.dtype bf16 --recompute.granularity full";
    let [all, adapters] = ["--lora.rank none", ""].map(|lora| gib(&format!("{short} {lora}")));
    let few = gib(&format!("{short} --lora.base nf4"));
    assert!(adapters < 0.25 * all && few < 0.6 * adapters, "{all} {adapters} {few} GiB");
    let said =
        fail(folder.path(), "plan run.toml --gpu h200 --model.preset deepseek-v3 --lora.target-modules gate_proj");
    says!(said, "lora.rank = 8: memory and time of adapters in a model with latent attention");
    let other = golden().join("dora/adapter").display().to_string();
    says!(refused(&[("lora.adapter", &other)]), "it has rank = 4, alpha = 8", "dora = true");
}
