//! What a run that resumes knows of its data.

use std::fs;

use crate::command::{fail, succeed};

/// One layer, some steps, a checkpoint.
const RUN: &str = "\
[model]
family = \"llama\"
hidden-size = 16
intermediate-size = 32
num-hidden-layers = 1
num-attention-heads = 2
num-key-value-heads = 1
max-position-embeddings = 64
vocab-size = 257

[data]
text = [\"book.txt\"]
tokenizer = \"byte\"
text-documents = \"line\"
split = \"1\"

[training]
seq-length = 16
global-batch = 2
micro-batch = 2
steps = 4

[lr]
max = 1e-3

[evaluation]
batches = 0
final-batches = 0

[output]
directory = \"run\"
";

/// The number of tokens, the first, the middle and the last sample stay what they were.
#[test]
fn a_text_of_which_a_little_has_changed_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let line = |number: usize| format!("line {number:05} of the text that is learned\n");
    let text: String = (0..2000).map(line).collect();
    fs::write(folder.path().join("book.txt"), &text).unwrap();
    fs::write(folder.path().join("run.toml"), RUN).unwrap();
    succeed(folder.path(), "train run.toml");
    // Unchanged it is the same text; the run is done.
    succeed(folder.path(), "train run.toml");
    let changed: String =
        (0..2000).map(|number| if number == 777 { line(number).to_uppercase() } else { line(number) }).collect();
    assert_eq!(changed.len(), text.len());
    fs::write(folder.path().join("book.txt"), &changed).unwrap();
    let said = fail(folder.path(), "train run.toml");
    says!(said, "data.text = book.txt has other contents than when run/checkpoints/step_00000004 was saved; restore");
    assert!(!said.contains("hashes"), "{said}");
}

/// The order of the samples is made before the first step: one that does not fit is refused before anything else.
#[test]
fn an_order_that_no_memory_holds_is_refused_by_a_dry_run() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("book.txt"), "some text\n".repeat(100)).unwrap();
    fs::write(folder.path().join("run.toml"), RUN).unwrap();
    let said = fail(folder.path(), "train run.toml --training.steps 1000000000000 --dry-run");
    let expected =
        "data.samples = 2000000000000 (by default all that training.steps = 1000000000000 take): their order takes";
    says!(said, expected, "nearest legal: data.samples = ");
}

#[test]
fn a_bpe_that_cannot_be_is_refused_with_one_that_can() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("book.txt"), "some text\n".repeat(100)).unwrap();
    let run = RUN.replace("\"byte\"", "\"bpe\"").replace("vocab-size = 257\n", "");
    fs::write(folder.path().join("run.toml"), run).unwrap();
    let said = fail(folder.path(), "train run.toml --data.bpe-size 1000000000 --dry-run");
    says!(said, "data.bpe-size = 1000000000 is too large; nearest legal: 1048576");
}
