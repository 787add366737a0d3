//! tiktoken's ranks (<https://github.com/openai/tiktoken>): a line for each token, its bytes in base64 and its rank, which is
//! its id. The file says neither how a text is divided before nor which special tokens there are.

use std::collections::HashMap;
use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::byte_symbol;

/// How Llama 3 divides a text (`llama3/tokenizer.py` of Meta), as tiktoken's `cl100k_base` does; also that of files which
/// are not known.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How Qwen does (`tokenization_qwen.py`): every digit alone.
const QWEN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Ranks of Llama 3, and of Qwen.
const RANKS: [usize; 2] = [128_000, 151_643];

/// A rank, its token in base64.
fn line(line: &[u8]) -> Option<(Vec<u8>, usize)> {
    let mut words = line.split(|byte| *byte == b' ');
    let (token, rank) = (words.next()?, words.next()?);
    let token = BASE64_STANDARD.decode(token).ok().filter(|token| !token.is_empty())?;
    let rank = std::str::from_utf8(rank).ok()?.parse().ok()?;
    words.next().is_none().then_some((token, rank))
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty())
}

/// Whether a file begins with a rank.
pub(super) fn is_ranks(bytes: &[u8]) -> bool {
    lines(&bytes[..bytes.len().min(1 << 12)]).next().and_then(line).is_some()
}

/// The special tokens that a `tokenizer_config.json` lists; none if there is no such file, or no list in it.
///
/// # Errors
/// If the file is no such file.
pub(super) fn listed(config: &Path) -> Result<Option<Vec<(usize, String)>>, String> {
    let Ok(text) = std::fs::read(config) else { return Ok(None) };
    let broken = || format!("{} next to it has no list of special tokens", config.display());
    let config: Value = serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", config.display()))?;
    let Some(tokens) = config.get("added_tokens_decoder") else { return Ok(None) };
    let of = |(id, token): (&String, &Value)| Some((id.parse().ok()?, token["content"].as_str()?.to_string()));
    tokens.as_object().ok_or_else(broken)?.iter().map(of).collect::<Option<Vec<_>>>().map(Some).ok_or_else(broken)
}

/// Special tokens of models that are known by the number of their ranks.
fn known(ranks: usize) -> Vec<(usize, String)> {
    let names: Vec<String> = match ranks {
        // `llama3/tokenizer.py` of Meta.
        _ if ranks == RANKS[0] => {
            let reserved = |count: std::ops::Range<usize>| count.map(|n| format!("<|reserved_special_token_{n}|>"));
            let names = |names: &[&str]| names.iter().map(|name| format!("<|{name}|>")).collect::<Vec<_>>();
            names(&["begin_of_text", "end_of_text"])
                .into_iter()
                .chain(reserved(0..4))
                .chain(names(&["start_header_id", "end_header_id"]))
                .chain(reserved(4..5))
                .chain(names(&["eot_id"]))
                .chain(reserved(5..251))
                .collect()
        }
        // `tokenization_qwen.py`.
        _ if ranks == RANKS[1] => ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
            .map(String::from)
            .into_iter()
            .chain((0..205).map(|n| format!("<|extra_{n}|>")))
            .collect(),
        _ => Vec::new(),
    };
    names.into_iter().enumerate().map(|(index, name)| (ranks + index, name)).collect()
}

/// The ranks as a `tokenizer.json`.
///
/// # Errors
/// Names the line that is none, or the byte that has no rank.
pub(super) fn as_json(bytes: &[u8], special: Option<Vec<(usize, String)>>) -> Result<Value, String> {
    let mut ranks: HashMap<Vec<u8>, usize> = HashMap::new();
    for (index, text) in lines(bytes).enumerate() {
        let (token, rank) =
            line(text).ok_or_else(|| format!("line {} is not a token in base64 and its rank", index + 1))?;
        if ranks.insert(token, rank).is_some() {
            return Err(format!("line {} has a token that has a rank already", index + 1));
        }
    }
    let text = |token: &[u8]| token.iter().map(|byte| byte_symbol(*byte)).collect::<String>();
    // tiktoken merges two neighbours if both together have a rank, the lowest rank first: every division of a token into
    // two is a merge.
    let mut merges: Vec<(usize, [String; 2])> = Vec::new();
    for (token, rank) in &ranks {
        let divisions = (1..token.len()).map(|at| token.split_at(at));
        let known = divisions.filter(|(left, right)| ranks.contains_key(*left) && ranks.contains_key(*right));
        merges.extend(known.map(|(left, right)| (*rank, [text(left), text(right)])));
    }
    merges.sort_unstable();
    let vocab: serde_json::Map<String, Value> = ranks.iter().map(|(token, rank)| (text(token), json!(rank))).collect();
    let added = special.unwrap_or_else(|| known(ranks.len())).into_iter().map(|(id, content)| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        })
    });
    let pattern = if ranks.len() == RANKS[1] { QWEN } else { LLAMA3 };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": true, "vocab": vocab,
            "merges": merges.into_iter().map(|(_, merge)| merge).collect::<Vec<_>>(),
        },
    }))
}
