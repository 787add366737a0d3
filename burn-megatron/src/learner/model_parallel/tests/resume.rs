//! Resumed runs: bit for bit in the same layout, to rounding in another, and never with other data or another model.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use backend_dist::shard::HostTensor;
use burn::train::Interrupter;
use burn::train::checkpoint::KeepLastNCheckpoints;
use serde_json::Value;

use super::*;
use crate::optim::LossScalerConfig;

pub(super) type Weights = BTreeMap<String, HostTensor>;

/// A run of 12 steps in epochs of 5, in `folder/run`, with checkpoints in `folder/checkpoints`.
pub(super) fn run_of(layout: &str, dtype: FloatDType, folder: &Path, every: Option<u64>) -> Pretraining<Llama> {
    run_with(layout, folder, every, data(900, 1), builder(&llama(), dtype))
}

pub(super) fn run_with(
    layout: &str,
    folder: &Path,
    every: Option<u64>,
    data: Arc<dyn TokenDataset>,
    build: impl Fn(&Rank, Part) -> Result<Llama, BoxError> + Send + Sync + 'static,
) -> Pretraining<Llama> {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    Pretraining::new(mesh, engine(), 12, (data, super::data(200, 2)), llama().dims(), build)
        .evaluate(5, 2)
        .directory(folder.join("run"))
        .checkpoints(saving(folder, every, true))
}

/// The weights at the end, and the log.
pub(super) fn finish(run: Pretraining<Llama>, folder: &Path) -> (Weights, Vec<Value>) {
    let run = run.finish(global_weights);
    succeeds(&run, "the run");
    (run.finished().unwrap().expect("rank 0 has the weights"), log(&folder.join("run")))
}

/// Everything of the steps after `step` that must not depend on when a run was stopped.
pub(super) fn after(log: &[Value], step: u64) -> Vec<String> {
    let of_steps = |line: &&Value| line["kind"] == "train" || line["kind"] == "valid";
    let lines = log.iter().filter(of_steps).filter(|line| line["step"].as_u64() > Some(step));
    lines
        .map(|line| ["kind", "step", "loss", "grad_norm", "lr", "tokens"].map(|key| line[key].to_string()).join(" "))
        .collect()
}

#[test]
fn a_resumed_run_equals_one_that_never_stopped() {
    for (layout, dtype) in [
        ("TP2 SP DP2", FloatDType::F32),
        ("DP2", FloatDType::F64),
        ("PP2 DP2 ZeRO3", FloatDType::F32),
        ("PP2 DP2 ZeRO1", FloatDType::BF16),
        ("DP4 ZeRO3 Group2", FloatDType::BF16),
    ] {
        let whole = tempfile::tempdir().unwrap();
        let (weights, steps) = finish(run_of(layout, dtype, whole.path(), Some(1)), whole.path());
        assert_eq!(Checkpoint::list(whole.path().join("checkpoints")).unwrap().len(), 12);
        // Inside an epoch, at the end of one, and in the last one.
        for step in [2, 5, 11] {
            let folder = tempfile::tempdir().unwrap();
            let from = saved_at(whole.path(), step);
            let resumed = run_of(layout, dtype, folder.path(), None).resume(Resume::From(from));
            let (resumed, log) = finish(resumed, folder.path());
            assert_eq!(after(&log, 0), after(&steps, step), "{layout} from step {step}");
            assert_eq!(resumed, weights, "{layout} from step {step}");
        }
    }
}

#[test]
fn any_layout_resumes_from_any_other() {
    let whole = tempfile::tempdir().unwrap();
    let (_, steps) = finish(run_of("TP2 SP DP2", FloatDType::F64, whole.path(), Some(4)), whole.path());
    let from = saved_at(whole.path(), 4);
    let saved = Checkpoint::open(&from).unwrap();
    let losses = |log: &[Value]| -> Vec<f64> {
        log.iter().filter(|line| line["kind"] == "train").map(|line| line["loss"].as_f64().unwrap()).collect()
    };
    for layout in
        ["TP1", "TP4 SP", "DP4", "TP8", "PP2 DP2", "TP2 PP2 DP2 ZeRO1", "DP4 ZeRO2", "DP2 ZeRO3", "DP4 ZeRO1 Group2"]
    {
        let folder = tempfile::tempdir().unwrap();
        let at_once = run_of(layout, FloatDType::F64, folder.path(), None).resume(Resume::From(from.clone()));
        let at_once = at_once.finish(|rank, engine| {
            let loaded = engine.steps() == 12;
            Ok((loaded, global_weights(rank, engine)?))
        });
        succeeds(&at_once, layout);
        assert!(at_once.finished().unwrap().0);
        for (loss, expected) in losses(&log(&folder.path().join("run"))).iter().zip(&losses(&steps)[4..]) {
            assert!((loss - expected).abs() < 1e-10 * expected, "{layout}: {loss} instead of {expected}");
        }
        // Weights and both moments.
        saves_what_it_read::<Llama>(&saved, layout, &llama(), FloatDType::F64, &engine());
        // A checkpoint without updates has no moments, whatever there was.
        let [first, again] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let (model, state) = ((&llama(), FloatDType::F64), RunState { step: 0, updates: 0, ..saved.state().clone() });
        let start = saved_by::<Llama>(first.path(), layout, model, &engine(), &[], &state);
        let back = saved_by::<Llama>(again.path(), layout, model, &engine(), &[&saved, &start], &state);
        are_equal(&start, &back, layout);
    }
}

/// From groups of two to one of four and back: a run ends as one that was never stopped, up to the order of sums.
#[test]
fn a_run_resumes_in_other_groups_of_zero() {
    let folder = tempfile::tempdir().unwrap();
    let run = |layout: &str, name: &str| run_of(layout, FloatDType::F64, &folder.path().join(name), Some(4));
    let at = |name: &str, step: u64| Resume::From(saved_at(&folder.path().join(name), step));
    let (weights, _) = finish(run("DP4 ZeRO3 Group2", "whole"), &folder.path().join("whole"));
    finish(run("DP4 ZeRO2 Group4", "second").resume(at("whole", 4)), &folder.path().join("second"));
    let (resumed, _) = finish(run("DP4 ZeRO3 Group2", "third").resume(at("second", 8)), &folder.path().join("third"));
    for (name, tensor) in &weights {
        let values = tensor.data.iter().zip(&resumed[name].data);
        assert!(values.clone().all(|(a, b)| (a - b).abs() < 1e-10), "{name}");
    }
}

#[test]
fn a_stopped_run_has_saved_its_last_step_and_resumes_from_there() {
    let (whole, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (weights, _) = finish(run_of("DP2", FloatDType::F32, whole.path(), None), whole.path());

    let build = builder(&llama(), FloatDType::F32);
    let interrupter = Interrupter::new();
    // Sample 49 is in the seventh batch of 8.
    let stop = interrupter.clone();
    let stopping = Through(data(900, 1), move |index, sample| {
        if index == 49 {
            stop.stop(Some("stopped by its data"));
        }
        sample
    });
    let run = run_with("DP2", folder.path(), None, Arc::new(stopping), build.clone());
    let (training, learner) = run.supervised();
    training.with_application_logger(None).with_interrupter(interrupter).launch(learner);
    assert_eq!(Checkpoint::open(folder.path().join("checkpoints")).unwrap().state().step, 7);

    let run = run_with("DP2", folder.path(), None, data(900, 1), build).resume(Resume::IfPresent);
    assert_eq!(finish(run, folder.path()).0, weights);
}

/// Epochs end after steps 5, 10 and 12; a step is saved before it is evaluated.
#[test]
fn an_evaluation_that_a_run_did_not_come_to_is_done_when_it_is_resumed() {
    let held_out = |log: &[Value]| -> Vec<String> {
        let lines = log.iter().filter(|line| line["kind"] == "valid");
        lines.map(|line| ["step", "loss", "tokens"].map(|key| line[key].to_string()).join(" ")).collect()
    };
    let whole = tempfile::tempdir().unwrap();
    let (weights, steps) = finish(run_of("DP2", FloatDType::F64, whole.path(), None), whole.path());
    for (layout, evaluation) in [("DP2", 1), ("DP2", 3), ("PP2", 2)] {
        let folder = tempfile::tempdir().unwrap();
        // Every rank that has the data reads the first sample once for each evaluation.
        let reads = Arc::new(AtomicUsize::new(0));
        let fails = move |index: usize, sample| {
            let before = if index == 0 { reads.fetch_add(1, Ordering::Relaxed) } else { 0 };
            assert!(index > 0 || before / 2 + 1 < evaluation, "killed in an evaluation");
            sample
        };
        let run = |valid: Arc<dyn TokenDataset>| {
            let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
            let build = builder(&llama(), FloatDType::F64);
            Pretraining::new(mesh, engine(), 12, (data(900, 1), valid), llama().dims(), build)
                .evaluate(5, 2)
                .directory(folder.path().join("run"))
                .checkpoints(saving(folder.path(), Some(1), false))
                .resume(Resume::IfPresent)
        };
        let error = launch(&run(Arc::new(Through(data(200, 2), fails)))).error.expect("the failure");
        says!(error, "killed in an evaluation");
        assert_eq!(held_out(&log(&folder.path().join("run"))), held_out(&steps)[..evaluation - 1]);
        // And once more: nothing is left to do.
        for _ in 0..2 {
            let (resumed, all) = finish(run(data(200, 2)), folder.path());
            if layout == "DP2" {
                assert_eq!((held_out(&all), &resumed), (held_out(&steps), &weights), "evaluation {evaluation}");
            }
            assert_eq!(held_out(&all).len(), 3, "{layout}, evaluation {evaluation}");
        }
    }
}

#[test]
fn burn_trains_options_save_delete_and_resume() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_of("TP2", FloatDType::F32, folder.path(), None);
    let (training, learner) = run.supervised();
    let result = training
        .with_application_logger(None)
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(2))
        .launch(learner);
    assert!(result.error.is_none());
    drop(result);
    // Epochs end after steps 5, 10 and 12; the first was deleted when the third was saved.
    let root = folder.path().join("checkpoints");
    assert_eq!(Checkpoint::list(&root).unwrap().into_keys().collect::<Vec<_>>(), [10, 12]);

    let run = run_of("TP2", FloatDType::F32, folder.path(), None).finish(|_, engine| Ok(engine.steps()));
    std::fs::remove_file(folder.path().join("run/steps.jsonl")).unwrap();
    let (training, learner) = run.supervised();
    assert!(training.with_application_logger(None).checkpoint(2).launch(learner).error.is_none());
    let lines = log(&folder.path().join("run"));
    let first = |kind: &str| lines.iter().find(|line| line["kind"] == kind).unwrap()["step"].as_u64();
    assert_eq!((first("resumed"), first("train"), run.finished()), (Some(10), Some(11), Some(12)));
}

#[test]
fn other_data_another_model_and_a_missing_checkpoint_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    finish(run_of("TP1", FloatDType::F32, folder.path(), Some(6)), folder.path());
    let resume = Resume::From(folder.path().join("checkpoints"));
    let other = tempfile::tempdir().unwrap();
    let refuse = |run: Pretraining<Llama>| launch(&run).error.expect("a refusal").to_string();

    let run = run_with("TP1", other.path(), None, data(900, 3), builder(&llama(), FloatDType::F32));
    says!(refuse(run.resume(resume.clone())), "the data has other contents than when ", "step_00000012 was saved");

    let wider = LlamaConfig { intermediate_size: llama().intermediate_size * 2, ..llama() };
    let run = run_with("TP1", other.path(), None, data(900, 1), builder(&wider, FloatDType::F32));
    says!(refuse(run.resume(resume)), "mlp", "another model");

    let run = run_of("TP1", FloatDType::F32, other.path(), None);
    says!(refuse(run.resume(Resume::From(other.path().join("nothing")))), "nothing");
}

/// THUDM/slime issue 1761: a resumed run had another learning rate than the one that was stopped. Steps that an
/// overflow has skipped do not count, each with the rows that it had, however many a step has now.
#[test]
fn slime_1761_the_learning_rate_continues_with_batches_of_another_size() {
    let lr = LrConfig { warmup: Span::Samples(8), decay: Span::Samples(400), ..engine().lr };
    let run = |folder: &Path, global_batch: usize, steps: usize| {
        let loss_scale = LossScalerConfig { initial_scale: 65536.0, ..LossScalerConfig::default() };
        let engine = EngineConfig { lr: lr.clone(), loss_scale, global_batch, ..engine() };
        let (mesh, data) = (Mesh::new("DP2".parse().unwrap()).unwrap(), (data(900, 1), super::data(200, 2)));
        Pretraining::new(mesh, engine, steps, data, llama().dims(), builder(&llama(), FloatDType::F16))
            .evaluate(20, 1)
            .directory(folder.join("run"))
            .checkpoints(saving(folder, SaveEvery::Never, false))
    };
    let folder = tempfile::tempdir().unwrap();
    finish(run(folder.path(), 8, 8), folder.path());
    let from = folder.path().join("checkpoints");
    let state = Checkpoint::open(&from).unwrap().state().clone();
    let skipped = state.step - state.updates;
    assert!(skipped > 1 && state.updates > 0, "{} steps, {} updates", state.step, state.updates);
    for global_batch in [4, 8, 64] {
        let folder = tempfile::tempdir().unwrap();
        let resumed = run(folder.path(), global_batch, 9).resume(Resume::From(from.clone()));
        let (_, log) = finish(resumed, folder.path());
        let first = log.iter().find(|line| line["kind"] == "train").unwrap()["lr"].as_f64();
        let expected = lr.schedule(global_batch).unwrap().at(state.consumed_samples - 8 * skipped);
        assert!((first.unwrap() - expected).abs() < 1e-12, "{global_batch} rows: {first:?} instead of {expected}");
    }
}
