//! tiktoken's ranks (<https://github.com/openai/tiktoken>): a line for each token, its bytes in base64 and its rank, which is
//! its id. The file says neither how a text is divided before nor which special tokens there are.

use std::collections::{HashMap, HashSet};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::added_token::added_token;
use super::byte_symbol;
use super::config::End;

/// How Llama 3 divides a text (`llama3/tokenizer.py` of Meta), as tiktoken's `cl100k_base` does; also that of small
/// files, which are not known.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How Qwen does (`tokenization_qwen.py`): every digit alone.
const QWEN: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Numbers of ranks by which a file is known.
const LLAMA3_RANKS: usize = 128_000;
const QWEN_RANKS: usize = 151_643;
const CL100K_RANKS: usize = 100_256;

/// A file with this number of ranks or more is a published one.
const PUBLISHED: usize = 100_000;

/// The most ids without a token that are filled.
const PLACEHOLDERS: usize = 4096;

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

/// Special tokens of models that are known by the number of their ranks.
fn known(ranks: usize) -> Vec<(usize, String)> {
    let names: Vec<String> = match ranks {
        // `llama3/tokenizer.py` of Meta.
        LLAMA3_RANKS => {
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
        QWEN_RANKS => ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
            .map(String::from)
            .into_iter()
            .chain((0..205).map(|n| format!("<|extra_{n}|>")))
            .collect(),
        // `tiktoken_ext/openai_public.py`; ids before the first and before the last have no token.
        CL100K_RANKS => {
            let names = ["endoftext", "fim_prefix", "fim_middle", "fim_suffix", "endofprompt"];
            let ids = [100_257, 100_258, 100_259, 100_260, 100_276];
            return ids.into_iter().zip(names.map(|name| format!("<|{name}|>"))).collect();
        }
        _ => Vec::new(),
    };
    names.into_iter().enumerate().map(|(index, name)| (ranks + index, name)).collect()
}

/// How a text is divided. Fails if that is not known.
fn pattern(ranks: usize) -> Result<&'static str, String> {
    let whose = match ranks {
        LLAMA3_RANKS | CL100K_RANKS | ..PUBLISHED => return Ok(LLAMA3),
        QWEN_RANKS => return Ok(QWEN),
        199_998 | 200_000 => "o200k (GPT-4o, Llama 4)",
        163_584 => "Kimi",
        _ => "a model that is not known",
    };
    Err(format!(
        "the {ranks} ranks are those of {whose}, whose way to divide a text is not read; take the model's tokenizer.json"
    ))
}

/// The special tokens by their ids, with placeholders: `tokenizers` numbers them from the number of ranks on without gaps.
fn without_gaps(mut special: Vec<(usize, String)>, ranks: usize) -> Result<Vec<(usize, String)>, String> {
    let listed: HashSet<usize> = special.iter().map(|(id, _)| *id).collect();
    let last = listed.iter().max().map_or(ranks, |id| *id);
    let gaps: Vec<usize> = (ranks..last).filter(|id| !listed.contains(id)).take(PLACEHOLDERS + 1).collect();
    if gaps.len() > PLACEHOLDERS {
        return Err(format!(
            "more than {PLACEHOLDERS} ids between the {ranks} ranks and the special token {last} are of no token"
        ));
    }
    special.extend(gaps.into_iter().map(|id| (id, format!("<|reserved_token_{id}|>"))));
    special.sort_unstable();
    Ok(special)
}

/// Tokens and their ranks, which are 0 and the next ones.
fn read(bytes: &[u8]) -> Result<HashMap<Vec<u8>, usize>, String> {
    let mut ranks: HashMap<Vec<u8>, usize> = HashMap::new();
    let mut seen = HashSet::new();
    for (index, text) in lines(bytes).enumerate() {
        let (token, rank) =
            line(text).ok_or_else(|| format!("line {} is not a token in base64 and its rank", index + 1))?;
        if ranks.insert(token, rank).is_some() {
            return Err(format!("line {} has a token that has a rank already", index + 1));
        }
        if !seen.insert(rank) {
            return Err(format!("line {} has the rank {rank}, which another token has", index + 1));
        }
    }
    if let Some(byte) = (0..=u8::MAX).find(|byte| !ranks.contains_key(&[*byte][..])) {
        return Err(format!("the byte 0x{byte:02X} has no rank"));
    }
    match (0..ranks.len()).find(|rank| !seen.contains(rank)) {
        Some(rank) => Err(format!("no token has the rank {rank}, and there are higher ones")),
        None => Ok(ranks),
    }
}

/// The ranks as a `tokenizer.json`, and what is put around a text. The error names the line that is none, or the byte
/// or the rank that is missing.
pub(super) fn as_json(bytes: &[u8], special: Option<Vec<(usize, String)>>) -> Result<(Value, [End; 2]), String> {
    let ranks = read(bytes)?;
    let pattern = pattern(ranks.len())?;
    let special = without_gaps(special.unwrap_or_else(|| known(ranks.len())), ranks.len())?;
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
    let added = special.into_iter().map(|(id, content)| added_token(id, &content, true));
    let is = |model: usize| ranks.len() == model;
    let normalizer = is(QWEN_RANKS).then(|| json!({"type": "NFC"}));
    let bos = is(LLAMA3_RANKS).then(|| "<|begin_of_text|>".to_string());
    let ends = [End { token: bos, is_added: is(LLAMA3_RANKS) }, End { token: None, is_added: false }];
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": true, "vocab": vocab,
            "merges": merges.into_iter().map(|(_, merge)| merge).collect::<Vec<_>>(),
        },
    });
    Ok((json, ends))
}
