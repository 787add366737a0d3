//! `burn-megatron train` of a BERT in several processes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::train::succeed;
use super::{command, ended, run};

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = |i: usize| format!("The cat {} sat. Then it saw {} mice! Did it eat {}? Yes.\n\n", i % 7, i % 5, i % 3);
    fs::write(folder.path().join("book.txt"), (0..32).map(text).collect::<String>()).unwrap();
    let preprocess = "preprocess --input book.txt --output-prefix book --train-wordpiece 96 --split-sentences";
    assert!(ended(command(folder.path(), preprocess, None).spawn().unwrap(), Duration::from_secs(60)).status.success());
    let config = "[model]\npreset = \"bert-base\"\nvocab-size = 96\nhidden-size = 16\nnum-hidden-layers = 2\n\
        num-attention-heads = 4\nintermediate-size = 32\nmax-position-embeddings = 32\n\
        [training]\nsteps = 6\nmicro-batch = 2\nglobal-batch = 8\nseq-length = 32\ndtype = \"f64\"\n[lr]\nmax = 0.01\n\
        [data]\nprefixes = [\"book_text_sentence\"]\ntokenizer = \"book_tokenizer.json\"\nsplit = \"3,1,0\"\n\
        [evaluation]\nevery = 2\nbatches = 1\n[checkpoint]\nkeep-last = \"none\"\n";
    fs::write(folder.path().join("run.toml"), config).unwrap();
    folder
}

/// The losses of all steps and evaluations.
fn losses(folder: &Path, name: &str) -> Vec<f64> {
    let log = fs::read_to_string(folder.join(name).join("steps.jsonl")).unwrap();
    log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

fn train(name: &str, more: &str) -> String {
    format!("train run.toml --device cpu --output.directory {name} {more}")
}

#[test]
fn a_bert_has_the_losses_of_one_process_and_resumes_there() {
    let folder = folder();
    let folder = folder.path();
    let (tp, pp, dp) = ("--parallel.tensor-parallel 2", "--parallel.pipeline-parallel 2", "--parallel.data-parallel");
    for (index, (layout, processes)) in [
        (format!("{tp} {dp} 2 --parallel.zero 1"), 4),
        (format!("{dp} 4 --parallel.zero 3"), 2),
        (format!("{pp} {dp} 2"), 2),
        (format!("{pp} {dp} 2"), 4),
    ]
    .iter()
    .enumerate()
    {
        let [alone, several] = ["alone", "several"].map(|name| format!("{name}{index}"));
        let one = ended(command(folder, &train(&alone, layout), None).spawn().unwrap(), Duration::from_secs(240));
        assert!(one.status.success(), "{}{}", one.stdout, one.stderr);
        succeed(folder, &train(&several, layout), *processes);
        let expected = losses(folder, &alone);
        let close = |found: &[f64]| {
            found.len() == 9 && found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() < 1e-12)
        };
        assert!(close(&losses(folder, &several)), "{layout}: {:?}, not {expected:?}", losses(folder, &several));
        for part in ["model", "optim", "scheduler"] {
            fs::remove_file(folder.join(&several).join(format!("checkpoints/{part}-3.bpk"))).unwrap();
        }
        succeed(folder, &train(&several, layout), *processes);
        assert!(close(&losses(folder, &several)), "{layout} again: {:?}, not {expected:?}", losses(folder, &several));
    }
}

#[test]
fn what_is_wrong_with_a_bert_in_one_process_ends_all() {
    let folder = folder();
    for (more, words) in [
        ("--training.global-batch 6 --parallel.data-parallel 3", "cannot be shared out over 2 processes"),
        ("--parallel.data-parallel 2 --data.prefixes none", "none"),
    ] {
        for process in run(folder.path(), &train("wrong", more), 2) {
            assert!(!process.status.success());
            says!(process.stderr, words);
        }
    }
}
