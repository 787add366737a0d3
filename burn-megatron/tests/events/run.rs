//! Doing a run and comparing what came of it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use burn::tensor::Device;
use burn_megatron::checkpoint::{Checkpoint, Kind};
use burn_megatron::config::RunConfig;
use burn_megatron::train::{Plan, train};
use burn_megatron::verify::Candidate;
use models::FamilyConfig;
use serde_json::Value;

use super::case::{Case, Stretch};

/// What a run has learned, and how.
#[derive(Debug)]
struct Learned {
    /// Loss, norm, rate and tokens of every step, which must each be there once.
    steps: Vec<[f64; 4]>,
    last: Option<[f64; 2]>,
    tensors: BTreeMap<(Kind, String), Vec<f64>>,
}

/// The run with its events against one device that does it in one go, as far as its batches are of one size.
pub fn check(case: &Case) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let config = case.write_data(folder.path());
    let quiet: Vec<Stretch> = undisturbed(case);
    let expected = learn(&config, &quiet, &folder.path().join("quiet"))?;
    let found = learn(&config, &case.stretches, &folder.path().join("events"))?;
    compare(&expected, &found, case.exact)
}

/// Stretches of equal batches, joined.
fn undisturbed(case: &Case) -> Vec<Stretch> {
    let mut list: Vec<Stretch> = Vec::new();
    for stretch in &case.stretches {
        match list.last_mut().filter(|last| last.global_batch == stretch.global_batch) {
            Some(last) => last.to = stretch.to,
            None => list.push(Stretch {
                layout: if case.exact { stretch.layout.clone() } else { Candidate::default() },
                evaluate: (case.config.training.steps, 0),
                save: None,
                vocabulary_divisible_by: 1,
                background: false,
                ..stretch.clone()
            }),
        }
    }
    list
}

fn learn(config: &RunConfig, stretches: &[Stretch], folder: &Path) -> Result<Learned, String> {
    let checkpoints = folder.join("checkpoints");
    let mut last = None;
    for stretch in stretches {
        let config = stretch_config(config, stretch, folder);
        let allowed = ["training.global-batch".to_string()];
        let name = format!("{}..{} {}", stretch.from, stretch.to, stretch.layout);
        let run = || -> Result<_, String> {
            let plan = Plan::new(&config, &allowed).map_err(|error| error.to_string())?;
            train(&plan, vec![Device::flex()], &mut |_| ()).map_err(|error| error.to_string())
        };
        let outcome = catch_unwind(AssertUnwindSafe(run)).map_err(|_| format!("{name}: panic"))?;
        last = outcome.map_err(|error| format!("{name}: {error}"))?.last.map(|last| [last.loss, last.tokens as f64]);
    }
    let steps = logged(&folder.join("steps.jsonl"))?;
    Ok(Learned { steps, last, tensors: tensors(&checkpoints)? })
}

fn stretch_config(config: &RunConfig, stretch: &Stretch, folder: &Path) -> RunConfig {
    let mut config = config.clone();
    let Candidate { layout, context, accumulation, pipeline, recompute, moe_overlap } = stretch.layout.clone();
    config.training.steps = stretch.to;
    config.training.global_batch = stretch.global_batch;
    config.training.micro_batch = (stretch.global_batch / layout.dp / accumulation).max(1);
    (config.parallel, config.context, config.pipeline, config.recompute) = (layout, context, pipeline, recompute);
    config.performance.moe_comm_overlap = moe_overlap;
    let divisible = stretch.vocabulary_divisible_by;
    match &mut config.model.config {
        FamilyConfig::Llama(sizes) => sizes.make_vocab_size_divisible_by = divisible,
        FamilyConfig::Mixtral(sizes) => sizes.make_vocab_size_divisible_by = divisible,
        FamilyConfig::Mamba2(sizes) => sizes.make_vocab_size_divisible_by = divisible,
        FamilyConfig::NemotronH(sizes) => sizes.make_vocab_size_divisible_by = divisible,
        FamilyConfig::Gpt(sizes) => sizes.make_vocab_size_divisible_by = divisible,
        FamilyConfig::DeepSeekV3(sizes) => sizes.make_vocab_size_divisible_by = divisible,
    }
    (config.evaluation.every, config.evaluation.batches) = stretch.evaluate;
    let checkpoints = folder.join("checkpoints");
    if stretch.from > 0 {
        config.checkpoint.resume = checkpoints.join(format!("step_{:08}", stretch.from)).display().to_string();
    }
    config.checkpoint.directory = Some(checkpoints);
    config.checkpoint.every = stretch.save.into();
    config.checkpoint.background = stretch.background;
    config.output.directory = folder.to_path_buf();
    config
}

fn logged(file: &Path) -> Result<Vec<[f64; 4]>, String> {
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    let mut steps = Vec::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).map_err(|error| format!("{line}: {error}"))?;
        if line["kind"] != "train" {
            continue;
        }
        if line["step"].as_u64() != Some(steps.len() as u64 + 1) {
            return Err(format!("{}: step {} after {}", file.display(), line["step"], steps.len()));
        }
        steps.push(["loss", "grad_norm", "lr", "tokens"].map(|name| line[name].as_f64().unwrap_or(f64::INFINITY)));
    }
    Ok(steps)
}

fn tensors(root: &Path) -> Result<BTreeMap<(Kind, String), Vec<f64>>, String> {
    let checkpoint = Checkpoint::open(root).map_err(|error| error.to_string())?;
    let read = |tensor: &burn_megatron::checkpoint::SavedTensor| {
        let whole: Vec<_> = tensor.global_shape.iter().map(|size| 0..*size).collect();
        let values = checkpoint.read_f64(tensor.kind, &tensor.name, &tensor.global_shape, &whole);
        Ok(((tensor.kind, tensor.name.clone()), values.map_err(|error| error.to_string())?))
    };
    checkpoint.tensors().iter().map(read).collect()
}

fn compare(expected: &Learned, found: &Learned, exact: bool) -> Result<(), String> {
    let tolerance = if exact { 0.0 } else { 1e-10 };
    let near = |a: f64, b: f64, scale: f64| a == b || (a - b).abs() <= tolerance * scale.max(a.abs());
    if expected.steps.len() != found.steps.len() {
        return Err(format!("{} steps instead of {}", found.steps.len(), expected.steps.len()));
    }
    for (step, (a, b)) in expected.steps.iter().zip(&found.steps).enumerate() {
        if a.iter().zip(b).any(|(a, b)| !near(*a, *b, 0.0)) {
            return Err(format!("step {}: {b:?} instead of {a:?}", step + 1));
        }
    }
    match (expected.last, found.last) {
        (Some(a), Some(b)) if near(a[0], b[0], 0.0) && a[1] == b[1] => {}
        (None, None) => {}
        (a, b) => return Err(format!("at the end {b:?} instead of {a:?}")),
    }
    let names = |learned: &Learned| learned.tensors.keys().cloned().collect::<Vec<_>>();
    if names(expected) != names(found) {
        return Err(format!("tensors {:?} instead of {:?}", names(found), names(expected)));
    }
    for (name, a) in &expected.tensors {
        let b = &found.tensors[name];
        let largest = a.iter().fold(0.0f64, |most, value| most.max(value.abs()));
        if a.len() != b.len() || a.iter().zip(b).any(|(a, b)| !near(*a, *b, largest.max(1e-3))) {
            let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            return Err(format!("{name:?} differs by {worst:e} of {largest:e}"));
        }
    }
    Ok(())
}
