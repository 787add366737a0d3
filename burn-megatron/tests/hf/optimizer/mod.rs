//! Runs of PyTorch and Megatron-Core continue here with their moments, and back.

mod families;
mod forms;
mod refused;

use std::fs;
use std::path::{Path, PathBuf};

use backend_dist::launch::{BoxError, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::tensor::{Device, FloatDType};
use burn_megatron::checkpoint::{Checkpoint, Kind, RunState, Saver, SaverOptions};
use burn_megatron::engine::{EngineConfig, RankEngine, TokenBatch};
use burn_megatron::hf::model_of;
use burn_megatron::lr::{LrConfig, LrDecay, Span};
use burn_megatron::optim::AdamWConfig;
use models::layout::ModelDims;
use models::{CausalLm, ModelConfig, ParamBuilder, WithModel};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::round_trip::{succeed, text};

const BATCH: usize = 8;
const LENGTH: usize = 16;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/dcp").join(name)
}

/// A copy of a folder, with the configuration of its model: all are of one but for that with experts.
fn copied(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(golden(name)).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let config = folder.path().join("config.json");
    if !config.exists() {
        fs::copy(golden("adamw").join("config.json"), config).unwrap();
    }
    folder
}

/// Imports a folder with its moments, and what the command says.
fn imported(folder: &Path, to: &Path) -> (Checkpoint, String) {
    let words = ["import", "--hf", text(folder), "--output", text(to), "--optimizer"];
    let has_counts = folder.join("common.pt").exists();
    let consumed = ["--consumed-samples", "80"];
    let said = succeed(&[&words[..], if has_counts { &[] } else { &consumed }].concat());
    (Checkpoint::open(to).unwrap(), said)
}

/// What the run that saved a folder reported of its next steps: losses and their batches.
fn recorded(name: &str) -> (Vec<f64>, Vec<TokenBatch>) {
    let told: Value = serde_json::from_slice(&fs::read(golden(name).join("losses.json")).unwrap()).unwrap();
    let losses = told["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
    let ids = |step: &Value| -> Vec<i64> {
        let sequences = step.as_array().unwrap().iter();
        sequences.flat_map(|ids| ids.as_array().unwrap().iter().map(|id| id.as_i64().unwrap())).collect()
    };
    let batches = told["tokens"].as_array().unwrap().iter();
    (losses, batches.map(|step| TokenBatch::from_sequences(&ids(step), LENGTH)).collect())
}

/// The engine that a checkpoint's own configuration asks for.
fn engine(checkpoint: &Checkpoint, clip: Option<f64>) -> EngineConfig {
    let config = &checkpoint.state().config;
    let lr = match &config["lr"] {
        Value::Null => LrConfig::constant(1e-2),
        lr => serde_json::from_value(lr.clone()).unwrap(),
    };
    let optimizer = match &config["optimizer"] {
        Value::Null => AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() }.into(),
        optimizer => serde_json::from_value(optimizer.clone()).unwrap(),
    };
    EngineConfig { optimizer, clip, ..EngineConfig::new(2, BATCH, lr) }
}

/// Trains on from a checkpoint in a layout, and saves at the end.
fn train(from: &Checkpoint, layout: &str, clip: Option<f64>, batches: &[TokenBatch], to: Option<&Path>) -> Vec<f64> {
    let model = model_of(from).unwrap();
    model.visit(Run { from, layout, clip, batches, to, dims: &model.dims() }).unwrap()
}

/// The same with a model of whatever family.
struct Run<'a> {
    from: &'a Checkpoint,
    layout: &'a str,
    clip: Option<f64>,
    batches: &'a [TokenBatch],
    to: Option<&'a Path>,
    dims: &'a ModelDims,
}

impl WithModel for Run<'_> {
    type Output = Result<Vec<f64>, BoxError>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let Self { from, layout, clip, batches, to, dims } = self;
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        let engine_config = engine(from, clip);
        let saver = to.map(|to| Saver::new(to, mesh.world_size(), SaverOptions::default()).unwrap());
        let ranks = launch(&mesh, &[Device::flex()], |rank| {
            let build = |part| Ok(M::build(config, ParamBuilder::new(&rank, FloatDType::F64, 1).with_part(part))?);
            let mut engine = RankEngine::new(&rank, dims, build, engine_config.clone())?;
            engine.restore(from)?;
            let losses =
                batches.iter().map(|batch| Ok(engine.train_step(batch)?.loss)).collect::<Result<Vec<f64>, _>>();
            if let Some(saver) = &saver {
                let at = engine.position();
                let state = RunState {
                    step: at.step,
                    consumed_samples: at.consumed,
                    updates: at.updates,
                    layout: mesh.layout().clone(),
                    world_size: mesh.world_size(),
                    schedule: serde_json::to_value(&engine_config)?,
                    ..from.state().clone()
                };
                saver.submit(rank.rank, engine.snapshot(), &state)?;
            }
            rank.group(Axis::World).barrier();
            losses
        });
        saver.map(|saver| saver.wait().unwrap());
        Ok(ranks?.swap_remove(0))
    }
}

fn worst(ours: &[f64], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max)
}

/// Ten steps were torch's in fp64; the next twenty are ours.
#[test]
fn a_run_of_torch_continues_with_its_losses() {
    let (folder, to) = (copied("adamw"), tempfile::tempdir().unwrap());
    let (checkpoint, said) = imported(folder.path(), to.path());
    let state = checkpoint.state();
    assert_eq!((state.step, state.updates, state.consumed_samples), (10, 10, 80));
    says!(said, "moments of 10 updates", "the learning rate was 0.01");
    let expected =
        json!({"kind": "adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight-decay": 0.1, "decay-vectors": false});
    assert_eq!(state.config["optimizer"], expected);
    let (theirs, batches) = recorded("adamw");
    for layout in ["TP1", "TP2 DP2 ZeRO1", "PP2 DP2 ZeRO2"] {
        let ours = train(&checkpoint, layout, None, &batches, None);
        let worst = worst(&ours, &theirs);
        assert!(worst < 3e-8, "{layout}: {worst:e}");
    }
    // Without its moments it does not.
    let weights = tempfile::tempdir().unwrap();
    succeed(&["import", "--hf", text(folder.path()), "--output", text(weights.path())]);
    let ours = train(&Checkpoint::open(weights.path()).unwrap(), "TP1", None, &batches, None);
    assert!(worst(&ours, &theirs) > 1e-3);
}

/// Ten steps were Megatron-Core's in fp32, on four ranks and a schedule's way down; the next twenty are ours.
#[test]
fn a_run_of_megatron_core_continues_with_its_losses() {
    let names = ["reshardable", "experts", "model_space", "plain", "buckets", "expert_buckets"];
    for name in names.map(|name| format!("megatron_{name}")) {
        let name = name.as_str();
        let (folder, to) = (copied(name), tempfile::tempdir().unwrap());
        let (checkpoint, said) = imported(folder.path(), to.path());
        let state = checkpoint.state();
        // One of them has skipped two steps, and says so in Megatron-LM's arguments.
        let (step, consumed, skipped) = if name == "megatron_plain" { (12, 96, 16) } else { (10, 80, 0) };
        let counts = (state.step, state.updates, state.consumed_samples, state.skipped_samples);
        assert_eq!(counts, (step, 10, consumed, Some(skipped)));
        assert!(!said.contains("note:") && said.contains("form = \"cosine\""), "{said}");
        let lr = LrConfig {
            min: 1e-3,
            warmup: Span::Samples(32),
            decay: Span::Samples(320),
            form: LrDecay::Cosine,
            ..LrConfig::constant(1e-2)
        };
        let told: LrConfig = serde_json::from_value(state.config["lr"].clone()).unwrap();
        assert_eq!(told, lr);
        let (theirs, batches) = recorded(name);
        let experts = name.starts_with("megatron_expert");
        for layout in ["TP1", if experts { "TP2 DP2 EP2 ETP1 ZeRO1" } else { "TP2 DP2 ZeRO1" }] {
            let ours = train(&checkpoint, layout, Some(1.0), &batches, None);
            let worst = worst(&ours, &theirs);
            assert!(worst < 5e-7, "{name} in {layout}: {worst:e}");
        }
    }
}

/// All tensors of a checkpoint, as bytes.
fn tensors(of: &Checkpoint) -> Vec<(Kind, String, Vec<u8>)> {
    let read = |tensor: &burn_megatron::checkpoint::SavedTensor| {
        let whole: Vec<_> = tensor.global_shape.iter().map(|&size| 0..size).collect();
        (tensor.kind, tensor.name.clone(), of.read(tensor.kind, &tensor.name, &tensor.global_shape, &whole).unwrap().1)
    };
    let mut all: Vec<_> = of.tensors().iter().map(read).collect();
    all.sort();
    all
}

/// torchtitan's form holds what the nested one does.
#[test]
fn flat_states_are_those_of_nested_ones() {
    let [nested, flat] = ["adamw", "adamw_flat"].map(|name| {
        let to = tempfile::tempdir().unwrap();
        let checkpoint = imported(copied(name).path(), to.path()).0;
        let all = tensors(&checkpoint);
        (checkpoint.state().clone(), all)
    });
    assert_eq!((nested.0.config, nested.0.updates), (flat.0.config, flat.0.updates));
    assert_eq!(nested.1.len(), flat.1.len());
    for ((kind, name, exact), (_, _, rounded)) in nested.1.iter().zip(&flat.1) {
        let exact = exact.as_chunks::<8>().0.iter().flat_map(|bytes| (f64::from_le_bytes(*bytes) as f32).to_le_bytes());
        assert!(exact.eq(rounded.iter().copied()), "{kind} {name}");
    }
}

/// What is exported comes back bit for bit, with its counts, settings and schedules: after ten more steps over four ranks.
/// With `BURN_MEGATRON_DCP_OUT` the folders stay there, for `check` of the scripts in golden/dcp.
#[test]
fn a_run_goes_back_with_its_moments() {
    for (name, format, layout) in [
        ("adamw", "--dcp", "TP2 DP2 ZeRO1"),
        ("megatron_reshardable", "--torch-dist", "TP2 DP2 ZeRO1"),
        ("megatron_experts", "--torch-dist", "TP2 DP2 EP2 ETP1 ZeRO1"),
        ("megatron_experts", "--torch-dist", "DP4 ZeRO1"),
    ] {
        let folder = copied(name);
        let root = tempfile::tempdir().unwrap();
        let [from, trained, out, again] = ["from", "trained", "out", "again"].map(|name| root.path().join(name));
        let ep = layout.parse::<ParallelLayout>().unwrap().ep;
        let out = std::env::var_os("BURN_MEGATRON_DCP_OUT")
            .map_or(out, |out| Path::new(&out).join(if ep > 1 { format!("{name}_ep{ep}") } else { name.into() }));
        let from = imported(folder.path(), &from).0;
        let (theirs, batches) = recorded(name);
        let clip = (format == "--torch-dist").then_some(1.0);
        let ours = train(&from, layout, clip, &batches[..10], Some(&trained));
        assert!(worst(&ours, &theirs[..10]) < 5e-7);
        let dtype = if format == "--dcp" { "f64" } else { "f32" };
        let options = ["--checkpoint", text(&trained), "--max-shard-size", "100KB", "--optimizer", "--dtype", dtype];
        let said = succeed(&[&["export", format, text(&out)], &options[..]].concat());
        says!(said, "step 20 in", "weights and moments");
        assert!(!name.ends_with("experts") || said.contains("; for expert-model-parallel-size "), "{said}");
        let trained = Checkpoint::open(&trained).unwrap();
        let words = ["import", "--hf", text(&out), "--output", text(&again), "--optimizer"];
        let consumed = ["--consumed-samples", "160"];
        succeed(&[&words[..], if format == "--dcp" { &consumed } else { &[] }].concat());
        let again = Checkpoint::open(&again).unwrap();
        let [a, b] = [&trained, &again].map(|of| of.state().clone());
        assert_eq!((a.step, a.updates, a.consumed_samples), (b.step, b.updates, b.consumed_samples));
        assert_eq!((a.step, a.consumed_samples), (20, 160));
        for section in ["optimizer", "lr", "weight-decay"] {
            assert_eq!(b.config[section], from.state().config[section], "{name}");
        }
        if format == "--dcp" {
            assert!(tensors(&trained) == tensors(&again), "{name}");
        } else {
            // The run was in fp64, Megatron-Core's states are fp32.
            assert_eq!(tensors(&trained).len(), tensors(&again).len());
            let ours = train(&again, "TP1", clip, &batches[10..], None);
            assert!(worst(&ours, &theirs[10..]) < 5e-7);
        }
    }
}

/// Weights in bf16 keep their fp32 masters: those are what the optimizer updates.
#[test]
fn masters_go_with_weights_in_bf16() {
    let (folder, root) = (copied("megatron_reshardable"), tempfile::tempdir().unwrap());
    let [from, out, again] = ["from", "out", "again"].map(|name| root.path().join(name));
    let from_checkpoint = imported(folder.path(), &from).0;
    let options = ["--checkpoint", text(&from), "--optimizer", "--dtype", "bf16"];
    succeed(&[&["export", "--torch-dist", text(&out)], &options[..]].concat());
    let (checkpoint, _) = imported(&out, &again);
    let kept = |of: &Checkpoint, kind: Kind| {
        let all = tensors(of).into_iter().filter(|(of_tensor, ..)| *of_tensor == kind);
        all.map(|(_, name, bytes)| (name, bytes)).collect::<Vec<_>>()
    };
    let (weights, masters) = (kept(&from_checkpoint, Kind::Weight), kept(&checkpoint, Kind::Master));
    assert!(!masters.is_empty() && masters == weights);
    for ((name, exact), (_, short)) in masters.iter().zip(kept(&checkpoint, Kind::Weight)) {
        let rounded = exact.as_chunks::<4>().0.iter().map(|bytes| half::bf16::from_f32(f32::from_le_bytes(*bytes)));
        assert!(rounded.flat_map(half::bf16::to_le_bytes).eq(short), "{name}");
    }
}
