//! Adapters of plain Burn modules: what peft computes, its files both ways, merged weights.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::tensor::{Device, FloatDType};
use burn_megatron::element::Element;
use burn_megatron::forward::{ModuleOutputs, forward_module, read_module_inputs};
use burn_megatron::hf::{ModuleExport, ModuleFolder, read_module_adapter, write_module_adapter};
use models::hf::HfModule;
use models::images::{Llava, Vit};
use models::lora::{ALL_LINEAR, LoraConfig, module_adapter, with_adapters};
use models::{Bert, BertConfig, T5};
use serde_json::Value;

use super::{Inputs, last8, logits, settings};
use crate::files::{golden, read};
use crate::forward::difference;

/// What transformers rounds to fp32 has the wider bound: norms of T5 and LLaVA, attention's softmax of ViT.
const MODELS: [(&str, f64); 4] = [("bert", 1e-9), ("t5", 1e-6), ("vit", 1e-6), ("llava", 1e-6)];

fn lora(model: &str) -> PathBuf {
    golden("../lora").join(model)
}

fn run(model: &str, layout: &str) -> ModuleOutputs {
    let folder = ModuleFolder::open(golden(model)).unwrap().with_adapter(lora(model).join("adapter"));
    let mut inputs: Inputs = read_module_inputs(&lora(model).join("oracle.safetensors")).unwrap();
    inputs.retain(|name, _| ["input_ids", "labels", "pixel_values"].contains(&name.as_str()));
    forward_module(&folder, &inputs, &settings(layout, true)).unwrap()
}

#[test]
fn modules_with_adapters_compute_what_peft_does() {
    for (model, limit) in MODELS {
        let oracle = read(&lora(model).join("oracle.safetensors"));
        for layout in ["TP1", "TP2", "TP2 SP"] {
            let outputs = run(model, layout);
            let found = logits(&outputs);
            let found = if found.shape.len() == 3 { last8(found) } else { found.data.clone() };
            let gap = difference(&found, &oracle["logits"].values());
            assert!(gap < limit, "{model} {layout}: logits {gap:e}");
            let gap = difference(outputs.loss.as_slice(), &oracle["loss"].values());
            assert!(gap < limit, "{model} {layout}: loss {gap:e}");
            let of_gradients = if limit < 1e-6 { 1e-6 } else { 2e-6 };
            let names: Vec<&str> = oracle.keys().filter_map(|name| name.strip_prefix("grad.")).collect();
            assert_eq!(outputs.gradients.len(), names.len(), "{model}: only adapters have gradients");
            for name in names {
                let gap = difference(&outputs.gradients[name].data, &oracle[&format!("grad.{name}")].values());
                assert!(gap < of_gradients, "{model} {layout}: gradient of {name} {gap:e}");
            }
        }
    }
}

/// An adapter that is read and written is the same, and merging is that of `merge_and_unload`.
fn both_ways<M: HfModule>(model: &str, task: Value) {
    let (folder, to) = (ModuleFolder::open(golden(model)).unwrap(), tempfile::tempdir().unwrap());
    let config = folder.config::<M>().unwrap();
    let module: M = folder.read(&config, FloatDType::F64, &Device::flex()).unwrap();
    let adapter = read_module_adapter(&lora(model).join("adapter"), &module).unwrap();
    let module = with_adapters(module, &adapter.plan, Some(&adapter.tensors)).unwrap();
    let written = to.path().join("adapter");
    write_module_adapter(&written, &module, &adapter.plan, Some("base")).unwrap();
    let tensors = |folder: PathBuf| read(&folder.join("adapter_model.safetensors"));
    assert!(tensors(written.clone()) == tensors(lora(model).join("adapter")), "{model}");
    let json: Value = serde_json::from_slice(&fs::read(written.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&json["task_type"], &json["base_model_name_or_path"]), (&task, &"base".into()), "{model}");

    let what = ModuleExport { element: Element::F64, ..ModuleExport::default() };
    what.write(to.path().join("merged"), &module, &config).unwrap();
    let found = read(&to.path().join("merged/model.safetensors"));
    let (base, expected) =
        (read(&golden(model).join("model.safetensors")), read(&lora(model).join("merged.safetensors")));
    assert_eq!((found.len(), expected.is_empty()), (base.len(), false));
    for (name, expected) in expected {
        let gap = difference(&found[&name].values(), &expected.values());
        assert!(gap < 1e-6, "{model}: {name} {gap:e}");
        assert!(difference(&base[&name].values(), &expected.values()) > 1e-3, "{model}: {name}");
    }
}

#[test]
fn adapters_of_modules_are_written_as_peft_writes_them() {
    both_ways::<Bert>("bert", Value::Null);
    both_ways::<T5>("t5", "SEQ_2_SEQ_LM".into());
    both_ways::<Vit>("vit", Value::Null);
    both_ways::<Llava>("llava", "CAUSAL_LM".into());
}

/// `merge` is `merge_and_unload` from the command line; what has no adapter is as it was.
#[test]
fn adapters_of_modules_are_merged() {
    let merge = |model: &str, to: &Path, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        command.arg("merge").arg("--hf").arg(golden(model)).arg("--adapter").arg(lora(model).join("adapter"));
        command.arg("--output").arg(to).args(more).output().unwrap()
    };
    for (model, _) in MODELS {
        let folder = tempfile::tempdir().unwrap();
        let (exact, own) = (folder.path().join("f64"), folder.path().join("own"));
        for (to, more) in [(&exact, &["--dtype", "f64"][..]), (&own, &[])] {
            let output = merge(model, to, more);
            let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success() && said.contains("layers with their adapters"), "{model}: {said}{error}");
        }
        let tensors = |folder: &Path| read(&folder.join("model.safetensors"));
        let (base, expected) = (tensors(&golden(model)), read(&lora(model).join("merged.safetensors")));
        let (exact, own) = (tensors(&exact), tensors(&own));
        assert_eq!((exact.len(), own.len()), (base.len(), base.len()), "{model}");
        for (name, base) in &base {
            match expected.get(name) {
                Some(expected) => {
                    let gap = difference(&exact[name].values(), &expected.values());
                    assert!(gap < 1e-6, "{model}: {name} {gap:e}");
                    assert!(difference(&own[name].values(), &expected.values()) < 1e-6, "{model}: {name}");
                }
                None if name.ends_with(".bias") => assert!(own[name] == *base, "{model}: {name}"),
                // The file has some of the merged weights.
                None => {}
            }
        }
        assert_eq!(expected.keys().filter(|name| base.contains_key(*name)).count(), expected.len(), "{model}");
    }
    let to = tempfile::tempdir().unwrap();
    let adapter = lora("bert").join("adapter");
    for (more, words) in
        [(["--weight", "0.5"], "nearest legal: none"), (["--adapter", adapter.to_str().unwrap()], "nearest legal: 1")]
    {
        let output = merge("bert", &to.path().join("out"), &more);
        assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains(words), "{more:?}");
    }
}

/// A sum beyond the type was written as infinity.
#[test]
fn sums_that_a_type_does_not_hold_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(lora("bert").join("adapter").join(name), folder.path().join(name)).unwrap();
    }
    let path = folder.path().join("adapter_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["lora_alpha"] = 1e9.into();
    fs::write(path, config.to_string()).unwrap();
    let base = ModuleFolder::open(golden("bert")).unwrap().with_adapter(folder.path());
    let merge = |element| base.write_merged(&folder.path().join("out"), Some(element), u64::MAX);
    says!(merge(Element::F16).unwrap_err().to_string(), "f16 has nothing above 6.5504e4; take a wider type");
    merge(Element::F32).unwrap();
}

/// peft before transformers 5 named layers of ViT as files do.
#[test]
fn names_of_every_version_of_transformers() {
    let folder = ModuleFolder::open(golden("vit")).unwrap();
    let vit: Vit = folder.read(&folder.config::<Vit>().unwrap(), FloatDType::F32, &Device::flex()).unwrap();
    let plan = |targets: &[&str]| {
        let target_modules = targets.iter().map(|target| target.to_string()).collect();
        LoraConfig { target_modules, ..LoraConfig::default() }.module_plan(&vit)
    };
    let names = |targets: &[&str]| {
        let plan = plan(targets).unwrap();
        plan.targets().map(|(_, theirs, _)| theirs.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(&["layer.0.attention.attention.query"]), ["vit.encoder.layer.0.attention.attention.query"]);
    assert_eq!(names(&["layers.0.attention.q_proj"]), ["vit.layers.0.attention.q_proj"]);
    assert!(names(&[ALL_LINEAR]).contains(&"vit.layers.2.mlp.fc2".to_string()));
    says!(plan(&["q_prj"]).unwrap_err(), "no linear layer `q_prj`; it has classifier, fc1, fc2, k_proj");

    let plan = plan(&["query", "value"]).unwrap();
    let (old, to) = (with_adapters(vit.clone(), &plan, None).unwrap(), tempfile::tempdir().unwrap());
    write_module_adapter(&to.path().join("old"), &old, &plan, None).unwrap();
    let again = read_module_adapter(&to.path().join("old"), &vit).unwrap();
    assert_eq!(again.tensors, module_adapter(&old, plan).unwrap().tensors);
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let sizes = models::sized! { BertConfig::base();
        hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 9
    };
    let bert = Bert::new(&sizes, &Device::flex());
    let plan = LoraConfig::default().module_plan(&bert).unwrap();
    let error = with_adapters(bert.layers[0].clone(), &plan, None).unwrap_err().to_string();
    says!(error, "the layer `layers.0.attention.key` cannot have an adapter");
    assert!(module_adapter(&bert, plan.clone()).is_err());
    let error = with_adapters(with_adapters(bert, &plan, None).unwrap(), &plan, None).unwrap_err().to_string();
    says!(error, "`layers.0.attention.query` are not supported: it has an adapter already");
    let other = ModuleFolder::open(golden("t5")).unwrap();
    let t5: T5 = other.read(&other.config::<T5>().unwrap(), FloatDType::F32, &Device::flex()).unwrap();
    let error = read_module_adapter(&lora("bert").join("adapter"), &t5).unwrap_err().to_string();
    // The first of the file's list.
    says!(error, "no linear layer `key`", "belongs to another model");
    let refused = |targets: &[&str]| {
        let target_modules = targets.iter().map(|target| target.to_string()).collect();
        LoraConfig { target_modules, ..LoraConfig::default() }.module_plan(&t5).unwrap_err().to_string()
    };
    says!(refused(&["q", "lm_head"]), "adapters of `lm_head` are not supported: its weight is the embedding's (tied)");
    says!(refused(&["shared"]), "adapters of `shared` are not supported: it is an embedding");
    let folder = ModuleFolder::open(golden("vit")).unwrap();
    let vit: Vit = folder.read(&folder.config::<Vit>().unwrap(), FloatDType::F32, &Device::flex()).unwrap();
    let config = LoraConfig { target_modules: vec!["projection".into()], ..LoraConfig::default() };
    says!(config.module_plan(&vit).unwrap_err(), "patch_embeddings.projection` are not supported: it is a convolution");
}
