//! Every number of a `config.json`, a `generation_config.json` and a manifest, in turn with absurd values: a command
//! ends with an answer or with an error that names the key, within a limited address space. No panic, no abort.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use burn_megatron::cli::{self, Cli};
use clap::Parser;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::files::{MODELS, golden};
use crate::round_trip::text;

/// The file in which a sweep notes what it tries next.
const NOTE: &str = "BURN_MEGATRON_SWEEP_NOTE";

/// Values at the edges of what can be written, and two that are no numbers.
fn values() -> [Value; 11] {
    [
        json!(0),
        json!(-1),
        json!(1u64 << 31),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(0.5),
        json!(-1e308),
        json!(1e308),
        json!(1e-30),
        json!("NaN"),
        json!([1, 2]),
    ]
}

/// Runs `sweep` in a process of its own that has 4 GB of address space: this test once more.
fn limited(test: &str, sweep: impl Fn(&dyn Fn(&str))) {
    if let Some(note) = std::env::var_os(NOTE) {
        return sweep(&|what| fs::write(&note, what).unwrap());
    }
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("note");
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -v 4000000; exec \"$0\" --exact --nocapture --test-threads 1 \"$1\""]);
    shell.arg(std::env::current_exe().unwrap()).arg(test).env(NOTE, &note).env("RAYON_NUM_THREADS", "2");
    let output = shell.output().unwrap();
    let last = fs::read_to_string(&note).unwrap_or_default();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?} at {last}\n{said}", output.status);
    assert!(!last.is_empty(), "the sweep has run");
}

/// Runs a command. What is wrong with how it ends: it may say anything that `fits`.
fn run(words: &[&str], fits: impl Fn(&str) -> bool) -> Option<String> {
    let program = ["burn-megatron"].iter().chain(words);
    let parsed = Cli::try_parse_from(program).unwrap_or_else(|error| panic!("{words:?}: {error}"));
    let start = Instant::now();
    let ended = catch_unwind(AssertUnwindSafe(|| cli::run(parsed)));
    let Ok(ended) = ended else { return Some("it panicked".into()) };
    let wrong = match ended.err().map(|error| cli::describe(&error)) {
        // A rank that panics is an error of the command.
        Some(error) if error.contains("panicked") || !fits(&error) => Some(error),
        _ if start.elapsed() > Duration::from_secs(10) => Some(format!("it took {:?}", start.elapsed())),
        _ => None,
    };
    wrong.map(|wrong| format!("{}: {wrong}", words[0]))
}

/// Pointers to the numbers in a value; of lists only to those in the first element.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(path.into()),
        Value::Array(items) => items.first().into_iter().for_each(|item| numbers(item, &format!("{path}/0"), found)),
        Value::Object(fields) => fields.iter().for_each(|(key, field)| numbers(field, &format!("{path}/{key}"), found)),
        _ => {}
    }
}

/// Whether an error names the key, in the file's spelling or in that of our configurations. Where a number is legal, but
/// the weights contradict it, it names the tensor.
fn names(error: &str, pointer: &str) -> bool {
    let key = pointer.rsplit('/').find(|name| name.parse::<usize>().is_err()).unwrap();
    // Mixtral's follows from the other where the file has none.
    let derived = if key == "hidden_size" { "head_dim" } else { key };
    [key, &key.replace('_', "-"), derived, "tensor `", "weight `"].iter().any(|name| error.contains(name))
}

/// Tries every number of the file below `part` with every value. `commands` says what is wrong with how commands end.
fn sweep(
    name: &str,
    whole: &Value,
    part: &str,
    note: &dyn Fn(&str),
    write: impl Fn(&Value),
    commands: impl Fn(&str) -> Vec<Option<String>>,
) {
    let (mut pointers, mut wrong) = (Vec::new(), Vec::new());
    numbers(whole.pointer(part).unwrap(), part, &mut pointers);
    assert!(pointers.len() > 4, "{pointers:?}");
    for (pointer, value) in pointers.iter().flat_map(|pointer| values().map(|value| (pointer, value))) {
        let mut changed = whole.clone();
        *changed.pointer_mut(pointer).unwrap() = value.clone();
        write(&changed);
        let what = format!("{name} {pointer} = {value}");
        note(&what);
        wrong.extend(commands(pointer).into_iter().flatten().map(|wrong| format!("{what}: {wrong}")));
    }
    write(whole);
    assert!(wrong.is_empty(), "{} of {} commands:\n{}", wrong.len(), pointers.len() * values().len(), wrong.join("\n"));
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A folder with the model's files, and with every number that a generation_config.json may have.
fn folder_of(model: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden(model).join(file), folder.path().join(file)).unwrap();
    }
    let generation = json!({"temperature": 1.0, "top_k": 5, "top_p": 0.5, "bos_token_id": 1, "eos_token_id": [2]});
    fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    folder
}

#[test]
fn absurd_numbers_of_a_hugging_face_folder() {
    limited("sweep::absurd_numbers_of_a_hugging_face_folder", |note| {
        for model in MODELS.split(' ').chain(["deepseek_v3", "nemotron3"]) {
            let folder = folder_of(model);
            let hf = text(folder.path());
            let generate = |fits: &dyn Fn(&str) -> bool| {
                run(&["generate", "--hf", hf, "--tokens", "3,4", "--max-new-tokens", "2"], fits)
            };
            for file in ["config.json", "generation_config.json"] {
                let path = folder.path().join(file);
                let write = |changed: &Value| fs::write(&path, changed.to_string()).unwrap();
                sweep(&format!("{model} {file}"), &read(&path), "", note, write, |pointer| {
                    let output = tempfile::tempdir().unwrap();
                    let named = |error: &str| names(error, pointer);
                    vec![generate(&named), run(&["import", "--hf", hf, "--output", text(output.path())], named)]
                });
            }
            assert_eq!(generate(&|_| false), None);
        }
    });
}

/// Writes another manifest, with its hash.
fn write(step: &Path, manifest: &Value) {
    let manifest = manifest.to_string();
    fs::write(step.join("manifest.json"), &manifest).unwrap();
    let hash: String = Sha256::digest(&manifest).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(step.join("SHA256SUMS"), format!("{hash}  manifest.json\n")).unwrap();
}

/// Trains one step of a tiny model in `folder`: the words of the command, and the checkpoint.
fn trained(folder: &Path, preset: &str) -> (Vec<String>, PathBuf) {
    let (book, out) = (folder.join("book.txt"), folder.join("out"));
    fs::write(&book, "some words\n\n".repeat(200)).unwrap();
    let keys = [
        ("model.preset", preset),
        ("data.text", text(&book)),
        ("data.tokenizer", "byte"),
        ("training.seq-length", "16"),
        ("training.global-batch", "2"),
        ("training.micro-batch", "2"),
        ("training.steps", "1"),
        ("training.dtype", "f16"),
        ("evaluation.batches", "1"),
        ("output.directory", text(&out)),
    ];
    let flags = keys.iter().flat_map(|(key, value)| [format!("--{key}"), value.to_string()]);
    let words: Vec<String> = ["train".to_string()].into_iter().chain(flags).collect();
    let train: Vec<&str> = words.iter().map(String::as_str).collect();
    assert_eq!(run(&train, |_| false), None);
    (words, out.join("checkpoints/step_00000001"))
}

#[test]
fn absurd_numbers_of_a_manifest() {
    limited("sweep::absurd_numbers_of_a_manifest", |note| {
        // What is not of the model is the same for all.
        let models = ["gpt-tiny", "mixtral-tiny", "deepseek-tiny"].map(|preset| (preset, "/state/model"));
        for (preset, part) in [("tiny", "")].into_iter().chain(models) {
            let folder = tempfile::tempdir().unwrap();
            let (mut train, step) = trained(folder.path(), preset);
            train.extend(["--dry-run".to_string(), "--checkpoint.resume".into(), text(&step).into()]);
            let train: Vec<&str> = train.iter().map(String::as_str).collect();
            let whole = read(&step.join("manifest.json"));
            let from = text(&step);
            sweep(
                &format!("{preset} manifest"),
                &whole,
                part,
                note,
                |changed| write(&step, changed),
                |pointer| {
                    let out = tempfile::tempdir().unwrap();
                    let out = out.path().join("hf");
                    let named = |error: &str| error.contains("manifest.json") || names(error, pointer);
                    vec![
                        run(&["inspect", from, "--verify"], named),
                        run(&["generate", "--checkpoint", from, "--tokens", "3,4", "--max-new-tokens", "2"], named),
                        run(&["export", "--checkpoint", from, "--hf", text(&out)], named),
                        run(&train, named),
                    ]
                },
            );
        }
    });
}
