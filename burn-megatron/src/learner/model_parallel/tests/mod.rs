//! A tiny Llama under `SupervisedTraining`: layouts agree, stops and failures end all ranks.

mod anomalies;
mod experts;
mod fp8;
mod fp8_experts;
mod frozen_bias;
mod logs;
mod lost_devices;
mod metrics;
mod offload;
mod restarts;
mod resume;
mod saving;
mod states;
mod truncated;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Mesh, ParallelLayout};
use burn::tensor::{Device, FloatDType};
use burn::train::LearningResult;
use models::{CausalLm, Llama, LlamaConfig, ModelConfig, ParamBuilder, Part};

use super::*;
use crate::checkpoint::{Checkpoint, RunState, SaveEvery, Saver, SaverOptions};
use crate::data::{Sample, TokenDataset, TokensInMemory};
use crate::engine::{EngineConfig, RankEngine};
use crate::generate::{GenerateOptions, Sampling, generate};
use crate::lr::{LrConfig, LrDecay, Span, WeightDecayConfig, WeightDecayIncr};
use crate::optim::AdamWConfig;

const SEQ: usize = 8;

fn data(length: usize, seed: usize) -> Arc<dyn TokenDataset> {
    // Half of the tokens follow from the one before, so there is something to learn.
    let mut tokens = vec![seed as i64];
    for index in 1..length {
        let last = tokens[index - 1];
        tokens.push(if index % 2 == 0 { (index * 7919 + seed) as i64 % 32 } else { (last * 5 + 3) % 32 });
    }
    Arc::new(TokensInMemory::new(tokens, SEQ))
}

fn engine() -> EngineConfig {
    let lr = LrConfig {
        max: 1e-2,
        min: 1e-3,
        init: 0.0,
        warmup: Span::Steps(2),
        decay: Span::Steps(12),
        form: LrDecay::Cosine,
    };
    let optimizer = AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() }.into();
    let (incr_style, length) = (WeightDecayIncr::Cosine, Some(Span::Steps(9)));
    let weight_decay = WeightDecayConfig { incr_style, start: 0.02, length };
    EngineConfig { optimizer, weight_decay, clip: Some(1.0), seed: 1, ..EngineConfig::new(2, 8, lr) }
}

fn llama() -> LlamaConfig {
    LlamaConfig { vocab_size: 33, ..LlamaConfig::tiny() }
}

/// What builds a rank's part of a model.
fn builder<M: CausalLm>(
    config: &M::Config,
    dtype: FloatDType,
) -> impl Fn(&Rank, Part) -> Result<M, BoxError> + Clone + Send + Sync + 'static {
    let config = config.clone();
    move |rank, part| Ok(M::build(&config, ParamBuilder::new(rank, dtype, 7).with_part(part))?)
}

/// A run of 12 steps in epochs of 5.
fn run(layout: &str, directory: &Path) -> Pretraining<Llama> {
    let (mesh, data) = (Mesh::new(layout.parse().unwrap()).unwrap(), (data(900, 1), data(200, 2)));
    Pretraining::new(mesh, engine(), 12, data, llama().dims(), builder(&llama(), FloatDType::F64))
        .evaluate(5, 2)
        .directory(directory)
}

/// Checkpoints in `folder/checkpoints`.
fn saving(folder: &Path, every: impl Into<SaveEvery>, background: bool) -> CheckpointOptions {
    let saver = SaverOptions { background, ..SaverOptions::default() };
    CheckpointOptions { root: folder.join("checkpoints"), every: every.into(), saver }
}

/// The checkpoint of a step there.
fn saved_at(folder: &Path, step: u64) -> PathBuf {
    Checkpoint::list(folder.join("checkpoints")).unwrap()[&step].clone()
}

fn launch<M: CausalLm + 'static, R: Send + 'static>(run: &Pretraining<M, R>) -> LearningResult<Megatron> {
    let (training, learner) = run.supervised();
    training.with_application_logger(None).launch(learner)
}

fn succeeds<M: CausalLm + 'static, R: Send + 'static>(run: &Pretraining<M, R>, what: &str) {
    let error = launch(run).error;
    assert!(error.is_none(), "{what}: {error:?}");
}

fn log(directory: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(directory.join("steps.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The lines of the training steps after `step` of the run in `folder/run`.
fn trained_after(folder: &Path, step: u64) -> Vec<serde_json::Value> {
    let is_after = |line: &serde_json::Value| line["kind"] == "train" && line["step"].as_u64() > Some(step);
    log(&folder.join("run")).into_iter().filter(is_after).collect()
}

/// What a layout saves at once of a checkpoint that it has read is what it has read, bit for bit.
fn saves_what_it_read<M: CausalLm + 'static>(
    saved: &Checkpoint,
    layout: &str,
    config: &M::Config,
    dtype: FloatDType,
    engine: &EngineConfig,
) {
    let folder = tempfile::tempdir().unwrap();
    let written = saved_by::<M>(folder.path(), layout, (config, dtype), engine, &[saved], saved.state());
    assert_eq!(written.state().layout, layout.parse().unwrap());
    are_equal(saved, &written, layout);
}

/// What a layout saves in `folder` that has read these checkpoints, one after the other.
fn saved_by<M: CausalLm + 'static>(
    folder: &Path,
    layout: &str,
    (config, dtype): (&M::Config, FloatDType),
    engine: &EngineConfig,
    read: &[&Checkpoint],
    state: &RunState,
) -> Checkpoint {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let saver = Saver::new(folder, mesh.world_size(), SaverOptions::default()).unwrap();
    backend_dist::launch::launch(&mesh, &[Device::flex()], |rank| {
        // Initial weights are others.
        let build = |part| Ok(M::build(config, ParamBuilder::new(&rank, dtype, 99).with_part(part))?);
        let mut engine = RankEngine::new(&rank, &config.dims(), build, engine.clone())?;
        read.iter().try_for_each(|saved| engine.restore(saved))?;
        let state = RunState { layout: mesh.layout().clone(), ..state.clone() };
        Ok(saver.submit(rank.rank, engine.snapshot(), &state)?)
    })
    .unwrap();
    saver.wait().unwrap();
    Checkpoint::open(folder).unwrap()
}

fn are_equal(saved: &Checkpoint, written: &Checkpoint, what: &str) {
    assert_eq!(saved.tensors().len(), written.tensors().len(), "{what}");
    for tensor in saved.tensors() {
        let whole: Vec<_> = tensor.global_shape.iter().map(|&size| 0..size).collect();
        let values = |of: &Checkpoint| of.read(tensor.kind, &tensor.name, &tensor.global_shape, &whole).unwrap();
        assert!(values(saved) == values(written), "{what}: {}/{}", tensor.kind, tensor.name);
    }
}

#[test]
fn layouts_log_the_same_steps_and_end_with_the_same_weights_and_text() {
    let mut reference = None;
    for layout in ["TP1", "TP2 SP DP2", "TP4", "DP4", "PP2 DP2 ZeRO1", "TP2 PP2", "DP2 ZeRO3"] {
        let folder = tempfile::tempdir().unwrap();
        let run = run(layout, folder.path()).finish(|rank, engine| {
            let options = GenerateOptions { window: Some(SEQ), ..GenerateOptions::new(10, Sampling::default()) };
            let params = ParamBuilder::new(rank, FloatDType::F64, 7).without_autodiff();
            let model = engine.fill(Llama::build(&llama(), params)?);
            let text = generate(rank, &model, &[3, 1], &options, |_| ControlFlow::Continue(()))?;
            Ok((text.tokens, global_weights(rank, engine)?))
        });
        let result = launch(&run);
        assert!(result.error.is_none() && result.interrupted.is_none());
        let (steps, (text, weights)) = (log(folder.path()), run.finished().unwrap());
        let weights = weights.expect("rank 0 has the weights");
        let kinds: Vec<&str> = steps.iter().map(|step| step["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds.iter().filter(|kind| **kind == "train").count(), 12);
        assert_eq!(kinds.iter().filter(|kind| **kind == "valid").count(), 3, "after steps 5, 10 and 12");
        assert_eq!((steps[14]["kind"].as_str(), steps[14]["step"].as_u64()), (Some("valid"), Some(12)));
        let loss = |line: usize| steps[line]["loss"].as_f64().unwrap();
        assert!(loss(13) < loss(0) - 1.0, "{} -> {}", loss(0), loss(13));

        let Some((first, first_text, first_weights)) = &reference else {
            reference = Some((steps, text, weights));
            continue;
        };
        assert_eq!(&text, first_text, "{layout}");
        assert_eq!(weights.keys().collect::<Vec<_>>(), first_weights.keys().collect::<Vec<_>>());
        for (tensor, expected) in weights.values().zip(first_weights.values()) {
            assert_eq!(tensor.shape, expected.shape);
            let worst = tensor.data.iter().zip(&expected.data).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-9, "{layout}: weights differ by {worst}");
        }
        for (line, expected) in steps.iter().zip(first) {
            for key in ["loss", "grad_norm", "lr", "tokens"] {
                let (value, expected) = (line[key].as_f64(), expected[key].as_f64());
                let difference = (value.unwrap_or(0.0) - expected.unwrap_or(0.0)).abs();
                assert!(difference < 1e-9, "{layout}: {key} {value:?} instead of {expected:?}");
            }
        }
    }
}

/// Data whose samples go through a function.
struct Through<F>(Arc<dyn TokenDataset>, F);

impl<F: Fn(usize, Sample) -> Sample + Send + Sync> TokenDataset for Through<F> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn seq_length(&self) -> usize {
        self.0.seq_length()
    }

    fn sample(&self, index: usize) -> Sample {
        (self.1)(index, self.0.sample(index))
    }
}

/// pytorch/torchtitan pull request 4167, NVIDIA/Megatron-LM pull request 7207: the validation loss was a mean of the
/// batches' means, so that tokens of batches in which few count weighed more.
#[test]
fn torchtitan_4167_megatron_lm_7207_tokens_weigh_the_same_in_every_batch_of_a_validation() {
    let folder = tempfile::tempdir().unwrap();
    // Of a sample only the first `index % 5` predictions count, or all.
    let uneven = |index: usize, sample| {
        let counts = |place: usize| index.is_multiple_of(5) || place < index % 5;
        Sample { loss_mask: Some((0..SEQ).map(counts).collect()), ..sample }
    };
    let held_out: Arc<dyn TokenDataset> = Arc::new(Through(data(200, 2), uneven));
    let rows = GlobalBatch::new(held_out.clone(), 0, 24);
    let (mesh, build) = (Mesh::new("DP2".parse().unwrap()).unwrap(), builder::<Llama>(&llama(), FloatDType::F64));
    let run = Pretraining::new(mesh, engine(), 2, (data(900, 1), held_out.clone()), llama().dims(), build)
        .evaluate(2, 3)
        .directory(folder.path())
        .finish(move |_, engine| {
            let at_once = engine.eval_step(&rows.read(0..24)?)?;
            Ok((at_once.loss, at_once.tokens, loss_over(engine, &held_out)?))
        });
    succeeds(&run, "DP2");
    let (loss, tokens, over) = run.finished().unwrap();
    assert_eq!((over.tokens, tokens), (86, 86));
    let line = log(folder.path()).into_iter().find(|line| line["kind"] == "valid").unwrap();
    for found in [line["loss"].as_f64().unwrap(), over.loss] {
        assert!((found - loss).abs() < 1e-12, "{found} instead of {loss}");
    }
}

#[test]
fn a_rank_that_cannot_build_its_model_ends_the_run_with_its_own_error() {
    let folder = tempfile::tempdir().unwrap();
    let (mesh, data) = (Mesh::new("TP2 DP2".parse().unwrap()).unwrap(), (data(900, 1), data(200, 2)));
    let build = builder::<Llama>(&llama(), FloatDType::F32);
    let run = Pretraining::new(mesh, engine(), 4, data, llama().dims(), move |rank, part| match rank.rank {
        2 => Err("no memory left for this part".into()),
        _ => build(rank, part),
    })
    .directory(folder.path());
    says!(launch(&run).error.expect("the failure is the result's error"), "rank 2", "no memory left for this part");
    assert!(run.finished().is_none());
}

#[test]
fn stopping_ends_all_ranks_and_still_finishes() {
    let folder = tempfile::tempdir().unwrap();
    let run = run("TP2 DP2", folder.path()).finish(|_, engine| Ok(engine.steps()));
    let (training, learner) = run.supervised();
    training.interrupter().stop(Some("not today"));
    let result = training.with_application_logger(None).launch(learner);
    assert_eq!(result.interrupted.unwrap().reason.as_deref(), Some("not today"));
    assert_eq!(run.finished(), Some(0));
}
