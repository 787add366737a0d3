//! Ids are those of sentencepiece and tiktoken themselves; see `tests/golden/README.md` of the workspace.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use super::*;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tokenizers").join(name)
}

/// Every text has the same ids, and those without unknown pieces the same text again.
fn assert_same(file: &str, name: &str) {
    let tokenizer = read_tokenizer(&golden(file)).unwrap();
    let expected: Value = serde_json::from_slice(&fs::read(golden("ids.json")).unwrap()).unwrap();
    assert_eq!(tokenizer.get_vocab_size(true) as u64, expected[name]["size"]);
    let unknown = tokenizer.token_to_id("<unk>");
    let (mut wrong, mut decoded) = (Vec::new(), 0);
    for case in expected[name]["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let found = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
        if found != ids {
            wrong.push(format!("{text:?}: {found:?}, not {ids:?}"));
        } else if !ids.iter().any(|id| Some(*id) == unknown) {
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), case["decoded"].as_str().unwrap(), "{name}: {text:?}");
            decoded += 1;
        }
    }
    assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
    assert!(decoded > 10, "{name}: {decoded}");
}

#[test]
fn bpe_with_bytes_is_sentencepieces() {
    assert_same("llama2.model", "llama2");
}

#[test]
fn unigram_with_nfkc_is_sentencepieces() {
    assert_same("t5.model", "t5");
}

#[test]
fn unigram_with_bytes_and_symbols_is_sentencepieces() {
    assert_same("gemma.model", "gemma");
}

#[test]
fn ranks_are_tiktokens() {
    assert_same("letters.tiktoken", "tiktoken");
}

/// Control symbols are special tokens, and what is written as a `tokenizer.json` reads a text alike.
#[test]
fn written_again_it_is_a_tokenizer_json() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["llama2.model", "t5.model", "gemma.model", "letters.tiktoken"] {
        let json = folder.path().join("tokenizer.json");
        fs::write(&json, tokenizer_json(&golden(file)).unwrap()).unwrap();
        assert_eq!(find_tokenizer(folder.path()), Some(json.clone()));
        assert_eq!(tokenizer_json(&json).unwrap(), fs::read(&json).unwrap());
        let [ours, again] = [golden(file), json].map(|path| read_tokenizer(&path).unwrap());
        let ids = |tokenizer: &Tokenizer| tokenizer.encode("Hello  World 42", false).unwrap().get_ids().to_vec();
        assert_eq!(ids(&ours), ids(&again), "{file}");
    }
    let llama = read_tokenizer(&golden("llama2.model")).unwrap();
    assert_eq!(llama.encode("</s>", false).unwrap().get_ids(), [2]);
}

/// A message with a field of bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, bytes.len() as u8], bytes].concat()
}

#[test]
fn other_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.model");
    let said = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        read_tokenizer(&path).unwrap_err().to_string()
    };
    let piece = |text: &str, kind: u8| field(1, &[field(1, text.as_bytes()), vec![0x18, kind]].concat());
    let unknown = piece("<unk>", 2);
    let words = [unknown.clone(), field(2, &[0x18, 3])].concat();
    let symbols = [unknown, piece("<a>", 4)].concat();
    let ranks = fs::read(golden("letters.tiktoken")).unwrap();
    for (bytes, texts) in [
        (&b""[..], ["the file is empty", "a SentencePiece model (unigram or BPE) and tiktoken ranks are read"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["pointer of Git LFS", "fetch the file"]),
        (b"#version: 0.2\na b\n", ["merges.txt", "without its vocabulary"]),
        (b"<!DOCTYPE html>", ["a page of a web site", "are read"]),
        (b"hello", ["this is no tokenizer", "a tokenizer.json"]),
        (b"\x0a\xff\x01", ["no SentencePiece model", "damaged"]),
        (&words, ["is one of words, and unigram and BPE are read", "tokenizer.json"]),
        (&symbols, ["user-defined symbols and a dummy prefix", "tokenizer.json"]),
        (&piece("a", 1), ["has no unknown piece", "SentencePiece"]),
        (&[&ranks[..], b"YQ== x\n"].concat(), ["line 481 is not a token in base64 and its rank", ""]),
        (&[&ranks[..], b"YQ== 7\n"].concat(), ["line 481 has a token that has a rank already", ""]),
    ] {
        let said = said(bytes);
        assert!(texts.iter().all(|text| said.contains(text)), "{said}");
    }
    let model = fs::read(golden("llama2.model")).unwrap();
    for end in (1..model.len()).step_by(97) {
        fs::write(&path, &model[..end]).unwrap();
        let _ = read_tokenizer(&path);
    }
}
