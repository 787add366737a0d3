//! BERT's `vocab.txt`: a token on each line, whose number from 0 is its id. Pieces that continue a word begin with `##`.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::added_token::added_token;

/// The special tokens of BERT, in the order in which new vocabularies begin with them.
pub(in crate::data) const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// How a text is cleaned before it is split.
#[derive(Clone, Copy)]
pub(in crate::data) struct Cleaning {
    pub lowercase: bool,
    /// Without it accents go with capital letters.
    pub strip_accents: Option<bool>,
    /// Whether every Chinese character is a word.
    pub chinese: bool,
}

/// Whether a file is such a vocabulary.
pub(super) fn is_vocabulary(bytes: &[u8]) -> bool {
    let mut lines = bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    lines.any(|line| line == b"[UNK]")
}

/// The tokens of a file in the order of their ids. The error names the line that is none.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<String>, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| format!("not UTF-8 at byte {}", error.valid_up_to()))?;
    let tokens: Vec<String> = text.lines().map(String::from).collect();
    let mut seen = HashSet::new();
    match tokens.iter().position(|token| token.is_empty() || !seen.insert(token)) {
        Some(line) => Err(format!("line {} of the vocabulary is empty or has a token that another has", line + 1)),
        None => Ok(tokens),
    }
}

/// Whether no token but the special ones has a capital letter, as in the vocabularies of models for lower-case text.
pub(super) fn is_lowercase(tokens: &[String]) -> bool {
    tokens.iter().filter(|token| !token.starts_with('[')).all(|token| !token.contains(char::is_uppercase))
}

/// The vocabulary as the `tokenizer.json` of a BERT. Fails if a special token is missing.
pub(in crate::data) fn as_json(tokens: &[String], cleaning: Cleaning) -> Result<Value, String> {
    let id = |name: &str| {
        let found = tokens.iter().position(|token| token == name);
        found.ok_or_else(|| format!("the vocabulary has no token {name}, which BERT has"))
    };
    let mut added = Vec::new();
    for name in SPECIAL {
        added.push(added_token(id(name)?, name, true));
    }
    added.sort_by_key(|token| token["id"].as_u64());
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let piece = |name: &str, kind: u8| json!({"SpecialToken": {"id": name, "type_id": kind}});
    let sequence = |name: &str, kind: u8| json!({"Sequence": {"id": name, "type_id": kind}});
    let single = [piece("[CLS]", 0), sequence("A", 0), piece("[SEP]", 0)];
    let pair = [&single[..], &[sequence("B", 1), piece("[SEP]", 1)]].concat();
    let mut ends = serde_json::Map::new();
    for name in ["[CLS]", "[SEP]"] {
        ends.insert(name.into(), json!({"id": name, "ids": [id(name)?], "tokens": [name]}));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": cleaning.chinese,
            "strip_accents": cleaning.strip_accents, "lowercase": cleaning.lowercase},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ends},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab},
    }))
}
