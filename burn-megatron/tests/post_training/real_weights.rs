//! `tests/real_weights`, the script for whoever has published weights, on a tiny folder.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::eval::model;

/// Exit code and what was printed.
fn run(folder: &Path, more: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/real_weights"))
        .arg(folder.join("tiny"))
        .args(["--binary", env!("CARGO_BIN_EXE_burn-megatron"), "--values"])
        .arg(folder.join("values"))
        .args(more)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn found_values_are_printed_stored_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("tiny")).unwrap();
    model(&folder.path().join("tiny"));
    let values = folder.path().join("values/lab--tiny");
    let (code, said) = run(folder.path(), &["--name", "lab/tiny"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("lab/tiny: nothing is stored in") && !values.exists(), "{said}");
    let perplexity: f64 = said.lines().find_map(|line| line.strip_prefix("perplexity: ")).unwrap().parse().unwrap();
    assert!(perplexity > 1.0 && perplexity.is_finite());
    let (code, said) = run(folder.path(), &["--name", "lab/tiny", "--store"]);
    assert!(code == Some(0) && said.contains("stored"), "{said}");
    // Of 40 tokens, each a word of this tokenizer, those up to the end of the text.
    let continuation = fs::read_to_string(values.join("continuation.txt")).unwrap();
    assert!(continuation.split_whitespace().filter(|word| word.starts_with('w')).count() > 1, "{continuation}");
    let (code, said) = run(folder.path(), &["--name", "lab/tiny", "--tensor-parallel", "2"]);
    assert!(code == Some(0) && said.contains("40 tokens and perplexity"), "{said}");
    fs::write(values.join("perplexity.txt"), format!("{}\n", perplexity * 1.002)).unwrap();
    let (code, said) = run(folder.path(), &["--name", "lab/tiny"]);
    assert!(code == Some(1) && said.contains("lab/tiny: perplexity") && !said.contains("continuation"), "{said}");
    fs::write(values.join("continuation.txt"), "w1 w2\n").unwrap();
    let (code, said) = run(folder.path(), &["--name", "lab/tiny"]);
    assert!(code == Some(1) && said.contains("lab/tiny: another continuation"), "{said}");
}

#[test]
fn what_is_no_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (code, said) = run(folder.path(), &[]);
    assert!(code == Some(2) && said.contains("tiny has no config.json"), "{said}");
}
