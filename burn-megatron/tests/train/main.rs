//! `burn-megatron train`, as a user types it: of language models, and of plain Burn modules.

#[path = "../support/command.rs"]
mod command;
mod images;
mod runs;
#[macro_use]
#[path = "../support/says.rs"]
mod says;
mod sentences;

use std::fs;
use std::path::{Path, PathBuf};

use command::{run, succeed, text};

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/configs")
}

/// A folder with a file of `characters` different characters.
fn book(characters: u32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let alphabet: String = (0..characters - 1).filter_map(|i| char::from_u32(0x4e00 + i)).collect();
    fs::write(folder.path().join("book.txt"), format!("{alphabet}\n\n").repeat(40)).unwrap();
    folder
}

#[test]
fn a_sample_configuration_trains_and_leaves_its_logs() {
    let folder = book(65);
    let file = samples().join("shakespeare.toml");
    let arguments = format!(
        "train {} --data.text book.txt --training.steps 2 --lr.warmup 1 --evaluation.batches 1 --tensor-parallel 2",
        file.display()
    );
    says!(succeed(folder.path(), &format!("{arguments} --dry-run")), "TP2 on 2 ranks", "2 steps, 1,536 tokens");
    assert!(!folder.path().join("runs").exists(), "a dry run writes nothing");

    says!(succeed(folder.path(), &arguments), "step 2/2", "held-out loss");
    assert!(folder.path().join("runs/shakespeare/steps.jsonl").exists());

    succeed(folder.path(), "export --checkpoint runs/shakespeare/checkpoints --hf exported");
    succeed(folder.path(), &format!("{arguments} --model.bias false --output.directory unbiased"));
    let refused = run(folder.path(), "export --checkpoint unbiased/checkpoints --hf unbiased/exported");
    says!(text(&refused.stderr), "error: model.bias = false: Hugging Face's GPT-2 always has biases");
    assert!(text(&refused.stderr).starts_with("error: model.bias"), "no file is to blame");

    let printed = succeed(folder.path(), &format!("{arguments} --print-config"));
    fs::write(folder.path().join("printed.toml"), &printed).unwrap();
    assert_eq!(succeed(folder.path(), "train printed.toml --print-config"), printed);
}

/// Without its folder the sample would train a small random model.
#[test]
fn continued_pre_training_needs_the_folder_of_a_model() {
    let folder = book(65);
    let file = samples().join("finetune.toml");
    let output = run(folder.path(), &format!("train {} --data.text book.txt", file.display()));
    says!(text(&output.stderr), "model.hf: Llama-3.2-1B: there is no such folder; check the path");
    let output = run(folder.path(), &format!("train {} --model.hf meta-llama/Llama-3.2-1B", file.display()));
    says!(text(&output.stderr), "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`");
}

#[test]
fn a_moe_trains_with_its_experts_divided() {
    let folder = book(65);
    let file = samples().join("moe.toml");
    let arguments = "--data.text book.txt --training.steps 2 --lr.warmup 1 --evaluation.batches 1";
    let arguments = format!("train {} {arguments}", file.display());
    let said = succeed(folder.path(), &format!("{arguments} --dry-run"));
    assert!(said.contains("EP2 DP2 on 2 ranks") && !said.contains("hint"), "{said}");
    says!(succeed(folder.path(), &arguments), "step 2/2", "held-out loss");
    let output = run(folder.path(), &format!("{arguments} --parallel.expert-parallel 3"));
    says!(text(&output.stderr), "expert-parallel 3", "nearest legal: 2");
}

#[test]
fn logs_go_where_the_configuration_says_and_memory_is_a_rank_s() {
    let folder = book(65);
    let arguments = format!(
        "train {} --data.text book.txt --training.steps 4 --lr.warmup 1 --evaluation.batches 1 --tensor-parallel 2 \
         --log.jsonl numbers.jsonl --log.tensorboard board --trace trace.json",
        samples().join("shakespeare.toml").display()
    );
    says!(succeed(folder.path(), &arguments), "timeline of a few steps in trace.json", "| teraflops ");
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let steps: Vec<serde_json::Value> =
        read("numbers.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<_> = steps.iter().filter(|line| line["kind"] == "train").collect();
    assert_eq!(steps.len(), 4);
    for step in steps {
        let number = |key: &str| step[key].as_f64().unwrap_or_else(|| panic!("{key} in {step}"));
        assert!(number("teraflops_per_rank_full_attention") > number("teraflops_per_rank"));
        // The allocator counts: weights, gradients and moments of a small model, not the resident set of the process.
        assert!((1e6..5e7).contains(&number("memory")), "{step}");
    }
    assert_eq!(fs::read_dir(folder.path().join("board")).unwrap().count(), 1);
    let trace: serde_json::Value = serde_json::from_str(&read("trace.json")).unwrap();
    let ranks = |name: &str| {
        let spans = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == name);
        spans.map(|span| (span["tid"].as_u64().unwrap(), span["args"]["step"].as_u64().unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(ranks("update"), [(0, 3), (0, 4), (1, 3), (1, 4)]);
}

/// What a run is told before it starts about tokens that `preprocess` has written, as in the guide.
#[test]
fn prepared_tokens_are_trained_with_their_tokenizer() {
    let folder = book(65);
    let prepare = "preprocess --input book.txt --output-prefix data/train --train-tokenizer 300 --append-eod";
    succeed(folder.path(), prepare);
    succeed(folder.path(), "inspect data/train_text_document");
    let flags =
        "train --training.seq-length 16 --model.vocab-size 400 --data.prefixes data/train_text_document --dry-run";
    let short = run(folder.path(), &format!("{flags} --data.split 99,1"));
    says!(text(&short.stderr), "leaves valid none of the 40 sequences", "nearest legal: 98,2");
    let without = succeed(folder.path(), flags);
    says!(without, "hint         checkpoints are without a tokenizer; name it in data.tokenizer");
    let unsaved = succeed(folder.path(), &format!("{flags} --checkpoint.directory none"));
    let with = succeed(folder.path(), &format!("{flags} --data.tokenizer data/train_tokenizer.json"));
    assert!(!unsaved.contains("hint") && !with.contains("hint"), "{unsaved}{with}");
}

#[test]
fn a_dry_run_finds_tokens_that_the_model_lacks() {
    let folder = book(93);
    let refused =
        run(folder.path(), &format!("train {} --data.text book.txt --dry-run", samples().join("moe.toml").display()));
    assert_eq!(refused.status.code(), Some(1));
    says!(text(&refused.stderr), "data.tokenizer = char has 94 tokens, but model.vocab-size = 66; nearest legal: 94");
    // The mark with which some editors begin a file is no character of it.
    let folder = book(65);
    let book = folder.path().join("book.txt");
    fs::write(&book, format!("\u{feff}{}", fs::read_to_string(&book).unwrap())).unwrap();
    succeed(folder.path(), &format!("train {} --data.text book.txt --dry-run", samples().join("moe.toml").display()));
}

/// As every other error.
#[test]
fn a_training_that_fails_is_an_error() {
    let folder = book(65);
    let file = samples().join("shakespeare.toml");
    let flags = "--data.text book.txt --training.steps 4 --lr.warmup 1 --evaluation.batches 1 --inject nan@3";
    let failed = run(folder.path(), &format!("train {} {flags}", file.display()));
    assert_eq!(failed.status.code(), Some(1));
    let said = text(&failed.stderr);
    assert!(said.starts_with("error: training failed: ") && said.contains("step 3"), "{said}");
    assert!(said.lines().skip(1).all(|line| line.starts_with("  ")), "{said}");
}

#[test]
fn all_that_is_wrong_is_said_at_once() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.toml"), "[training]\nstep = 5\nseed = -1\n").unwrap();
    let output = run(folder.path(), "train run.toml --lr.max high");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stderr),
        "error: 3 problems\n  run.toml:2: unknown key `training.step`; did you mean `training.steps`?\n  \
         run.toml:3: training.seed = -1 is not a whole number of at least 0\n  \
         command line: lr.max = high is not a finite number\n"
    );
    let output = run(folder.path(), "train --training.step 5");
    assert!(text(&output.stderr).contains("'--training.steps'"), "{}", text(&output.stderr));
    let output = run(folder.path(), "train");
    assert!(text(&output.stderr).contains("data.prefixes or data.text is needed"), "{}", text(&output.stderr));
}
