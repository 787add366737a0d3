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
    // As BERT's: not a byte-level BPE, but it sees words only.
    let characters = ('a'..='z').chain('0'..='9').chain("\",.".chars()).flat_map(|c| [c.to_string(), format!("##{c}")]);
    let vocab: serde_json::Map<String, serde_json::Value> =
        ["[UNK]".to_string()].into_iter().chain(characters).enumerate().map(|(id, piece)| (piece, id.into())).collect();
    let words = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "post_processor": null,
        "decoder": null, "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": null, "lowercase": true}, "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": vocab},
    });
    fs::write(folder.path().join("words.json"), words.to_string()).unwrap();
    for tokenizer in
        ["--tokenizer byte --append-eod", "--tokenizer char", "--train-tokenizer 300", "--tokenizer words.json"]
    {
        let run =
            |input: &str| peak(folder.path(), &format!("--input {input} --output-prefix out --workers 2 {tokenizer}"));
        let (small, large) = (run("small.jsonl"), run("large.jsonl"));
        let times = (large.saturating_sub(small)) as f64 / SIZE as f64;
        println!("{tokenizer}: {} MiB, {} MiB for a short line: {times:.2} times", large >> 20, small >> 20);
        assert!(small > 1 << 20 && times <= 4.0, "{tokenizer}: {times:.2} times the line");
    }
}
