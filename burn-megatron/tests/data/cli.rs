//! `burn-megatron preprocess` and `inspect`, as a user types them.

use std::fs;
use std::process::Command;

use burn_megatron::data::indexed::IndexedDataset;

use crate::command::{fail, run, succeed};

#[test]
fn text_to_samples_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..40).map(|i| format!("Paragraph number {i}\nspeaks of {}.\n\n", i * i)).collect();
    fs::write(folder.path().join("book.txt"), &text).unwrap();
    let said = succeed(
        folder.path(),
        "preprocess --input book.txt --output-prefix out/a --train-tokenizer 300 --append-eod --workers 1",
    );
    says!(said, "out/a_text_document.bin: 40 documents");

    // One worker or three, this run or the next: the same bytes.
    succeed(
        folder.path(),
        "preprocess --input book.txt --output-prefix out/b --train-tokenizer 300 --append-eod --workers 3",
    );
    for end in ["_text_document.bin", "_text_document.idx", "_tokenizer.json"] {
        let read = |name: &str| fs::read(folder.path().join(format!("out/{name}{end}"))).unwrap();
        assert!(read("a") == read("b"), "{end} differs");
    }

    let said = succeed(
        folder.path(),
        "inspect --seq-length 16 --split 80,20 --samples 2 --tokenizer out/a_tokenizer.json --out samples.npy \
         --num-samples 50,3 out/a_text_document",
    );
    says!(said, "40 sequences and 40 documents (0 empty)", "train[1] \"", "speaks of");
    says!(said, "wrote samples.npy: int64 (2, 16)");
    assert_eq!(fs::metadata(folder.path().join("samples.npy")).unwrap().len(), 128 + 2 * 16 * 8);
    let said = succeed(
        folder.path(),
        "inspect --blend 0.25 out/a_text_document 0.75 out/b_text_document --seq-length 16 --num-samples 8,0,0",
    );
    says!(said, "25.00 % 2 of ", "75.00 % 6 of ");
    let said = fail(folder.path(), "inspect --blend 0.25 out/a_text_document 0.75");
    says!(said, "--blend '0.25 out/a_text_document 0.75': no prefix follows the weight '0.75'");
}

#[test]
fn a_tokenizer_that_is_none_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.txt"), "One").unwrap();
    let said = fail(folder.path(), "preprocess --input a.txt --output-prefix o --tokenizer chars");
    says!(said, "chars is no file; legal: a tokenizer's file, char, byte");
}

/// Some editors begin a file with a mark.
#[test]
fn a_byte_order_mark_is_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let written = |name: &str, text: &str, start: &str| {
        fs::write(folder.path().join(name), format!("{start}{text}")).unwrap();
        let command = format!("preprocess --input {name} --output-prefix o --tokenizer byte");
        succeed(folder.path(), &command);
        fs::read(folder.path().join("o_text_document.bin")).unwrap()
    };
    for (name, text) in [("a.txt", "One\n\nTwo\n"), ("a.jsonl", "{\"text\": \"One\"}\n"), ("a.json", "[\"One\"]")] {
        assert_eq!(written(name, text, "\u{feff}"), written(name, text, ""), "{name}");
    }
}

/// A flag that shows samples says so.
#[test]
fn samples_need_a_length() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.txt"), "One").unwrap();
    succeed(folder.path(), "preprocess --input a.txt --output-prefix o --tokenizer byte");
    for flag in ["--samples 1", "--out o.npy", "--tokenizer o_tokenizer.json"] {
        says!(fail(folder.path(), &format!("inspect o_text_document {flag}")), "samples need a --seq-length");
    }
}

/// Documents are rows, their sequences sentences, as Megatron-LM's `--split-sentences` has them.
#[test]
fn sentences_become_sequences_of_documents() {
    let folder = tempfile::tempdir().unwrap();
    let rows =
        [r#"{"text": "Mr. X came\nin. He left! "}"#, r#"{"text": ""}"#, r#"{"text": ["Given. Twice.", "", "Thrice"]}"#];
    fs::write(folder.path().join("x.jsonl"), rows.join("\n")).unwrap();
    let written = |flags: &str| {
        let command =
            format!("preprocess --input x.jsonl --output-prefix x --tokenizer byte --split-sentences {flags}");
        says!(succeed(folder.path(), &command), "x_text_sentence.bin: 3 documents, ", " sentences, ");
        let data = IndexedDataset::open(folder.path().join("x_text_sentence")).unwrap();
        let text = |index: usize| {
            String::from_utf8(data.sequence(index).unwrap().iter().map(|id| *id as u8).collect()).unwrap()
        };
        let documents: Vec<_> = (0..data.num_documents()).map(|document| data.document(document)).collect();
        ((0..data.num_sequences()).map(text).collect::<Vec<_>>(), documents)
    };
    for (flags, first) in [
        ("", ["Mr. X came\nin.", "He left!"]),
        ("unicode --keep-newlines", ["Mr. X came\nin. ", "He left! "]),
        ("lines", ["Mr. X came", "in. He left!"]),
    ] {
        let (sentences, documents) = written(flags);
        assert_eq!(sentences, [&first[..], &["Given. Twice.", "Thrice"]].concat(), "{flags}");
        assert_eq!(documents, [0..2, 2..2, 2..4], "{flags}");
    }
    // The last sentence of a document ends it.
    let ends = "preprocess --input x.jsonl --output-prefix y --tokenizer byte --split-sentences --append-eod";
    succeed(folder.path(), ends);
    let data = IndexedDataset::open(folder.path().join("y_text_sentence")).unwrap();
    let lasts: Vec<i64> = (0..4).map(|index| *data.sequence(index).unwrap().last().unwrap()).collect();
    assert_eq!(lasts, [i64::from(b'.'), 256, i64::from(b'.'), 256]);

    says!(
        fail(folder.path(), "preprocess --input x.jsonl --output-prefix z --tokenizer byte"),
        "x.jsonl:3: key 'text': an array of texts; --split-sentences takes them"
    );
    fs::write(folder.path().join("ids.jsonl"), "[1, 2]").unwrap();
    says!(
        fail(folder.path(), "preprocess --input ids.jsonl --output-prefix z --split-sentences"),
        "token ids have no sentences"
    );
    let refused = run(folder.path(), "preprocess --input x.jsonl --output-prefix z --keep-newlines");
    says!(String::from_utf8_lossy(&refused.stderr), "--split-sentences");
    says!(
        fail(folder.path(), "preprocess --input x.jsonl --output-prefix z --train-wordpiece 3 --split-sentences"),
        "nearest legal: 7"
    );
}

#[test]
fn keys_become_outputs_and_ids_stay_ids() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("x.jsonl"), "{\"q\": \"ab\", \"ids\": [7, 8, 9]}\n{\"ids\": [], \"q\": \"c\"}\n")
        .unwrap();
    let said = succeed(
        folder.path(),
        "preprocess --input x.jsonl --output-prefix x --json-keys q ids --tokenizer byte --append-eod",
    );
    says!(said, "x_q_document.bin: 2 documents, 5 tokens, 10 bytes of uint16");
    says!(said, "x_ids_document.bin: 2 documents, 4 tokens, 8 bytes of uint16");
    let bytes: Vec<u8> = [97u16, 98, 256, 99, 256].into_iter().flat_map(u16::to_le_bytes).collect();
    assert_eq!(fs::read(folder.path().join("x_q_document.bin")).unwrap(), bytes);
    let said = succeed(folder.path(), "inspect x_ids_document");
    says!(said, "4 tokens of uint16 in 1 sequences and 2 documents (1 empty)");
}

#[test]
fn endings_of_names_mean_the_same_in_capitals() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["x.jsonl", "x.JSONL", "x.jsonlines", "x.NDJSON", "x.Json"] {
        fs::write(folder.path().join(name), "{\"text\": \"abc\"}\n{\"text\": \"def\"}\n").unwrap();
        let said = succeed(folder.path(), &format!("preprocess --input {name} --output-prefix y --tokenizer byte"));
        says!(said, "2 documents, 6 tokens");
    }
    fs::write(folder.path().join("ids.jsonl"), "{\"text\": [1, 2, 3]}\n").unwrap();
    let ids = "preprocess --input ids.jsonl --output-prefix z --vocab-size 5 --append-eod --eod-id";
    says!(fail(folder.path(), &format!("{ids} 9")), "token 9: the vocabulary has 5 tokens; nearest legal: 4");
    succeed(folder.path(), &format!("{ids} 4"));
}

#[test]
fn a_bad_line_is_named_or_counted() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("bad.jsonl"), "{\"text\": \"a\"}\n{\"text\": \n{\"txt\": \"b\"}\n").unwrap();
    let command = "preprocess --input bad.jsonl --output-prefix bad --tokenizer byte";
    assert_eq!(fail(folder.path(), command), "error: bad.jsonl:2: not JSON: EOF while parsing a value at column 8\n");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a failed run leaves nothing");
    let said = succeed(folder.path(), &format!("{command} --skip-bad-lines"));
    says!(said, "bad_text_document.bin: 1 documents");
    says!(said, "left out 2 documents that cannot be read; the first: bad.jsonl:2: not JSON");
    // A forgotten tokenizer is no bad line.
    let said = fail(folder.path(), "preprocess --input bad.jsonl --output-prefix c --skip-bad-lines");
    says!(said, "no tokenizer is chosen");
}

/// Each that ends well has written its own text, or the other one did so after it.
#[test]
fn two_programs_that_prepare_the_same_prefix_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    for (name, count) in [("a", 60_000), ("b", 50_000)] {
        fs::write(folder.path().join(format!("{name}.txt")), format!("{name}{name}{name}\n").repeat(count)).unwrap();
    }
    let start = |name: &str| {
        let arguments =
            format!("preprocess --input {name}.txt --output-prefix o --tokenizer byte --text-documents line");
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        command
            .current_dir(folder.path())
            .args(arguments.split(' '))
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    for _ in 0..5 {
        let outputs = [start("a"), start("b")].map(|child| child.wait_with_output().unwrap());
        assert!(outputs.iter().any(|output| output.status.success()));
        for output in outputs.iter().filter(|output| !output.status.success()) {
            says!(String::from_utf8_lossy(&output.stderr), "is writing it; wait for its end, or choose another output");
        }
        let bytes = fs::read(folder.path().join("o_text_document.bin")).unwrap();
        let (letter, count) = if bytes[0] == b'a' { (b'a', 60_000) } else { (b'b', 50_000) };
        assert_eq!(bytes.len(), count * 4 * 2);
        assert!(bytes.chunks(8).all(|line| line == [letter, 0, letter, 0, letter, 0, b'\n', 0]));
        succeed(folder.path(), "inspect o_text_document");
        says!(fail(folder.path(), "inspect o_text_documnet"), "o_text_documnet.idx", "did you mean o_text_document?");
    }
}

#[test]
fn options_that_cannot_work_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("one.txt"), "one document\n").unwrap();
    fs::create_dir(folder.path().join("folder.idx")).unwrap();
    for (arguments, words) in [
        ("--train-tokenizer 9223372036854775807", "of 9223372036854775807 entries; at least 257"),
        ("--train-tokenizer 1000000000", "nearest legal: 1048576"),
        ("--tokenizer byte --workers 9223372036854775807", "at most 1024 threads"),
        ("--tokenizer byte --json-keys text text", "the JSON key 'text' is given twice"),
    ] {
        says!(fail(folder.path(), &format!("preprocess --input one.txt --output-prefix o {arguments}")), words);
    }
    let said = fail(folder.path(), "preprocess --input . --output-prefix o --tokenizer byte");
    says!(said, ". is a folder; name its .txt, .jsonl or .parquet files");
    says!(fail(folder.path(), "inspect folder"), "folder.idx: is a folder; a file is needed");
    fs::create_dir(folder.path().join("llama")).unwrap();
    fs::write(folder.path().join("llama/config.json"), "{}").unwrap();
    says!(
        fail(folder.path(), "inspect llama"),
        "llama is a Hugging Face folder",
        "burn-megatron plan RUN.toml --model.hf llama"
    );
    says!(fail(folder.path(), "inspect lama"), "did you mean llama?");
    let output = run(folder.path(), "inspect o --seq-length 4 --seed -1");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("invalid value '-1' for '--seed <N>'") && !said.contains("-- -1"), "{said}");
}

#[test]
fn files_without_a_document_leave_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("one.txt"), "one document\n").unwrap();
    fs::write(folder.path().join("empty.txt"), "").unwrap();
    let prepare = |input: &str| format!("preprocess --input {input} --output-prefix one --tokenizer byte");
    succeed(folder.path(), &prepare("one.txt"));
    says!(fail(folder.path(), &prepare("empty.txt")), "there is no document in empty.txt");
    says!(succeed(folder.path(), "inspect one_text_document"), "1 documents");
    let said = fail(folder.path(), "preprocess --input one.txt --output-prefix two --tokenizer .");
    says!(said, "tokenizer: . is a folder; name its tokenizer.json");
}

#[test]
fn refusals_say_what_to_change() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("one.txt"), "one document\n").unwrap();
    let prepare = "preprocess --input one.txt --output-prefix one --tokenizer char";
    succeed(folder.path(), prepare);
    assert_eq!(
        fail(folder.path(), "inspect one_text_document --seq-length 4 --split 90,10 --num-samples 3,3"),
        "error: one_text_document.bin: 3 samples are wanted of no tokens for valid; \
         its share by split 90,10,0 of 1 sequences\n"
    );
    assert!(
        fail(folder.path(), "preprocess --input none.txt --output-prefix x")
            .starts_with("error: cannot read none.txt: No such")
    );
    let idx = folder.path().join("one_text_document.idx");
    let bytes = fs::read(&idx).unwrap();
    fs::write(&idx, &bytes[..40]).unwrap();
    let said = fail(folder.path(), "inspect one_text_document");
    says!(said, "one_text_document.idx: byte 40: the file ends inside the sequence pointers");
}
