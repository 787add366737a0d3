//! Parquet files as pyarrow writes them: the rows of JSON lines with the same data, wherever these are read.

use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::data::TokenDataset;
use burn_megatron::data::chat::{ChatDataset, ChatLoss, ChatSet, ChatTokenizer, Row, TooLong, rows};
use burn_megatron::eval::{read_documents, read_task};
use serde_json::Value;

use super::{fail, succeed};

fn file(name: &str) -> PathBuf {
    super::golden("parquet").join(name)
}

fn read(name: &str) -> Vec<Row> {
    rows(&file(name)).unwrap().map(Result::unwrap).collect()
}

/// Zstandard, snappy in several pages with dictionaries, gzip in pages of version 2, plain pages, Brotli, LZ4, encodings of
/// differences in both versions of pages; lists in lists, structs in lists in structs, nulls at every level.
#[test]
fn rows_are_those_of_json_lines() {
    for (name, count) in [
        ("messages", 24),
        ("completions", 300),
        ("turns", 40),
        ("alpaca", 30),
        ("sharegpt", 20),
        ("texts", 50),
        ("questions", 12),
        ("brotli", 60),
        ("lz4", 60),
        ("delta1", 300),
        ("delta2", 300),
    ] {
        let [table, lines] = ["parquet", "jsonl"].map(|ending| read(&format!("{name}.{ending}")));
        assert_eq!((table.len(), lines.len()), (count, count), "{name}");
        for (row, line) in table.iter().zip(&lines) {
            assert_eq!(row.json().unwrap(), line.json().unwrap(), "{name}:{}", row.line);
            assert_eq!(row.line, line.line);
        }
    }
}

#[test]
fn conversations_have_the_texts_ids_and_masks_of_transformers() {
    let templates = fs::read_to_string(super::golden("chat").join("templates.json")).unwrap();
    let templates: Value = serde_json::from_str(&templates).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.jinja");
    let mut compared = 0;
    for (row, line) in read("messages.parquet").iter().zip(read("messages.jsonl")) {
        let json = row.json().unwrap();
        fs::write(&path, templates[json["template"].as_str().unwrap()].as_str().unwrap()).unwrap();
        let tokenizer = ChatTokenizer::open(&super::golden("chat").join("tokenizer"), Some(&path)).unwrap();
        let sample = tokenizer.encode(&row.conversation().unwrap()).unwrap();
        assert_eq!(sample.text, tokenizer.encode(&line.conversation().unwrap()).unwrap().text);
        if let Some(text) = json["text"].as_str() {
            let mask: Vec<u8> = sample.mask.iter().map(|counts| u8::from(*counts)).collect();
            assert_eq!(sample.text, text);
            assert_eq!(
                serde_json::json!([sample.ids, mask]),
                serde_json::json!([json["input_ids"], json["assistant_masks"]])
            );
            compared += 1;
        }
    }
    assert_eq!(compared, 22);
}

/// The chat tokenizer with the template `chatml`.
fn tokenizer(folder: &Path) -> PathBuf {
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(super::golden("chat").join("tokenizer").join(file), folder.join(file)).ok();
    }
    let templates = fs::read_to_string(super::golden("chat").join("templates.json")).unwrap();
    let templates: Value = serde_json::from_str(&templates).unwrap();
    fs::write(folder.join("chat_template.jinja"), templates["chatml"].as_str().unwrap()).unwrap();
    folder.to_path_buf()
}

#[test]
fn training_tasks_and_texts_are_those_of_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(folder.path());
    let sequences = |ending: &str| {
        let names = ["completions", "alpaca", "sharegpt"];
        let set = ChatSet {
            files: names.map(|name| file(&format!("{name}.{ending}"))).into(),
            loss: ChatLoss::Assistant,
            packing: true,
            too_long: TooLong::Refuse,
            skip_bad_rows: false,
        };
        let chat = ChatTokenizer::open(&tokenizer, None).unwrap();
        let (data, report) = ChatDataset::open(&chat, &set, 256).unwrap();
        assert_eq!(report.samples, 350);
        (0..data.len()).map(|index| data.sample(index)).collect::<Vec<_>>()
    };
    assert_eq!(sequences("parquet"), sequences("jsonl"));

    let questions = ["parquet", "jsonl"].map(|ending| read_task(&file(&format!("questions.{ending}")), 9).unwrap());
    assert_eq!((questions[0].questions.len(), &questions[0].questions), (9, &questions[1].questions));
    let texts = ["parquet", "jsonl"].map(|ending| read_documents(&file(&format!("texts.{ending}")), 50).unwrap());
    assert_eq!(texts[0].questions, texts[1].questions);

    let outputs = ["parquet", "jsonl"].map(|ending| {
        let input = file(&format!("texts.{ending}"));
        let keys = "--json-keys text ids";
        succeed(
            folder.path(),
            &format!("preprocess --input {} --output-prefix {ending} --train-tokenizer 300 {keys}", input.display()),
        );
        ["text", "ids"].map(|key| fs::read(folder.path().join(format!("{ending}_{key}_document.bin"))).unwrap())
    });
    assert!(outputs[0] == outputs[1] && outputs[0].iter().all(|bytes| bytes.len() > 100));
}

#[test]
fn bad_rows_and_damaged_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(folder.path()).display().to_string();
    let command = |input: &Path, more: &str| {
        format!("preprocess --chat --input {} --tokenizer {tokenizer} --output out.jsonl {more}", input.display())
    };
    let said = fail(folder.path(), &command(&file("bad.parquet"), ""));
    says!(said, "bad.parquet:2: column instruction: not UTF-8 at byte 0 (--skip-bad-rows");
    says!(succeed(folder.path(), &command(&file("bad.parquet"), "--skip-bad-rows")), "2 samples", "left out 1 rows");
    let said = fail(folder.path(), &command(&file("texts.parquet"), ""));
    says!(said, "texts.parquet:1: no key of a conversation among id, text, ids");
    let [first, ..] = &read("bad.parquet")[..] else { panic!("it has rows") };
    assert_eq!(
        first.json().unwrap(),
        serde_json::json!({"instruction": "a", "output": "x"}),
        "what JSON has not is left out"
    );

    let whole = fs::read(file("completions.parquet")).unwrap();
    let at = folder.path().join("cut.parquet");
    for (bytes, words) in [
        (&whole[..whole.len() - 9], "cut.parquet: "),
        (&whole[..3], "cut.parquet: "),
        (&b"{\"prompt\": \"a\", \"completion\": \"b\"}\n"[..], "cut.parquet: Invalid Parquet file"),
    ] {
        fs::write(&at, bytes).unwrap();
        let said = fail(folder.path(), &command(&at, "--skip-bad-rows"));
        assert!(said.contains(words) && !said.contains("panicked"), "{said}");
    }
    // The footer without the pages in front of it.
    fs::write(&at, [&whole[..4], &whole[whole.len() - 3000..]].concat()).unwrap();
    says!(fail(folder.path(), &command(&at, "--skip-bad-rows")), "cut.parquet: column ", "not inside the file");
    says!(fail(folder.path(), &command(&folder.path().join("none.parquet"), "")), "none.parquet: No such file");
}
