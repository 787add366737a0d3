//! Fine-tuning: conversations, adapters, preferences, against transformers, peft and one device.

#[path = "../support/command.rs"]
mod command;
#[macro_use]
#[path = "../support/says.rs"]
mod says;

mod batch;
mod chat;
mod chat_runs;
mod distill;
mod eval;
mod eval_t5;
mod grpo;
mod grpo_reference;
mod lora;
mod lora_experts;
mod lora_fused;
mod lora_groups;
mod parquet;
mod preference;
mod preference_resumed;
mod preference_runs;
mod prune;
mod prune_variants;
mod qlora;
mod quantise;
mod quantise_sequential;
mod real_weights;
mod talk;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType};
use burn_megatron::config::RunConfig;
use burn_megatron::element::Element;
use burn_megatron::hf::{HfFolder, read_adapter, write_adapter};
use burn_megatron::train::{Plan, TrainReport, train};
use burn_megatron::verify;
use command::{fail, succeed};
use models::CausalLm;
use models::lora::Adapter;
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::Value;

/// A line of a run's log.
type Line = BTreeMap<String, Value>;

/// What adapters are verified with.
const VERIFIED: verify::Settings = verify::Settings {
    steps: 3,
    global_batch: 8,
    seq: 16,
    seed: 1234,
    dtype: FloatDType::F64,
    tolerance: None,
    fp8: None,
    lora: None,
    base: None,
};

/// In every layout of a list a model trains as on one device.
fn assert_verified<M: CausalLm + 'static>(config: &M::Config, settings: &verify::Settings, layouts: &str) {
    let layouts: Vec<_> = layouts.split(", ").map(|layout| layout.parse().unwrap()).collect();
    let lines = verify::verify::<M>(config, settings, &[Device::flex()].into(), &layouts, |_| ()).unwrap();
    lines.iter().for_each(|line| assert!(line.passes(), "{settings:?}: {line}"));
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

fn parse(text: &str, overrides: &[(&str, &str)]) -> RunConfig {
    let overrides: Vec<(String, String)> =
        overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    RunConfig::parse("run.toml", text, &overrides).unwrap_or_else(|errors| panic!("{errors}"))
}

/// The report of a run on one device.
fn trained(config: &RunConfig) -> TrainReport {
    train(&Plan::new(config, &[]).unwrap(), vec![Device::flex()], &mut |_| ()).unwrap()
}

/// A run of adapters on a book in f64: eight steps, unless overrides say otherwise. `own` are further keys of `[lora]`.
fn adapters(folder: &Path, name: &str, [base, own]: [&str; 2], overrides: &[(&str, &str)]) -> RunConfig {
    let book = folder.join("book.txt");
    fs::write(&book, "The quick brown fox jumps over the lazy dog.\n\n".repeat(60)).unwrap();
    let text = format!(
        "[model]\nhf = {:?}\n[training]\nsteps = 8\nglobal-batch = 4\nseq-length = 16\ndtype = \"f64\"\n[lr]\nmax = 2e-2\n\
         decay = \"8 steps\"\n[lora]\nrank = 4\n{own}\n[data]\ntext = [{book:?}]\ntokenizer = \"char\"\nsamples = 32\n\
         [evaluation]\nbatches = 1\n[output]\ndirectory = {:?}\n",
        golden(base),
        folder.join(name)
    );
    parse(&text, overrides)
}

/// The last loss of the run `whole`, which learns, and which one ends with too that stops after half of the steps and resumes
/// in another layout.
fn resumed_as_whole(config: impl Fn(&str, &[(&str, &str)]) -> RunConfig, layout: &[(&str, &str)]) -> f64 {
    let loss = |name: &str, overrides: &[(&str, &str)]| last_loss(&config(name, overrides));
    let before = loss("before", &[("training.steps", "1"), ("lr.max", "1e-12")]);
    let whole = loss("whole", &[]);
    assert!(whole < 0.9 * before, "{before} {whole}");
    loss("half", &[("training.steps", "4")]);
    let resumed = loss("half", layout);
    assert!((resumed - whole).abs() < 1e-10 * whole, "{resumed} {whole}");
    whole
}

/// The exported `adapter` of a folder is written again as it was, and a run that starts from it has the loss `whole`.
fn assert_goes_on(
    folder: &Path,
    base: &str,
    config: impl Fn(&str, &[(&str, &str)]) -> RunConfig,
    whole: f64,
) -> Adapter {
    let (base, [at, again]) =
        (HfFolder::open(golden(base)).unwrap(), ["adapter", "again"].map(|name| folder.join(name)));
    let adapter = read_adapter(&at, base.config()).unwrap();
    write_adapter(&again, &adapter, None).unwrap();
    assert_eq!(read_adapter(&again, base.config()).unwrap().tensors, adapter.tensors);
    let start = at.display().to_string();
    let continued =
        last_loss(&config("start", &[("lora.adapter", &start), ("training.steps", "1"), ("lr.max", "1e-12")]));
    assert!((continued - whole).abs() < 1e-5 * whole, "an adapter in fp32: {continued} {whole}");
    adapter
}

fn last_loss(config: &RunConfig) -> f64 {
    trained(config).last.unwrap().loss
}

/// The log of the run whose output folder is `name`.
fn log(folder: &Path, name: &str) -> Vec<Line> {
    let lines = fs::read_to_string(folder.join(name).join("steps.jsonl")).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn assert_same(found: &[Line], expected: &[Line], keys: &[&str], bound: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        for key in keys.iter().filter(|key| expected.contains_key(**key)) {
            let [a, b] = [found, expected].map(|line| line[*key].as_f64().unwrap());
            assert!((a - b).abs() <= bound * b.abs().max(1.0), "{what}: {key} {a} {b} in {found:?}");
        }
    }
}

/// The memory that `plan` predicts for `run.toml`, GiB.
fn planned_gib(folder: &Path, flags: &str) -> f64 {
    let said = succeed(folder, &format!("plan run.toml --gpu h200 {flags}"));
    let line = said.lines().find(|line| line.starts_with("memory")).unwrap_or_else(|| panic!("{said}"));
    let mut numbers = line.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
    numbers.next().unwrap_or_else(|| panic!("{line}"))
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

/// Writes a file of float tensors.
fn write(path: &Path, tensors: &BTreeMap<String, HostTensor>) {
    let encoded = |tensor: &HostTensor| {
        let mut bytes = Vec::new();
        Element::F32.encode(&tensor.data, &mut bytes);
        bytes
    };
    let all: Vec<_> = tensors.iter().map(|(name, tensor)| (name, &tensor.shape, encoded(tensor))).collect();
    let views = all.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Element::F32.dtype(), shape.to_vec(), bytes);
        (name, view.unwrap())
    });
    serialize_to_file(views, None, path).unwrap();
}

/// Norm of the difference in relation to that of the expected values.
fn gap(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}
