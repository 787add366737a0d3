//! Reinforcement learning with verifiable rewards (GRPO) in seconds: a Llama of 30,000 random parameters is asked for sums
//! of two digits, draws answers, and is told only which of them are right.
//!
//! ```text
//! cargo run --release --example grpo -- --parallel.dp 2
//! ```

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use backend_dist::mesh::Mesh;
use backend_dist::process::Cluster;
use burn_megatron::config::RunConfig;
use burn_megatron::grpo::Completion;
use burn_megatron::train::{Plan, train_among};
use examples::together;
use serde_json::{Value, json};

const RUN: &str = r#"
[model]
family = "llama"
vocab-size = 12
hidden-size = 32
intermediate-size = 96
num-hidden-layers = 2
num-attention-heads = 4
num-key-value-heads = 2
head-dim = 8

[training]
steps = 400
global-batch = 256             # completions: 16 of each of 16 prompts
micro-batch = 64
seq-length = 8
clip = 1.0

[lr]
max = 4e-3

[grpo]
train = ["runs/grpo/prompts.jsonl"]
num-generations = 16
max-completion-length = 1
beta = 0.0                     # nothing that the model knows already is worth keeping

[data]
tokenizer = "runs/grpo/tokenizer.json"

[checkpoint]
directory = "none"

[output]
directory = "runs/grpo"
"#;

fn main() -> ExitCode {
    together(run)
}

fn run(cluster: &Cluster) -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.iter().any(|word| ["-h", "--help"].contains(&word.as_str())) {
        println!(
            "Flags are the keys of a run's file: --training.steps 100, --parallel.dp 2; docs/reference/configuration.md"
        );
        return Ok(());
    }
    let overrides = words.chunks(2).map(|pair| (pair[0].trim_start_matches("--").into(), pair[1..].concat()));
    let folder = Path::new("runs/grpo");
    cluster.first_then_others(|| -> anyhow::Result<()> {
        if cluster.is_first() {
            fs::create_dir_all(folder)?;
            fs::write(folder.join("tokenizer.json"), tokenizer().to_string())?;
            fs::write(folder.join("prompts.jsonl"), prompts().join("\n"))?;
        }
        Ok(())
    })?;
    let config = RunConfig::parse("grpo.toml", RUN, &overrides.collect::<Vec<_>>())?;
    // The reward is any function. `answer` of a row, with an exact match, is what there is without one.
    let plan = Plan::new(&config, &[])?.with_reward(is_right);
    let processes = cluster.processes(&Mesh::new(config.parallel.clone())?)?;
    train_among(&plan, Some(&processes), vec![burn::tensor::Device::flex()], &mut |_| ())?;
    if cluster.is_first() {
        println!("{:.0} % of the sums are right; chance is 8 %", 100.0 * last_rewards(folder)?);
    }
    Ok(())
}

fn is_right(completion: &Completion) -> f64 {
    let sum = completion.row["a"].as_u64().zip(completion.row["b"].as_u64()).map(|(a, b)| a + b);
    if completion.text.parse().ok() == sum { 1.0 } else { 0.0 }
}

fn prompts() -> Vec<String> {
    let pairs = (0..10).flat_map(|a| (0..10 - a).map(move |b| (a, b)));
    pairs.map(|(a, b)| json!({ "prompt": format!("{a}+{b}="), "a": a, "b": b }).to_string()).collect()
}

/// A token for each character.
fn tokenizer() -> Value {
    let vocab: serde_json::Map<String, Value> =
        "0123456789+=".chars().enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
    json!({ "version": "1.0", "decoder": { "type": "Fuse" }, "model": { "type": "BPE", "vocab": vocab, "merges": [] } })
}

/// The mean reward of the last 20 steps.
fn last_rewards(folder: &Path) -> anyhow::Result<f64> {
    let log = fs::read_to_string(folder.join("steps.jsonl"))?;
    let lines: Vec<Value> = log.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let rewards: Vec<f64> = lines.iter().rev().filter_map(|line| line["reward"].as_f64()).take(20).collect();
    Some(rewards.iter().sum::<f64>() / rewards.len() as f64)
        .filter(|mean| mean.is_finite())
        .context("no step was logged")
}
