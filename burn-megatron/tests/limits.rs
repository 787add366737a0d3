//! Sizes beyond all bounds end a command with a message, within a limited address space: no panic, no abort.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Runs the command with 4 GB of address space.
fn limited(folder: &Path, arguments: &str) -> Output {
    let script = format!("ulimit -v 4000000; exec \"$0\" {arguments}");
    let mut shell = Command::new("sh");
    shell.args(["-c", script.as_str(), env!("CARGO_BIN_EXE_burn-megatron")]).current_dir(folder);
    shell.env("RAYON_NUM_THREADS", "2").output().unwrap()
}

fn check(arguments: &str, exit: &[i32], words: &str) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text.txt"), "some words\n\n".repeat(200)).unwrap();
    std::fs::write(folder.path().join("run.toml"), "[data]\ntext = [\"text.txt\"]\n[training]\nseq-length = 16\n")
        .unwrap();
    let start = Instant::now();
    let output = limited(folder.path(), arguments);
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.code().is_some_and(|code| exit.contains(&code)), "{arguments}: {:?}\n{text}", output.status);
    assert!(text.contains(words) && !text.contains("panicked"), "{arguments}: `{words}` is missing in\n{text}");
    assert!(start.elapsed() < Duration::from_secs(30), "{arguments} took {:?}", start.elapsed());
}

#[test]
fn sizes_of_models_are_limited() {
    let limited: [(&str, &[&str]); 4] = [
        ("mixtral-tiny", &["num-experts", "num-hidden-layers", "num-experts-per-tok"]),
        ("deepseek-tiny", &["n-routed-experts", "num-attention-heads", "qk-rope-head-dim", "num-nextn-predict-layers"]),
        ("gpt-tiny", &["num-attention-heads", "num-hidden-layers"]),
        ("tiny", &["make-vocab-size-divisible-by", "head-dim"]),
    ];
    let commands = ["plan run.toml", "train run.toml --dry-run", "bench run.toml --dry-run"];
    for (preset, sizes) in limited {
        for size in sizes {
            for value in ["4294967296", "18446744073709551615"] {
                let key = format!("--model.preset {preset} --model.{size} {value}");
                commands.iter().for_each(|command| check(&format!("{command} {key}"), &[1, 2], "error: "));
            }
        }
    }
    // Large, but legal.
    for key in
        ["--model.preset tiny --model.hidden-size 4294967296", "--model.preset tiny --training.seq-length 4294967296"]
    {
        commands.iter().for_each(|command| check(&format!("{command} {key}"), &[0, 1, 2], ""));
    }
    check("plan run.toml --model.preset gpt-tiny --model.num-attention-heads 0", &[1], "num_attention_heads");
}

#[test]
fn numbers_on_the_command_line_are_limited() {
    // The largest number of a flag, and of a key.
    let (huge, large) = ("18446744073709551615", "9223372036854775807");
    for (arguments, words) in [
        (format!("plan run.toml --gpus {huge}"), "nearest legal: 1048576"),
        ("plan run.toml --gpus 1048576".into(), "no layout of 1048576 GPUs"),
        (format!("plan run.toml --gpus-per-host {huge} --documents {huge}"), "fits"),
        ("plan run.toml --memory inf".into(), "--memory inf is not a number above 0"),
        (format!("plan --micro-batches {huge}"), "nearest legal"),
        (format!("plan --micro-batches 4 --layers {huge}"), "nearest legal"),
        (format!("plan --micro-batches 4 --pipeline-parallel {huge} --virtual-pipeline {huge}"), "nearest legal"),
        ("plan run.toml --gpus -1".into(), "not negative"),
        (format!("bench tiny --dry-run --device cpu --steps {huge}"), "nearest legal: 1048576"),
        (format!("bench tiny --dry-run --device cpu --runs {huge} --warmup {huge}"), "nearest legal: 1048576"),
        (format!("bench tiny --dry-run --device cpu --gpus {huge}"), "nearest legal: 1048576"),
        (
            format!("bench tiny --dry-run --device cpu --data-parallel {large} --tensor-parallel {large}"),
            "nearest legal",
        ),
        (format!("train run.toml --dry-run --data.bpe-size {large}"), "nearest legal: 1048576"),
        (format!("train run.toml --dry-run --training.steps {large}"), "nearest legal"),
        ("train run.toml --dry-run --training.steps 1000000000".into(), "data.samples = 8000000000"),
        ("train run.toml --dry-run --train-samples 12".into(), "nearest legal: 8 or 16"),
        (
            "train run.toml --dry-run --training.seed -1".into(),
            "training.seed = -1 is not a whole number of at least 0",
        ),
    ] {
        check(&arguments, &[0, 1, 2], words);
    }
}

/// Checkpoints of many ranks have more files than most systems let a process open before it asks.
#[test]
fn files_of_weights_may_be_more_than_a_process_may_open_at_first() {
    let folder = tempfile::tempdir().unwrap();
    let hf = format!("{}/../tests/golden/hf/deepseek_v3", env!("CARGO_MANIFEST_DIR"));
    let run = |limit: &str, arguments: &str| {
        let script = format!("{limit}; exec \"$0\" {arguments}");
        let mut shell = Command::new("sh");
        shell.args(["-c", script.as_str(), env!("CARGO_BIN_EXE_burn-megatron")]).current_dir(folder.path());
        let output = shell.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    for arguments in
        [&format!("import --hf {hf} --output first"), "export --checkpoint first --dcp dcp --max-shard-size 100"]
    {
        assert!(run("true", arguments).0, "{arguments}");
    }
    assert!(std::fs::read_dir(folder.path().join("dcp")).unwrap().count() > 100);
    let import = |output: &str| format!("import --hf {hf} --weights dcp --output {output}");
    let (is_read, said) = run("ulimit -Sn 32", &import("second"));
    assert!(is_read, "{said}");
    // The system's own limit is one.
    let (is_read, said) = run("ulimit -n 32", &import("third"));
    assert!(!is_read && said.contains("too many files are open: raise the limit (`ulimit -n`)"), "{said}");
}

#[test]
fn a_model_that_does_not_fit_into_memory_is_refused_before_it_is_built() {
    let large = "--device cpu --model.preset llama3-1b --data.tokenizer byte --model.vocab-size 257";
    for command in ["train run.toml", "bench run.toml --steps 1 --warmup 1 --runs 1"] {
        check(&format!("{command} {large}"), &[1], "on CPU ranks need");
    }
    check("train run.toml --dry-run --device cpu --model.preset llama3-1b", &[1], "--device cuda");
    let adapters = "--data.tokenizer byte --model.preset llama3-8b --lora.rank 8 --training.dtype bf16";
    check(&format!("train run.toml --dry-run --device cpu {adapters}"), &[1], "on CPU ranks need");
}
