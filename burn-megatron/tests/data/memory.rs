//! How much memory a large document takes, of the whole program.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Bytes of the document.
const SIZE: usize = 50 << 20;

/// The largest resident set of a run of `preprocess` in `folder`.
fn peak(folder: &Path, arguments: &str) -> u64 {
    let mut child = Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .current_dir(folder)
        .arg("preprocess")
        .args(arguments.split_whitespace())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (status, mut peak) = (format!("/proc/{}/status", child.id()), 0);
    loop {
        // It never falls while the process runs, and its last values are those of renaming two files.
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        peak = peak.max(kib.unwrap_or(0) * 1024);
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{arguments}");
            return peak;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_line_of_50_megabytes_takes_at_most_four_times_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let sentence = "The quick brown fox, naïve as ever, jumps \\\"over\\\" 13 lazy dogs.\\n";
    let line = format!("{{\"text\": \"{}\"}}\n", sentence.repeat(SIZE / sentence.len()));
    fs::write(folder.path().join("large.jsonl"), line).unwrap();
    fs::write(folder.path().join("small.jsonl"), "{\"text\": \"The quick brown fox\"}\n").unwrap();
    for tokenizer in ["--tokenizer byte --append-eod", "--tokenizer char", "--train-tokenizer 300"] {
        let run =
            |input: &str| peak(folder.path(), &format!("--input {input} --output-prefix out --workers 2 {tokenizer}"));
        let (small, large) = (run("small.jsonl"), run("large.jsonl"));
        let times = (large.saturating_sub(small)) as f64 / SIZE as f64;
        println!("{tokenizer}: {} MiB, {} MiB for a short line: {times:.2} times", large >> 20, small >> 20);
        assert!(small > 1 << 20 && times <= 4.0, "{tokenizer}: {times:.2} times the line");
    }
}
