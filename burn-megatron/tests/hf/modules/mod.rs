//! Plain Burn modules: read, computed with in tensor and sequence parallelism, and written.

mod half_precision;
mod lora;
mod t5;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::{ForwardError, ModuleOutputs, Settings, forward_module, read_module_inputs};
use burn_megatron::hf::{ModuleExport, ModuleFolder};
use models::Bert;
use models::hf::{HfModule, HostInput};
use serde_json::Value;
use tempfile::TempDir;

use crate::files::{Stored, Tensors, golden, read, write};
use crate::forward::difference;

const LAYOUTS: [&str; 5] = ["TP1", "TP2", "TP4", "TP2 SP", "TP4 SP"];

pub type Inputs = BTreeMap<String, HostInput>;

pub fn settings(layout: &str, gradients: bool) -> Settings {
    Settings { exact: true, gradients, ..Settings::new([Device::flex()], layout.parse().unwrap(), FloatDType::F64) }
}

pub fn run(model: &str, inputs: &Inputs, layout: &str, gradients: bool) -> Result<ModuleOutputs, ForwardError> {
    forward_module(&ModuleFolder::open(golden(model)).unwrap(), inputs, &settings(layout, gradients))
}

/// Inputs of the oracle, and the oracle.
fn oracle(model: &str) -> (Inputs, Tensors) {
    let path = golden(model).join("oracle.safetensors");
    let mut inputs = read_module_inputs(&path).unwrap();
    inputs.retain(|_, tensor| matches!(tensor, HostInput::Ints { .. }));
    (inputs, read(&path))
}

pub fn logits(outputs: &ModuleOutputs) -> &HostTensor {
    &outputs.tensors.iter().find(|(name, _)| *name == "logits").unwrap().1
}

/// Those of the last eight positions of each sequence.
pub fn last8(logits: &HostTensor) -> Vec<f64> {
    let [batch, length, classes] = logits.shape[..] else { panic!("{:?}", logits.shape) };
    logits.read_box(&[0..batch, length - 8..length, 0..classes])
}

/// Compares all gradients with the oracle's, and counts them; those that are below `zero` everywhere are rounding.
pub fn gradients_equal((model, layout): (&str, &str), outputs: &ModuleOutputs, oracle: &Tensors, zero: f64) -> usize {
    let mut compared = 0;
    for (name, expected) in oracle {
        let Some(name) = name.strip_prefix("grad.") else { continue };
        let found = &outputs.gradients[name];
        assert_eq!(found.shape, expected.shape, "{name}");
        // A key's bias changes no attention weight: its gradient is rounding.
        if expected.values().iter().all(|value| value.abs() < zero) {
            assert!(found.data.iter().all(|value| value.abs() < 1e-12), "{model} {layout}: {name}");
            continue;
        }
        let gap = difference(&found.data, &expected.values());
        assert!(gap < 1e-6, "{model} {layout}: gradient of {name} {gap:e}");
        compared += 1;
    }
    assert_eq!(outputs.gradients.len(), read(&golden(model).join("model.safetensors")).len());
    compared
}

/// Logits, loss and gradients are those of transformers; `limit` is of the first two.
fn equals_transformers(model: &str, limit: f64) {
    let (inputs, oracle) = oracle(model);
    for layout in LAYOUTS {
        let outputs = run(model, &inputs, layout, true).unwrap();
        let gap = difference(&last8(logits(&outputs)), &oracle["logits_last8"].values());
        assert!(gap < limit, "{model} {layout}: logits {gap:e}");
        let gap = difference(outputs.loss.as_slice(), &oracle["loss"].values());
        assert!(gap < limit, "{model} {layout}: loss {gap:e}");
        let compared = gradients_equal((model, layout), &outputs, &oracle, 1e-15);
        assert!(compared > 20);
    }
}

#[test]
fn bert_is_that_of_transformers() {
    equals_transformers("bert", 1e-9);
}

/// Tokens where the mask is 0 change nothing elsewhere, and -100 is no label.
#[test]
fn padding_of_bert_changes_nothing() {
    let (mut inputs, _) = oracle("bert");
    let ints = |data: Vec<i64>| HostInput::Ints { shape: vec![2, 40], data };
    let alike = |padding: i64| (0..80).map(|at| if at % 40 < 30 { at * 3 % 256 } else { padding }).collect();
    let labels = (0..80).map(|at| if at % 40 < 30 && at % 3 == 0 { at } else { -100 }).collect();
    inputs.insert("labels".into(), ints(labels));
    inputs.insert("attention_mask".into(), ints((0..80).map(|at| i64::from(at % 40 < 30)).collect()));
    inputs.insert("token_type_ids".into(), ints((0..80).map(|at| i64::from(at % 40 > 12)).collect()));
    let mut run_with = |padding: i64, layout: &str| {
        inputs.insert("input_ids".into(), ints(alike(padding)));
        let outputs = run("bert", &inputs, layout, true).unwrap();
        let first: Vec<f64> = logits(&outputs).read_box(&[0..2, 0..30, 0..256]);
        (first, outputs)
    };
    let (logits, one) = run_with(7, "TP1");
    for (padding, layout) in [(200, "TP1"), (7, "TP2"), (200, "TP2 SP")] {
        let (other_logits, other) = run_with(padding, layout);
        let gap = difference(&other_logits, &logits);
        assert!(gap < 1e-12, "{padding} {layout}: {gap:e}");
        assert!((other.loss.unwrap() - one.loss.unwrap()).abs() < 1e-12);
        let name = "bert.encoder.layer.3.output.dense.weight";
        assert!(difference(&other.gradients[name].data, &one.gradients[name].data) < 1e-11);
    }
    // The mask is not without effect.
    inputs.remove("attention_mask");
    let without = run("bert", &inputs, "TP1", false).unwrap();
    assert!((without.loss.unwrap() - one.loss.unwrap()).abs() > 1e-6);
}

/// A copy of a model's folder, changed.
pub fn changed(model: &str, config: impl FnOnce(&mut Value), change: impl FnOnce(&mut Tensors)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut json: Value = serde_json::from_slice(&fs::read(golden(model).join("config.json")).unwrap()).unwrap();
    config(&mut json);
    fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    let mut tensors = read(&golden(model).join("model.safetensors"));
    change(&mut tensors);
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

fn written<M: HfModule>(from: &Path, to: &Path, shard_bytes: u64) -> usize {
    let folder = ModuleFolder::open(from).unwrap();
    let config = folder.config::<M>().unwrap();
    let module: M = folder.read(&config, FloatDType::F64, &Device::flex()).unwrap();
    let what = ModuleExport { original: Some(folder.original()), shard_bytes, ..ModuleExport::default() };
    what.write(to, &module, &config).unwrap()
}

/// A folder that is read and written is the same, in one file and in several.
pub fn round_trip<M: HfModule>(model: &str) {
    let (from, to) = (golden(model), tempfile::tempdir().unwrap());
    let (whole, sharded) = (to.path().join("whole"), to.path().join("sharded"));
    assert_eq!(written::<M>(&from, &whole, u64::MAX), 1);
    assert!(read(&whole.join("model.safetensors")) == read(&from.join("model.safetensors")));
    let json =
        |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap() };
    assert_eq!(json(&whole), json(&from));
    let quarter = fs::metadata(from.join("model.safetensors")).unwrap().len() / 4;
    assert!(written::<M>(&from, &sharded, quarter) > 2);
    let again = to.path().join("again");
    written::<M>(&sharded, &again, u64::MAX);
    assert!(read(&again.join("model.safetensors")) == read(&from.join("model.safetensors")));
    // The sizes alone say the same.
    let config = ModuleFolder::open(&from).unwrap().config::<M>().unwrap();
    assert_eq!(M::from_hf(&M::to_hf(&config)).unwrap(), config);
}

#[test]
fn bert_is_written_as_it_was_read() {
    round_trip::<Bert>("bert");
}

/// Published folders have names of old, copies of tied weights, positions, and the other head.
#[test]
fn old_folders_of_bert() {
    let folder = changed(
        "bert",
        |_| {},
        |tensors| {
            for name in tensors.keys().filter(|name| name.contains("LayerNorm")).cloned().collect::<Vec<_>>() {
                let old =
                    name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
                let tensor = tensors.remove(&name).unwrap();
                tensors.insert(old, tensor);
            }
            tensors.insert(
                "cls.predictions.decoder.weight".into(),
                tensors["bert.embeddings.word_embeddings.weight"].clone(),
            );
            tensors.insert("bert.embeddings.position_ids".into(), Stored::f32(&[1, 128], 0.0));
            for (name, out) in [("bert.pooler.dense", 32), ("cls.seq_relationship", 2)] {
                tensors.insert(format!("{name}.weight"), Stored::f32(&[out, 32], 0.1));
                tensors.insert(format!("{name}.bias"), Stored::f32(&[out], 0.2));
            }
        },
    );
    let opened = ModuleFolder::open(folder.path()).unwrap();
    let (inputs, oracle) = oracle("bert");
    let outputs = forward_module(&opened, &inputs, &settings("TP2", false)).unwrap();
    assert!(difference(&last8(logits(&outputs)), &oracle["logits_last8"].values()) < 1e-9);
    let (name, relations) = &outputs.tensors[1];
    assert_eq!((name.as_str(), &relations.shape[..]), ("seq_relationship_logits", &[2, 2][..]));
    // Both rows of the head are alike: the loss of the next sentence is ln 2.
    let mut with_next = inputs.clone();
    with_next.insert("next_sentence_label".into(), HostInput::Ints { shape: vec![2], data: vec![0, 1] });
    let loss = forward_module(&opened, &with_next, &settings("TP2", false)).unwrap().loss.unwrap();
    assert!((loss - outputs.loss.unwrap() - 2.0_f64.ln()).abs() < 1e-12);
    // The file said `BertForMaskedLM`, and is kept.
    let to = folder.path().join("written");
    written::<Bert>(folder.path(), &to, u64::MAX);
    let json =
        |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap() };
    assert_eq!(json(&to), json(folder.path()));
    assert!(read(&to.join("model.safetensors")).contains_key("cls.seq_relationship.weight"));
}

/// `bert-base-chinese` has keys of a pooler that no code reads.
#[test]
fn keys_of_other_heads_change_nothing() {
    let keys = [
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ];
    let folder =
        changed("bert", |config| keys.iter().for_each(|key| config[key] = "first_token_transform".into()), |_| {});
    let read = ModuleFolder::open(folder.path()).unwrap().config::<Bert>().unwrap();
    assert_eq!(read, ModuleFolder::open(golden("bert")).unwrap().config::<Bert>().unwrap());
}

#[test]
fn what_does_not_fit_is_named() {
    let weight = "bert.encoder.layer.2.attention.self.key.weight";
    let open = |config: &dyn Fn(&mut Value), change: &dyn Fn(&mut Tensors)| {
        let folder = changed("bert", config, change);
        let (inputs, _) = oracle("bert");
        let opened = ModuleFolder::open(folder.path()).unwrap();
        forward_module(&opened, &inputs, &settings("TP1", false)).unwrap_err().to_string()
    };
    let same = |_: &mut Tensors| {};
    for (error, texts) in [
        (
            open(&|_| {}, &|tensors| drop(tensors.remove(weight))),
            ["model.safetensors: tensor `", "self.key.weight` is missing"],
        ),
        (
            open(&|_| {}, &|tensors| drop(tensors.insert(weight.into(), Stored::f32(&[3, 32], 1.0)))),
            ["has shape [3, 32]", "needs [32, 32]"],
        ),
        (
            open(&|_| {}, &|tensors| drop(tensors.insert("stray".into(), Stored::f32(&[3], 1.0)))),
            ["tensor `stray` is not part", "remove it"],
        ),
        (
            open(&|_| {}, &|tensors| {
                drop(tensors.insert("cls.predictions.decoder.bias".into(), Stored::f32(&[256], 1.0)))
            }),
            ["differs from", "`cls.predictions.bias`"],
        ),
        (
            open(&|config| config["hidden_act"] = "mish".into(), &same),
            ["`hidden_act` is mish", "gelu_pytorch_tanh, quick_gelu, relu, relu2"],
        ),
        (
            open(&|config| config["num_attention_heads"] = 5.into(), &same),
            ["`num_attention_heads` is 5", "nearest legal: 4"],
        ),
        (open(&|config| config["novel_key"] = 5.into(), &same), ["`novel_key`", "known"]),
        (open(&|config| config["is_decoder"] = true.into(), &same), ["`is_decoder` is true", "nearest legal: false"]),
        (
            open(&|config| config["architectures"] = serde_json::json!(["BertForQuestionAnswering"]), &same),
            ["BertForQuestionAnswering", "BertForMaskedLM, BertForPreTraining"],
        ),
    ] {
        assert!(texts.iter().all(|text| error.contains(text)), "{error}");
    }
}

#[test]
fn inputs_and_layouts_that_do_not_fit_are_named() {
    let (inputs, _) = oracle("bert");
    for (layout, text) in [
        ("DP2", "data-parallel 2: `forward` of this model has tensor and sequence parallelism; nearest legal: 1"),
        ("PP2", "pipeline-parallel 2"),
        ("TP3", "nearest"),
    ] {
        let error = run("bert", &inputs, layout, false).unwrap_err().to_string();
        says!(error, text);
    }
    let with = |name: &str, shape: &[usize], value: i64| {
        let mut inputs = inputs.clone();
        let data = vec![value; shape.iter().product()];
        inputs.insert(name.into(), HostInput::Ints { shape: shape.into(), data });
        run("bert", &inputs, "TP1", false).unwrap_err().to_string()
    };
    for (error, text) in [
        (with("input_ids", &[2, 40], 256), "tensor `input_ids` has 256 at [0, 0]; legal: 0 to 255"),
        (with("labels", &[2, 39], 1), "tensor `labels` has shape [2, 39]; legal: [2, 40]"),
        (with("token_type_ids", &[2, 40], 2), "tensor `token_type_ids` has 2 at [0, 0]; legal: 0 to 1"),
        (with("labels", &[2, 40], -100), "nothing to predict"),
        (with("input_ids", &[1, 129], 1), "at most 128 tokens (max_position_embeddings)"),
        (
            with("next_sentence_label", &[2], 0),
            "tensor `next_sentence_label` is none that this model takes; legal: input_ids, token_type_ids, attention_mask, labels",
        ),
        (with("position_ids", &[2, 40], 3), "tensor `position_ids` is none that this model takes"),
    ] {
        says!(error, text);
    }
    // This is said before the model runs, which would miss its tokens.
    assert!(run("bert", &Inputs::new(), "TP1", true).unwrap_err().to_string().contains("no `labels`"));
}
