//! Adapters of BERT and T5 from a file: the same losses in every layout, files as peft has them, runs that resume.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::{Settings, forward_module};
use burn_megatron::hf::ModuleFolder;
use burn_megatron::prelude::*;
use models::hf::HostInput;
use serde_json::Value;

use super::{losses, run_of};
use crate::command::{fail, succeed};
use crate::runs::{DP, PP, SP, TP, ZERO, export, refused, trained};

fn write_adapter(run: &Path, to: &Path) -> Value {
    succeed(run, &format!("export --checkpoint checkpoints --adapter {}", to.display()));
    serde_json::from_str(&fs::read_to_string(to.join("adapter_config.json")).unwrap()).unwrap()
}

/// Logits of a few tokens.
fn logits(folder: &ModuleFolder) -> Vec<f64> {
    let ints = |length: usize| HostInput::Ints {
        shape: vec![2, length],
        data: (0..2 * length as i64).map(|at| 7 + at).collect(),
    };
    let inputs = ["input_ids", "labels"].map(|name| (name.to_string(), ints(9)));
    let settings = Settings::new(vec![Device::flex()], ParallelLayout::default(), FloatDType::F64);
    let outputs = forward_module(folder, &BTreeMap::from(inputs), &settings).unwrap();
    outputs.tensors.into_iter().find(|(name, _)| name == "logits").unwrap().1.data
}

fn trains(model: &str, targets: &str, frozen: &str, kind: &[&str]) {
    let folder = run_of(model, 0.0);
    let at = |name: &str| folder.path().join(name);
    let said = |name: &str| at(name).to_str().unwrap().to_string();
    let short = ["--training.steps", "2", "--lr.warmup", "1 steps"];
    trained(folder.path(), &[&["--output.directory", &said("first")][..], &short].concat());
    let base = export(&at("first"), &at("base"));
    let hf = said("base");
    let lora = [
        "--model.preset",
        "none",
        "--model.hf",
        &hf,
        "--lora.rank",
        "3",
        "--lora.alpha",
        "48",
        "--lora.target-modules",
        targets,
    ];
    let flags = |name: &'static str, more: &[&str]| {
        let all = [&lora[..], kind, more].concat().iter().map(ToString::to_string).collect::<Vec<_>>();
        [all, vec!["--output.directory".into(), said(name)]].concat()
    };
    let train = |name: &'static str, more: &[&str]| {
        let flags = flags(name, more);
        (trained(folder.path(), &flags.iter().map(String::as_str).collect::<Vec<_>>()), losses(&at(name)))
    };
    let (words, alone) = train("alone", &[]);
    assert!(words.contains("rank 3 of"), "{words}");
    assert!(alone[1][2] < alone[1][0], "{alone:?}");
    for (index, layout) in [&[TP, "2", SP, "true", DP, "2", ZERO, "1"][..], &[PP, "2", DP, "2"], &[DP, "4", ZERO, "3"]]
        .into_iter()
        .enumerate()
    {
        let (_, found) = train(["tp", "pp", "zero"][index], layout);
        for (found, alone) in found.iter().flatten().zip(alone.iter().flatten()) {
            assert!((found - alone).abs() < 1e-10, "{layout:?}: {found}, not {alone}");
        }
    }

    // What peft reads and what is merged compute the same, and nothing else was trained.
    let config = write_adapter(&at("alone"), &at("adapter"));
    assert_eq!((config["r"].as_u64(), config["base_model_name_or_path"].as_str()), (Some(3), Some(hf.as_str())));
    let merged = export(&at("alone"), &at("merged"));
    assert!(merged[frozen] == base[frozen] && merged != base);
    let [apart, together, before] = [
        ModuleFolder::open(at("base")).unwrap().with_adapter(at("adapter")),
        ModuleFolder::open(at("merged")).unwrap(),
        ModuleFolder::open(at("base")).unwrap(),
    ]
    .map(|folder| logits(&folder));
    let difference = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(difference(&apart, &together) < 1e-6, "{}", difference(&apart, &together));
    assert!(difference(&before, &together) > 1e-3, "{}", difference(&before, &together));

    // Without its last checkpoint, the run does the last steps again.
    for part in ["model", "optim", "scheduler"] {
        fs::remove_file(at("alone").join(format!("checkpoints/{part}-3.bpk"))).unwrap();
    }
    let (words, again) = train("alone", &[]);
    assert!(words.contains("began after step 4 of 6"), "{words}");
    assert_eq!(again, alone);
    assert!(export(&at("alone"), &at("again")) == merged);

    // A run that starts from the adapter begins with its loss.
    let adapter = said("adapter");
    let (_, found) = train("on", &["--lora.adapter", &adapter]);
    assert!(found[0][0] < alone[0][0], "{found:?} after {alone:?}");
    let other = flags("other", &["--lora.adapter", &adapter, "--lora.alpha", "4"]);
    let message = refused(folder.path(), &other.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(message.contains("it has rank = 3, alpha = 48"), "{message}");
}

#[test]
fn adapters_of_bert_are_trained() {
    trains("bert", "query,value", "bert.embeddings.word_embeddings.weight", &[]);
}

#[test]
fn adapters_of_t5_are_trained() {
    trains("t5", "q,v,wi", "shared.weight", &["--lora.dora", "true"]);
}

#[test]
fn layers_that_have_no_adapters_are_refused_before_anything_runs() {
    let folder = run_of("bert", 0.0);
    for (flags, words) in [
        (&["--lora.rank", "2", "--lora.target-modules", "q_proj"][..], "query"),
        (&["--lora.rank", "2", "--lora.target-modules", "word_embeddings"], "it is an embedding"),
        (&["--lora.rank", "2", "--lora.base", "nf4"], "lora.base = nf4 has no meaning with bert"),
        (&["--lora.rank", "64"], "lora.rank = 64 is more than the features"),
    ] {
        let message = refused(folder.path(), flags);
        assert!(message.contains(words), "{flags:?}: {message}");
    }
    trained(folder.path(), &[]);
    let message = fail(folder.path(), "export --checkpoint run/checkpoints --adapter none");
    assert!(message.contains("has no adapters: its run had no [lora]"), "{message}");
}
