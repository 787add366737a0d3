use parking_lot::Mutex;
use std::fs;
use std::sync::Arc;

use models::layers::moe::stats::Auxiliary;

use super::*;
use crate::engine::ExpertLoad;
use crate::metrics::{FlopsPerToken, RankReading};

fn step(step: u64) -> StepStats {
    StepStats {
        loss: 2.5,
        tokens: 128,
        computed_tokens: 256,
        grad_norm: 0.5,
        lr: 1e-3,
        seconds: 0.25,
        memory: 1024,
        ranks: 4,
        step,
        ..StepStats::default()
    }
}

struct Memory(Arc<Mutex<Vec<String>>>);

impl MetricsSink for Memory {
    fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
        self.0.lock().push(entry.line.to_string());
        Ok(())
    }
}

/// Those of a training step.
fn scalars(line: &Value) -> Vec<(String, f64)> {
    LogEntry { kind: "train", step: 0, value: line, line: "" }.scalars()
}

#[test]
fn lines_hold_every_metric_and_tensorboard_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let files =
        LogFiles { tensorboard: Some(folder.path().join("board")), ..LogFiles::within(&folder.path().join("run")) };
    let entries = Arc::new(Mutex::new(Vec::new()));
    let mut log = RunLog::open(&files, 2).unwrap().with(Memory(entries.clone()));
    let saved = SaveStats { step: 2, bytes: 1000, stall: 0.5, seconds: 2.0, share: 0.01 };
    log.resumed(&LoadStats { step: 2, bytes: 1000, seconds: 1.0 }).unwrap();
    let flops = FlopsPerToken { causal: 2e9, full: 3e9, peak: Some(1e12) };
    let stats = StepStats { flops: Some(flops), loss_scale: Some(1024.0), bubble: Some(0.25), ..step(3) };
    log.train(&stats).unwrap();
    let gpu = |idle| RankReading { idle: Some(idle), memory: Some(3 << 30), ..RankReading::default() };
    log.train(&StepStats { gpus: vec![gpu(0.25), gpu(0.75)], ..step(4) }).unwrap();
    log.valid(4, &EvalStats { loss: 2.0, tokens: 64, accuracy: None, teacher_kl: None, preference: None }).unwrap();
    log.saved(&saved).unwrap();
    let text = fs::read_to_string(folder.path().join("run/steps.jsonl")).unwrap();
    assert_eq!(entries.lock().join("\n") + "\n", text, "another sink gets the same entries");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let expected = serde_json::json!({
        "kind": "train", "step": 3, "loss": 2.5, "tokens": 128, "grad_norm": 0.5, "lr": 1e-3, "seconds": 0.25,
        "tokens_per_second": 512.0, "tokens_per_second_per_rank": 128.0, "teraflops_per_rank": 0.512,
        "teraflops_per_rank_full_attention": 0.768, "mfu": 0.512, "mfu_full_attention": 0.768, "memory": 1024, "loss_scale": 1024.0,
        "bubble": 0.25,
    });
    assert_eq!(lines[1], expected);
    assert_eq!((&lines[2]["gpu_idle"], &lines[2]["gpus"][1]["memory"]), (&0.5.into(), &(3u64 << 30).into()));
    assert!(lines[2].get("mfu").is_none() && lines[2].get("bubble").is_none(), "what is not known is not there");
    assert_eq!((&lines[3]["kind"], lines[3]["perplexity"].as_f64()), (&"valid".into(), Some(2f64.exp())));
    assert_eq!((&lines[4]["kind"], &lines[4]["stall"]), (&"checkpoint".into(), &0.5.into()));
    assert_eq!((&lines[4]["bytes"], &lines[4]["share"]), (&1000.into(), &0.01.into()));
    assert_eq!((&lines[0]["kind"], &lines[0]["step"]), (&"resumed".into(), &2.into()));

    let scalars = scalars(&lines[1]);
    assert_eq!(scalars.len(), expected.as_object().unwrap().len() - 2, "all but kind and step");
    assert!(scalars.contains(&("train/grad_norm".to_string(), 0.5)), "{scalars:?}");
    let board = fs::read_dir(folder.path().join("board")).unwrap().next().unwrap().unwrap();
    let bytes = fs::read(board.path()).unwrap();
    for tag in scalars.iter().map(|(tag, _)| tag.as_str()).chain(["valid/perplexity", "checkpoint/bytes"]) {
        assert!(bytes.windows(tag.len()).any(|window| window == tag.as_bytes()), "{tag}");
    }
}

#[test]
fn experts_have_their_tokens_by_layer_and_a_few_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let files = LogFiles::within(folder.path());
    let load = |layer, tokens: &[u64]| ExpertLoad {
        layer,
        tokens: tokens.to_vec(),
        dropped: 2,
        entropy: 0.5,
        auxiliary: [(Auxiliary::LoadBalancing, 1.5)].into(),
        ..ExpertLoad::default()
    };
    let stats = StepStats { experts: vec![load(0, &[4, 4]), load(1, &[2, 6])], ..step(1) };
    RunLog::open(&files, 0).unwrap().train(&stats).unwrap();
    let line: Value = serde_json::from_slice(&fs::read(&files.jsonl).unwrap()).unwrap();
    assert_eq!(line["experts"][1]["tokens"], serde_json::json!([2, 6]));
    assert_eq!(line["experts"][0]["auxiliary"], serde_json::json!({ "load_balancing": 1.5 }));
    let scalars = scalars(&line);
    for (name, value) in
        [("expert_balance", 1.5), ("dropped_tokens", 0.25), ("router_entropy", 0.5), ("load_balancing_loss", 1.5)]
    {
        assert!(scalars.contains(&(format!("train/{name}"), value)), "{name}: {scalars:?}");
    }
    assert!(line.get("z_loss").is_none());
}

#[test]
fn a_loss_that_is_no_number_stays_visible() {
    let folder = tempfile::tempdir().unwrap();
    let files = LogFiles::within(folder.path());
    RunLog::open(&files, 0).unwrap().train(&StepStats { loss: f64::NAN, ..step(1) }).unwrap();
    let line: Value = serde_json::from_slice(&fs::read(&files.jsonl).unwrap()).unwrap();
    assert!(line["loss"].is_null());
    let loss = scalars(&line).into_iter().find(|(tag, _)| tag == "train/loss").unwrap();
    assert!(loss.1.is_nan());
}
