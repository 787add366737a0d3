//! Fine-tuning: conversations, adapters, preferences, against transformers, peft and one device.

mod chat;
mod distill;
mod eval;
mod grpo;
mod lora;
mod lora_experts;
mod parquet;
mod preference;
mod prune;
mod qlora;
mod quantise;
mod real_weights;
mod talk;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use backend_dist::shard::HostTensor;
use burn_megatron::config::RunConfig;
use burn_megatron::element::Element;
use safetensors::SafeTensors;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

fn run(folder: &Path, arguments: &str) -> Output {
    let arguments = arguments.split_whitespace();
    Command::new(env!("CARGO_BIN_EXE_burn-megatron")).current_dir(folder).args(arguments).output().unwrap()
}

/// What a command says that must not fail.
fn succeed(folder: &Path, arguments: &str) -> String {
    let output = run(folder, arguments);
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What a command says that must fail.
fn fail(folder: &Path, arguments: &str) -> String {
    let output = run(folder, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments}: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

fn parse(text: &str, overrides: &[(&str, &str)]) -> RunConfig {
    let overrides: Vec<(String, String)> =
        overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    RunConfig::parse("run.toml", text, &overrides).unwrap_or_else(|errors| panic!("{errors}"))
}

/// The float tensors of a file.
fn read(path: &Path) -> BTreeMap<String, HostTensor> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().filter_map(|(name, view)| {
        let data = Element::of(view.dtype())?.decode(view.data());
        Some((name, HostTensor { shape: view.shape().to_vec(), data }))
    });
    tensors.collect()
}

/// Norm of the difference in relation to that of the expected values.
fn gap(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}
