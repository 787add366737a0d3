//! What a run writes down: every step once, whatever is done again, and who did what when.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use super::*;
use crate::metrics::FlopsPerToken;

fn logs(folder: &Path) -> LogOptions {
    let flops = FlopsPerToken { causal: 1e9, full: 1.5e9, peak: Some(1e12) };
    LogOptions {
        jsonl: Some(folder.join("numbers/all.jsonl")),
        tensorboard: Some(folder.join("board")),
        trace: Some(folder.join("trace.json")),
        flops: Some(flops),
        ..LogOptions::default()
    }
}

fn lines(file: &Path) -> Vec<Value> {
    fs::read_to_string(file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn steps(lines: &[Value], kind: &str) -> Vec<u64> {
    lines.iter().filter(|line| line["kind"] == kind).map(|line| line["step"].as_u64().unwrap()).collect()
}

/// Names of the spans of a rank, and the steps they belong to.
pub(super) fn traced(file: &Path, rank: usize) -> (BTreeSet<String>, BTreeSet<u64>) {
    let trace: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let spans =
        trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X" && event["tid"] == rank);
    spans.map(|span| (span["name"].as_str().unwrap().to_string(), span["args"]["step"].as_u64().unwrap())).unzip()
}

#[test]
fn a_resumed_run_logs_every_step_once_and_traces_three() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let first = run("PP2 DP2", &folder.join("run")).checkpoints(saving(folder, Some(4), false)).logs(logs(folder));
    succeeds(&first, "the first");

    let file = folder.join("numbers/all.jsonl");
    let all = lines(&file);
    assert_eq!(steps(&all, "train"), (1..=12).collect::<Vec<_>>());
    assert_eq!((steps(&all, "valid"), steps(&all, "checkpoint")), (vec![5, 10, 12], vec![4, 8, 12]));
    assert!(!folder.join("run/steps.jsonl").exists());
    let step = &all[0];
    let number = |key: &str| step[key].as_f64().unwrap_or_else(|| panic!("{key} in {step}"));
    let equal = |key: &str, value: f64| assert!((number(key) / value - 1.0).abs() < 1e-12, "{key} in {step}");
    equal("tokens_per_second_per_rank", number("tokens_per_second") / 4.0);
    equal("teraflops_per_rank", number("tokens_per_second_per_rank") * 1e-3);
    equal("teraflops_per_rank_full_attention", number("tokens_per_second_per_rank") * 1.5e-3);
    equal("mfu", number("teraflops_per_rank"));
    assert!(number("memory") > 0.0 && step.get("bubble").is_none(), "{step}");
    let bubbles: Vec<_> = all.iter().filter(|line| !line["bubble"].is_null()).collect();
    assert_eq!(bubbles.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 4, 5]);
    assert!(bubbles.iter().all(|line| (0.0..1.0).contains(&line["bubble"].as_f64().unwrap())), "{bubbles:?}");
    for rank in 0..4 {
        let (names, steps) = traced(&folder.join("trace.json"), rank);
        let moved = if rank < 2 { "send" } else { "receive" };
        let expected = ["data", "forward", "backward", moved, "reduce gradients", "norm", "update", "step"];
        assert!(expected.iter().all(|name| names.contains(*name)), "{names:?}");
        assert_eq!(steps, [3, 4, 5].into());
    }

    let overlap = fs::read_to_string(folder.join("trace.json.txt")).unwrap();
    let of_rank = |rank: usize| overlap.lines().filter(|line| line.contains(&format!(", rank {rank} ("))).count();
    assert_eq!([0, 1, 2, 3].map(of_rank), [3; 4], "{overlap}");
    assert!(overlap.starts_with("step 3, rank 0 (") && overlap.contains(" ms, 0 % under compute"), "{overlap}");

    // As if it had been stopped after its second checkpoint.
    let from = Resume::From(folder.join("checkpoints/step_00000004"));
    let second = run("PP2 DP2", &folder.join("run")).resume(from).logs(logs(folder));
    succeeds(&second, "the second");
    let all = lines(&file);
    assert_eq!(steps(&all, "train"), (1..=12).collect::<Vec<_>>());
    assert_eq!((steps(&all, "valid"), steps(&all, "checkpoint")), (vec![5, 10, 12], vec![4]));
    assert_eq!(steps(&all, "resumed"), [4]);
    let undone = lines(&folder.join("numbers/all.jsonl.undone"));
    assert_eq!((steps(&undone, "train"), steps(&undone, "checkpoint")), ((5..=12).collect(), vec![8, 12]));
    assert_eq!(traced(&folder.join("trace.json"), 1).1, [7, 8, 9].into());
    assert_eq!(fs::read_dir(folder.join("board")).unwrap().count(), 2);
}

#[test]
fn teraflops_count_tokens_without_a_loss_too() {
    let folder = tempfile::tempdir().unwrap();
    // Every other prediction counts.
    let half = |_: usize, sample| Sample { loss_mask: Some((0..SEQ).map(|place| place % 2 == 0).collect()), ..sample };
    let data = (Arc::new(Through(data(900, 1), half)) as Arc<dyn TokenDataset>, data(200, 2));
    let build = builder::<Llama>(&llama(), FloatDType::F32);
    let run = Pretraining::new(Mesh::new("DP2".parse().unwrap()).unwrap(), engine(), 2, data, llama().dims(), build);
    succeeds(&run.directory(folder.path()).logs(logs(folder.path())), "DP2");
    let all = lines(&folder.path().join("numbers/all.jsonl"));
    let trained: Vec<&Value> = all.iter().filter(|line| line["kind"] == "train").collect();
    assert_eq!(trained.len(), 2);
    for step in trained {
        let number = |key: &str| step[key].as_f64().unwrap_or_else(|| panic!("{key} in {step}"));
        let seconds = number("seconds");
        assert_eq!(number("tokens"), 32.0);
        // All 8 sequences of 8 tokens, on two ranks.
        let expected = 64.0 / seconds / 2.0 * 1e-3;
        for (key, expected) in [
            ("tokens_per_second", 32.0 / seconds),
            ("teraflops_per_rank", expected),
            ("mfu", expected),
            ("mfu_full_attention", 1.5 * expected),
        ] {
            assert!((number(key) / expected - 1.0).abs() < 1e-9, "{key} in {step}");
        }
    }
}

#[test]
fn files_that_cannot_be_written_are_named_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken");
    fs::write(&taken, "").unwrap();
    let (training, learner) = run("TP1", &taken.join("inside")).supervised();
    says!(training.launch(learner).error.expect("a refusal"), "cannot create", "a part of the path is a file");
    let inside = Some(taken.join("inside"));
    for logs in [
        LogOptions { jsonl: inside.clone(), ..LogOptions::default() },
        LogOptions { tensorboard: inside.clone(), ..LogOptions::default() },
        LogOptions { wandb: inside.clone(), ..LogOptions::default() },
        LogOptions { mlflow: inside.clone(), ..LogOptions::default() },
        LogOptions { trace: inside, ..LogOptions::default() },
    ] {
        says!(launch(&run("TP1", &folder.path().join("run")).logs(logs)).error.expect("a refusal"), "taken");
    }
}
