//! `eval` of a T5: what lm-evaluation-harness says of it with transformers, in every layout (`tests/golden/hf/make_t5_eval.py`).

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{fail, golden, succeed};

const FILES: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "write.jsonl",
    "rest.jsonl",
    "choice.jsonl",
    "book.txt",
];

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in FILES {
        fs::copy(golden("hf/t5_eval").join(file), folder.path().join(file)).unwrap();
    }
    folder
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn samples_are_those_of_the_harness_in_every_layout() {
    let folder = folder();
    let at = folder.path();
    let found = fs::read_to_string(golden("hf/t5_eval/harness.json")).unwrap();
    let harness: Value = serde_json::from_str(&found).unwrap();
    let list = |name: &str| harness[name].as_array().unwrap().clone();
    let near = |sample: &Value, expected: &Value, what: &str| {
        let (sample, expected) = (sample.as_f64().unwrap(), expected.as_f64().unwrap());
        assert!((sample - expected).abs() < 2e-5, "{what}: {sample}, not {expected}");
    };
    let command =
        "eval --hf . --task write.jsonl rest.jsonl choice.jsonl --perplexity book.txt --max-length 12 --output out";
    let layout = "--tensor-parallel 2 --data-parallel 2";
    for flags in ["", "--dtype f64 --batch-size 1", &format!("--dtype f64 --batch-size 3 {layout}")] {
        let said = succeed(at, &format!("{command} {flags}"));
        let mut samples = lines(&at.join("out")).into_iter();
        for (answer, sample) in list("write").iter().zip(&mut samples) {
            assert_eq!(&sample["output"], answer, "{flags}");
        }
        // The text before the word that ends it.
        let ended = samples.next().unwrap();
        assert_eq!(ended["output"].as_str().unwrap().trim(), ended["target"][0], "{flags}");
        for (expected, sample) in list("rest").iter().zip(&mut samples) {
            near(&sample["loglikelihood"], &expected[0], flags);
            assert_eq!(sample["is_greedy"], expected[1], "{flags}");
        }
        for (expected, sample) in list("choice").iter().zip(&mut samples) {
            for (index, expected) in expected.as_array().unwrap().iter().enumerate() {
                near(&sample["loglikelihood"][index], &expected[0], flags);
            }
            assert_eq!(sample["prediction"], 0, "the shortest is the likeliest");
        }
        let book = samples.next().unwrap();
        near(&book["loglikelihood"], &harness["book"][0], flags);
        // The end of the text is a token too.
        assert_eq!((&book["tokens"], samples.next()), (&json!(30), None));
        for metric in ["exact_match", "acc_norm", "perplexity", "token_perplexity"] {
            assert!(said.contains(metric), "{said}");
        }
        // One of six answers is said to be another.
        assert!(said.contains("0.8333"), "{said}");
    }
}

#[test]
fn what_a_t5_cannot_be_asked_is_refused() {
    let folder = folder();
    for (flags, words) in [
        ("--task rest.jsonl --context-parallel 2", "context-parallel"),
        ("--task rest.jsonl --tensor-parallel 3", "3"),
        ("--task rest.jsonl --max-length 0", "nearest legal: 1"),
        ("--task rest.jsonl --max-length 4", "rest.jsonl:4: continuation: 5 tokens, the model takes 4"),
    ] {
        let message = fail(folder.path(), &format!("eval --hf . {flags}"));
        assert!(message.contains(words), "{flags}: {message}");
    }
    let said = succeed(folder.path(), "eval --hf . --task rest.jsonl --max-length 11 --limit 9");
    assert!(said.contains("perplexity"), "{said}");
}
