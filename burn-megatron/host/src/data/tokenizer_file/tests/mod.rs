//! Ids are those of sentencepiece and tiktoken themselves; see `tests/golden/README.md` of the workspace.

mod added;

use std::fs;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use super::*;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizers").join(name)
}

/// A golden file without those next to it, but for the list of tokens that belongs to tiktoken's ranks.
fn read(file: &str) -> Tokenizer {
    let config = fs::read_to_string(golden("tokenizer_config.json")).unwrap();
    read_as(file, &fs::read(golden(file)).unwrap(), if file.ends_with(".tiktoken") { &config } else { "" }).unwrap()
}

/// Every text has the same ids, and those without unknown pieces the same text again.
fn assert_same(file: &str, name: &str) {
    let tokenizer = read(file);
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
        let [json, model] = ["tokenizer.json", file].map(|name| folder.path().join(name));
        fs::copy(golden(file), &model).unwrap();
        let config = folder.path().join("tokenizer_config.json");
        match file.ends_with(".tiktoken") {
            true => drop(fs::copy(golden("tokenizer_config.json"), config).unwrap()),
            false => assert!(!config.exists()),
        }
        fs::write(&json, tokenizer_json(&model).unwrap()).unwrap();
        assert_eq!(find_tokenizer(folder.path()), Some(json.clone()));
        assert_eq!(tokenizer_json(&json).unwrap(), fs::read(&json).unwrap());
        let [ours, again] = [model, json].map(|path| read_tokenizer(&path).unwrap());
        let ids = |tokenizer: &Tokenizer| around(tokenizer, "Hello  World 42");
        assert_eq!(ids(&ours), ids(&again), "{file}");
    }
    let llama = read("llama2.model");
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
    let symbols = [unknown.clone(), piece("<a>", 4)].concat();
    let unused = [unknown.clone(), piece("ab", 5), field(2, &[0x18, 2])].concat();
    let unused_character = [unknown.clone(), piece("a", 5)].concat();
    let charsmap = [unknown, field(3, &field(2, &[4, 0, 0, 0, 0]))].concat();
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
        (&unused, ["is a BPE with unused pieces", "tokenizer.json"]),
        (&unused_character, ["has an unused piece of one character", "tokenizer.json"]),
        (&charsmap, ["no SentencePiece model", "damaged"]),
        (&piece("a", 1), ["has no unknown piece", "SentencePiece"]),
        (&[&ranks[..], b"YQ== x\n"].concat(), ["line 481 is not a token in base64 and its rank", ""]),
        (&[&ranks[..], b"YQ== 7\n"].concat(), ["line 481 has a token that has a rank already", ""]),
        (&[&ranks[..], b"YXp6eg== 7\n"].concat(), ["line 481 has the rank 7, which another token has", ""]),
        (&[&ranks[..], b"YXp6eg== 481\n"].concat(), ["no token has the rank 480", "there are higher ones"]),
        (b"YQ== 0\nYg== 1\n", ["the byte 0x00 has no rank", ""]),
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

/// What is read from a file of a name with a `tokenizer_config.json` next to it, unless that is empty.
fn read_as(name: &str, bytes: &[u8], config: &str) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    if !config.is_empty() {
        fs::write(path.with_file_name("tokenizer_config.json"), config).unwrap();
    }
    read_tokenizer(&path).map_err(|error| error.to_string())
}

/// BERT's vocabulary is lower-case as its configuration says, or as it looks.
#[test]
fn a_vocabulary_of_word_pieces_is_berts_tokenizer() {
    let lower = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n##s\n猫\ne\n".to_string();
    let tokens = |text: &str, config: &str, sentence: &str| {
        let tokenizer = read_as("vocab.txt", text.as_bytes(), config).unwrap();
        tokenizer.encode(sentence, true).unwrap().get_tokens().join(" ")
    };
    assert_eq!(tokens(&lower, "", "The CATS猫é[MASK]"), "[CLS] the cat ##s 猫 e [MASK] [SEP]");
    assert_eq!(tokens(&lower, r#"{"do_lower_case": false}"#, "The cats"), "[CLS] [UNK] cat ##s [SEP]");
    assert_eq!(tokens(&format!("{lower}The\n"), "", "The the"), "[CLS] The the [SEP]");
    for (text, expected) in [
        (lower.replace("[MASK]\n", ""), "the vocabulary has no token [MASK]"),
        (format!("{lower}cat\n"), "line 11 of the vocabulary is empty or has a token that another has"),
    ] {
        let said = read_as("vocab.txt", text.as_bytes(), "").unwrap_err();
        assert!(said.contains(expected), "{said}");
    }
}

/// Ranks of all single bytes, then of pairs of them, then of three.
fn ranks(count: usize) -> Vec<u8> {
    let token = |rank: usize| match rank {
        ..256 => vec![rank as u8],
        256..65_792 => ((rank - 256) as u16).to_be_bytes().to_vec(),
        _ => ((rank - 65_792) as u32).to_be_bytes()[1..].to_vec(),
    };
    let line = |rank: usize| format!("{} {rank}\n", BASE64_STANDARD.encode(token(rank)));
    (0..count).map(line).collect::<String>().into_bytes()
}

fn around(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

/// The number of ranks tells the special tokens, and others are refused.
#[test]
fn published_ranks_have_their_models_special_tokens() {
    let llama = read_as("tokenizer.model", &ranks(128_000), "").unwrap();
    assert_eq!(around(&llama, "a"), [128_000, 97]);
    assert_eq!(llama.token_to_id("<|eot_id|>"), Some(128_009));
    assert_eq!(llama.get_vocab_size(true), 128_256);
    let qwen = read_as("qwen.tiktoken", &ranks(151_643), "").unwrap();
    assert_eq!(around(&qwen, "e\u{301}<|im_end|>"), around(&qwen, "é<|im_end|>"));
    assert_eq!(around(&qwen, "<|im_end|>"), [151_645]);
    let cl100k = read_as("cl100k_base.tiktoken", &ranks(100_256), "").unwrap();
    assert_eq!(around(&cl100k, "a<|endoftext|><|endofprompt|>"), [97, 100_257, 100_276]);
    assert_eq!(cl100k.id_to_token(100_256).unwrap(), "<|reserved_token_100256|>");
    for (count, whose) in [(163_584, "Kimi"), (199_998, "o200k"), (200_000, "o200k"), (100_000, "not known")] {
        let said = read_as("tiktoken.model", &ranks(count), "").unwrap_err();
        assert!(said.contains(whose) && said.contains("take the model's tokenizer.json"), "{said}");
    }
}

/// A text of a piece that is none of text is divided, and bytes are found where characters are not.
#[test]
fn bytes_and_unused_pieces_are_never_in_a_text() {
    let piece = |text: &str, kind: u8, score: f32| {
        let score = [&[0x15], &score.to_le_bytes()[..]].concat();
        field(1, &[field(1, text.as_bytes()), score, vec![0x18, kind]].concat())
    };
    let characters: Vec<u8> = "<0x41>ab".chars().flat_map(|text| piece(&text.to_string(), 1, -5.0)).collect();
    let others = [piece("ab", 5, 0.0), piece("<0x41>", 6, 0.0)].concat();
    let trainer = field(2, &[0x98, 2, 1]);
    let no_prefix = field(3, &[0x18, 0]);
    let model = [piece("<unk>", 2, 0.0), characters, others, trainer, no_prefix].concat();
    let tokenizer = read_as("bytes.model", &model, "").unwrap();
    assert_eq!(around(&tokenizer, "<0x41>ab"), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(around(&tokenizer, "A"), [10]);
    assert_eq!(around(&tokenizer, "Z"), [0]);
}

/// A damaged charsmap is refused, or no text ends the program.
#[test]
fn damaged_normalizers_are_harmless() {
    let model = fs::read(golden("t5.model")).unwrap();
    let text: String = ('\u{1}'..='\u{17f}').chain("ﬁ①Ａ½ﷺ㍿漢".chars()).collect();
    let mut refused = 0;
    for at in (8192..model.len()).step_by(9973) {
        let mut damaged = model.clone();
        damaged[at..(at + 64).min(model.len())].fill(0xff);
        match read_as("t5.model", &damaged, "") {
            Ok(tokenizer) => drop(tokenizer.encode(text.as_str(), false)),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 0);
}
