//! GRPO: rewards go up, and every layout learns the same from the same completions.

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use burn_megatron::config::RunConfig;
use burn_megatron::grpo::Completion;
use burn_megatron::train::{Plan, train};
use serde_json::Value;

use super::{Line, log, parse, succeed};

/// A token for each of these, and one that ends a text.
const LETTERS: &str = "0123456789+=";

pub fn prepared(folder: &Path, rows: impl Iterator<Item = (String, usize)>) {
    let vocab: serde_json::Map<String, Value> =
        LETTERS.chars().enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
    let end = serde_json::json!({
        "id": LETTERS.len(), "content": "<|endoftext|>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false
    });
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": [end], "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    });
    fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
    let lines: Vec<String> =
        rows.map(|(prompt, answer)| serde_json::json!({ "prompt": prompt, "answer": answer }).to_string()).collect();
    fs::write(folder.join("prompts.jsonl"), lines.join("\n")).unwrap();
}

pub fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
    let own = "family = \"llama\"\nvocab-size = 16\nhidden-size = 32\nintermediate-size = 48\nnum-hidden-layers = 2\n\
               num-attention-heads = 4\nnum-key-value-heads = 2\nhead-dim = 8\ninitializer-range = 0.2\n";
    let model = if overrides.iter().any(|(key, _)| *key == "model.hf") { "" } else { own };
    let text = format!(
        "[model]\n{model}[training]\nsteps = 4\nglobal-batch = 16\nmicro-batch = 4\nseq-length = 8\ndtype = \"f64\"\n\
         [lr]\nmax = 2e-2\n[data]\ntokenizer = {:?}\n[grpo]\ntrain = [{:?}]\nnum-generations = 4\nmax-completion-length = 3\n\
         [checkpoint]\ndirectory = \"none\"\n[output]\ndirectory = {:?}\n",
        folder.join("tokenizer.json"),
        folder.join("prompts.jsonl"),
        folder.join(name)
    );
    parse(&text, overrides)
}

pub fn steps(folder: &Path, name: &str) -> Vec<Line> {
    log(folder, name).into_iter().filter(|line| line["kind"] == "train").collect()
}

fn trained(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> Vec<Line> {
    super::trained(&config(folder, name, overrides));
    steps(folder, name)
}

pub fn number(line: &Line, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line:?}"))
}

/// Numbers that depend on completions, rewards, losses and gradients.
const NUMBERS: [&str; 7] = ["loss", "grad_norm", "reward", "reward_std", "completion_length", "kl", "clip_ratio"];

fn assert_same(name: &str, found: &[Line], expected: &[Line]) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        for key in NUMBERS {
            let [a, b] = [found, expected].map(|line| number(line, key));
            assert!((a - b).abs() <= 1e-10 * b.abs().max(1.0), "{name}, step {step}: {key} {a} {b}");
        }
    }
}

/// Half of all digits are right, so that nearly every group has something to learn from.
fn easy(completion: &Completion) -> f64 {
    let even = completion.text.chars().filter(|letter| "02468".contains(*letter)).count();
    even as f64 + completion.row["answer"].as_f64().unwrap() * 0.01
}

pub fn rewarded(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> Vec<Line> {
    let plan = Plan::new(&config(folder, name, overrides), &[]).unwrap().with_reward(easy);
    train(&plan, vec![Device::flex()], &mut |_| ()).unwrap();
    steps(folder, name)
}

#[test]
fn every_layout_learns_from_its_completions_as_one_device() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path(), (0..10).map(|digit| (format!("{digit}{}", &"+="[digit % 2..]), digit)));
    let layouts = [
        vec![("parallel.tp", "2"), ("parallel.sp", "true")],
        vec![("parallel.dp", "2"), ("parallel.zero", "2"), ("training.micro-batch", "2")],
        vec![("parallel.cp", "2")],
        vec![("parallel.tp", "2"), ("parallel.dp", "2"), ("recompute.granularity", "full")],
        vec![("parallel.pp", "2")],
        vec![("parallel.dp", "2"), ("parallel.zero", "3"), ("training.micro-batch", "2")],
        vec![("parallel.tp", "2"), ("parallel.sp", "true"), ("parallel.pp", "2"), ("parallel.dp", "2")],
    ];
    let kinds = [
        ("full", vec![("grpo.beta", "0.3")]),
        ("iterated", vec![("grpo.num-iterations", "2"), ("grpo.loss-type", "dapo"), ("grpo.temperature", "1.5")]),
        ("adapters", vec![("lora.rank", "4"), ("grpo.loss-type", "dr-grpo"), ("grpo.num-iterations", "4")]),
    ];
    for (kind, own) in &kinds {
        let one = rewarded(folder.path(), kind, own);
        assert!(one.iter().all(|line| number(line, "reward_std") > 0.0 && number(line, "grad_norm") > 0.0), "{one:?}");
        assert!(number(&one[0], "kl").abs() < 1e-12 && number(&one[3], "kl") > 1e-6, "{one:?}");
        for layout in &layouts {
            let name = format!("{kind}{layout:?}").replace(['[', ']', '(', ')', '"', ',', ' ', '.'], "");
            let other = rewarded(folder.path(), &name, &[own.as_slice(), layout].concat());
            assert_same(&name, &other, &one);
        }
    }
    // Of steps on the same completions only the first has a ratio of 1.
    let iterated = steps(folder.path(), "iterated");
    let kept = |at: usize| number(&iterated[at], "reward") == number(&iterated[at + 1], "reward");
    assert_eq!([kept(0), kept(1), kept(2)], [true, false, true]);
    assert!(number(&iterated[0], "clip_ratio") == 0.0 && number(&iterated[1], "clip_ratio") > 0.0, "{iterated:?}");
}

/// Ranks that have written all of theirs continue with those that have not, and a rank may have several stages.
#[test]
fn experts_and_stages_on_other_ranks_draw_the_same() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path(), (0..10).map(|digit| (format!("{digit}{}", &"+="[digit % 2..]), digit)));
    let own = [
        ("model.family", "mixtral"),
        ("model.num-experts", "4"),
        ("model.num-experts-per-tok", "2"),
        ("model.router-aux-loss-coef", "0"),
        ("model.num-hidden-layers", "4"),
        ("grpo.temperature", "2.0"),
    ];
    let one = rewarded(folder.path(), "experts", &own);
    let lengths: Vec<f64> = one.iter().map(|line| number(line, "completion_length")).collect();
    assert!(lengths.iter().any(|length| *length < 3.0), "none of the completions ends early: {lengths:?}");
    let dp = [("parallel.dp", "2"), ("training.micro-batch", "2")];
    let layouts = [
        [&dp[..], &[("parallel.ep", "2")]].concat(),
        [&dp[..], &[("parallel.ep", "2"), ("parallel.zero", "3")]].concat(),
        [&dp[..], &[("parallel.ep", "2"), ("parallel.pp", "2"), ("pipeline.schedule", "zb-v")]].concat(),
        vec![("parallel.pp", "2"), ("parallel.vpp", "2")],
        vec![
            ("parallel.tp", "2"),
            ("parallel.sp", "true"),
            ("parallel.ep", "2"),
            ("parallel.expert-tensor-parallel", "1"),
        ],
        vec![("parallel.cp", "2"), ("parallel.ep", "2")],
    ];
    for (at, layout) in layouts.iter().enumerate() {
        let other = rewarded(folder.path(), &format!("experts{at}"), &[&own[..], layout].concat());
        assert_same(&format!("{layout:?}"), &other, &one);
    }
    // Experts that are shared beyond a tensor-parallel group, by ranks of which one ends before the other.
    let long = [
        ("training.global-batch", "2"),
        ("training.micro-batch", "1"),
        ("training.seq-length", "16"),
        ("grpo.num-generations", "2"),
        ("grpo.max-completion-length", "12"),
    ];
    let own = [&own[..], &long].concat();
    let one = rewarded(folder.path(), "long", &own);
    let shared = |size| ("parallel.expert-tensor-parallel", size);
    for (at, layout) in [
        vec![("parallel.dp", "2"), shared("2")],
        vec![("parallel.cp", "2"), shared("2")],
        vec![("parallel.tp", "2"), ("parallel.dp", "2"), shared("4")],
    ]
    .iter()
    .enumerate()
    {
        let other = rewarded(folder.path(), &format!("long{at}"), &[&own[..], layout].concat());
        assert_same(&format!("{layout:?}"), &other, &one);
    }
}

/// The load-balancing loss of a sequence weighs the same, however long its completion is.
#[test]
fn completions_of_experts_are_balanced_in_every_micro_batch() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path(), (0..10).map(|digit| (format!("{digit}{}", &"+="[digit % 2..]), digit)));
    for kind in ["dapo", "dr-grpo"] {
        let own = [
            ("model.family", "mixtral"),
            ("model.num-experts", "4"),
            ("model.num-experts-per-tok", "2"),
            ("model.router-aux-loss-coef", "0.5"),
            ("model.router-balance", "sequence"),
            ("grpo.temperature", "2.0"),
            ("grpo.loss-type", kind),
        ];
        let run = |micro: &'static str| {
            rewarded(folder.path(), &format!("{kind}{micro}"), &[&own[..], &[("training.micro-batch", micro)]].concat())
        };
        assert_same(kind, &run("1"), &run("4"));
    }
}

#[test]
fn a_small_model_learns_to_answer() {
    let folder = tempfile::tempdir().unwrap();
    let sums = (0..10).flat_map(|a| (0..10 - a).map(move |b| (format!("{a}+{b}="), a + b)));
    prepared(folder.path(), sums);
    let overrides = [
        ("training.steps", "400"),
        ("training.global-batch", "256"),
        ("training.micro-batch", "256"),
        ("training.dtype", "f32"),
        ("grpo.num-generations", "16"),
        ("grpo.max-completion-length", "1"),
        ("grpo.beta", "0.0"),
        ("lr.max", "4e-3"),
    ];
    let run = trained(folder.path(), "sums", &overrides);
    let mean = |part: &[Line]| part.iter().map(|line| number(line, "reward")).sum::<f64>() / part.len() as f64;
    eprintln!("{:?}", run.chunks(20).map(mean).collect::<Vec<_>>());
    let (first, last) = (mean(&run[..10]), mean(&run[380..]));
    assert!(first < 0.25 && last > 0.9, "{first} {last}");
}

#[test]
fn a_run_resumes_and_what_it_is_given_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path(), (0..10).map(|digit| (format!("{digit}="), digit)));
    let checkpoints = folder.path().join("checkpoints").display().to_string();
    let own = [("checkpoint.directory", checkpoints.as_str()), ("lr.decay", "4 steps"), ("data.samples", "64")];
    let whole = rewarded(folder.path(), "whole", &own[1..]);
    let half = [&own[..], &[("training.steps", "2")]].concat();
    rewarded(folder.path(), "half", &half);
    let other = [&own[..], &[("parallel.dp", "2")]].concat();
    let rest = rewarded(folder.path(), "half", &other);
    assert_same("resumed", &rest[2..], &whole[2..]);

    let run = "[model]\npreset = \"llama3-8b\"\n[grpo]\ntrain = \"a\"\nnum-generations = 8\nmax-completion-length = 512\nbeta = 0.04\n\
               [data]\ntokenizer = \"b\"\n[evaluation]\nbatches = 0\n[training]\nglobal-batch = 64\nseq-length = 1024\ndtype = \"bf16\"\n";
    fs::write(folder.path().join("run.toml"), run).unwrap();
    let said = succeed(folder.path(), "plan run.toml --gpu h200 --lora.rank 16");
    says!(
        said,
        "draws        at least ",
        "before every step: prompts ",
        "511 tokens of 64 completions a rank",
        "log-probabilities"
    );
    says!(
        succeed(folder.path(), "plan run.toml --gpu h200 --lora.rank 16 --grpo.num-iterations 2"),
        "before every 2 steps"
    );

    let refused = |overrides: &[(&str, &str)]| {
        Plan::new(&config(folder.path(), "refused", overrides), &[]).err().unwrap().to_string()
    };
    for (overrides, words) in [
        (
            vec![("training.global-batch", "18"), ("training.micro-batch", "2")],
            "num-generations = 4; nearest legal: 16 or 20",
        ),
        (vec![("grpo.num-generations", "1")], "grpo.num-generations = 1: a group has at least 2"),
        (vec![("grpo.max-completion-length", "9")], "in training.seq-length = 8; nearest legal: 8"),
        (vec![("grpo.answer-pattern", "(")], "grpo.answer-pattern is no regular expression"),
        (vec![("grpo.epsilon", "1.5")], "grpo.epsilon = 1.5 is not above 0 and below 1"),
        (vec![("grpo.temperature", "0")], "grpo.temperature = 0 is not above 0"),
        (vec![("context.dynamic", "true")], "context.dynamic = true has no meaning with grpo.train"),
        (vec![("evaluation.batches", "2")], "evaluation.batches = 2: with grpo.train there is no loss"),
        (vec![("data.tokenizer", "char")], "grpo.train needs a tokenizer.json, but data.tokenizer = char"),
        (vec![("grpo.train", "/nowhere.jsonl")], "grpo.train: /nowhere.jsonl"),
    ] {
        says!(refused(&overrides), words);
    }
    let path = folder.path().join("prompts.jsonl");
    fs::write(&path, "{\"prompt\": \"1=\", \"answer\": 1}\n{\"prompt\": \"2=\"}\n").unwrap();
    let error = |overrides: &[(&str, &str)]| {
        let plan = Plan::new(&config(folder.path(), "rows", overrides), &[]).unwrap();
        train(&plan, vec![Device::flex()], &mut |_| ()).err().map(|error| error.to_string())
    };
    says!(error(&[]).unwrap(), "[grpo]", "prompts.jsonl:2: answer: missing");
    assert_eq!(error(&[("grpo.skip-bad-rows", "true"), ("training.steps", "1")]), None);
}
