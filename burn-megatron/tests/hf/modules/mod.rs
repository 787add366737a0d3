//! Plain Burn modules: read, computed with in tensor and sequence parallelism, and written.

mod bert;
mod bert_model;
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
use models::hf::{HfModule, HostInput};
use serde_json::Value;
use tempfile::TempDir;

use crate::files::{Tensors, golden, read, write};
use crate::forward::difference;
use crate::round_trip::{succeed, text};

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
    let inputs = read_module_inputs(&path).unwrap();
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

/// Files with what transformers computed are inputs as they are, for plain Burn modules as for causal models.
#[test]
fn what_a_module_computed_is_no_input_of_it() {
    let root = tempfile::tempdir().unwrap();
    let output = root.path().join("out.safetensors");
    for model in ["bert", "t5", "vit", "llava", "siglip"] {
        let (folder, oracle) = (golden(model), golden(model).join("oracle.safetensors"));
        let words = ["forward", "--hf", text(&folder), "--input", text(&oracle), "--output", text(&output)];
        succeed(&words);
        assert_eq!(read(&output)["loss"].values().len(), 1, "{model}");
        // What was written is an input again, next to the tokens.
        let mut again = read(&oracle);
        again.extend(read(&output));
        write(&root.path().join("again.safetensors"), &again);
        succeed(&[
            "forward",
            "--hf",
            text(&folder),
            "--input",
            text(&root.path().join("again.safetensors")),
            "--output",
            text(&output),
        ]);
    }
}
