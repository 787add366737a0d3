//! Long texts through `Tokenizer::encode`, which takes hundreds of times the memory of a text for its offsets: in
//! chunks where the tokenizer gives them the ids of the whole, and else only where there is the memory.

mod sentencepiece;
#[cfg(test)]
mod tests;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::host_memory::available;

/// Bytes of a chunk, and the few up to the next place where a text may be split.
const CHUNK: usize = 1 << 18;
/// Bytes of memory that `Tokenizer::encode` takes for a byte of text at most. Measured: 130 for Llama 2's tokenizer, 140
/// for Unigram over a whole text, 450 where every character is a pre-token.
const FACTOR: u64 = 500;
/// Texts up to this size are encoded without a look at the memory.
const SMALL: usize = 1 << 20;

/// How a tokenizer is given long texts.
#[derive(Default)]
pub(super) struct LongTexts {
    split: Option<Split>,
}

/// Where a text may be split: in front of a space behind a letter or digit.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Split {
    /// Whatever follows.
    Words,
    /// If a letter or digit follows. The chunk begins with it where the tokenizer puts a space in front of every text.
    Symbols { puts_space: bool },
}

impl LongTexts {
    /// Looks at what the tokenizer consists of.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let json = |part: Result<Value, serde_json::Error>| part.unwrap_or(Value::Bool(true));
        let normalizer = json(serde_json::to_value(tokenizer.get_normalizer()));
        let pre_tokenizer = json(serde_json::to_value(tokenizer.get_pre_tokenizer()));
        let model = json(serde_json::to_value(tokenizer.get_model()));
        let added = tokenizer.get_added_tokens_decoder();
        let stays_whole = added.values().all(|token| {
            // White space after it that it swallows must not begin the next chunk.
            let end = token.content.ends_with(|character: char| character.is_ascii_alphanumeric());
            !(token.content.contains(char::is_whitespace) || token.rstrip && end)
        });
        let split = match is_local(&normalizer) && splits_words(&pre_tokenizer) {
            true => Some(Split::Words),
            // A token that begins with a letter would be found without the space in front of it.
            false => sentencepiece::puts_space(&normalizer, &pre_tokenizer, &model)
                .filter(|_| added.values().all(|token| !token.content.starts_with(|c: char| c.is_ascii_alphanumeric())))
                .map(|puts_space| Split::Symbols { puts_space }),
        };
        Self { split: split.filter(|_| stays_whole && model["dropout"].is_null()) }
    }

    /// The ids of a text, chunk after chunk. Fails if the tokenizer refuses the text, or there is not enough memory for
    /// it.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str, give: impl FnMut(u32)) -> Result<(), String> {
        self.encode_within(tokenizer, text, available(), give)
    }

    fn encode_within(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        available: Option<u64>,
        mut give: impl FnMut(u32),
    ) -> Result<(), String> {
        let mut rest = text;
        while !rest.is_empty() {
            let end = self.split.and_then(|split| split.boundary(rest));
            let (chunk, after) = rest.split_at(end.unwrap_or(rest.len()));
            let puts_space = self.split == Some(Split::Symbols { puts_space: true });
            check(chunk.len(), available)?;
            let encoding = tokenizer.encode_fast(chunk, false).map_err(|error| error.to_string())?;
            encoding.get_ids().iter().for_each(|&id| give(id));
            rest = if puts_space { after.strip_prefix(' ').unwrap_or(after) } else { after };
        }
        Ok(())
    }
}

impl Split {
    /// The first place after a chunk at which a text may be split.
    fn boundary(self, text: &str) -> Option<usize> {
        let bytes = text.as_bytes();
        let is_word = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_alphanumeric);
        let is_place = |at: &usize| is_word(at - 1) && bytes[*at] == b' ' && (self == Self::Words || is_word(at + 1));
        (CHUNK..text.len()).find(is_place)
    }
}

/// Whether a chunk can be encoded with the memory that is available.
fn check(bytes: usize, available: Option<u64>) -> Result<(), String> {
    let needed = FACTOR * bytes as u64;
    match available {
        Some(available) if bytes > SMALL && needed > available => Err(format!(
            "{bytes} bytes of text at once can take {needed} bytes of memory with this tokenizer, {available} are \
             available; split the document, or take a byte-level BPE tokenizer, which takes four times the text"
        )),
        _ => Ok(()),
    }
}

/// Whether a normalizer does the same on both sides of a boundary, whatever is on the other side, and leaves the space
/// there. ASCII letters, digits and the space never combine with what is before them, and are grapheme boundaries.
fn is_local(normalizer: &Value) -> bool {
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some(
            "BertNormalizer" | "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents" | "Nmt" | "Precompiled",
        ) => true,
        Some("Strip") => normalizer["strip_left"] == false,
        Some("Replace") => normalizer["pattern"]["Regex"] == " {2,}",
        Some("Sequence") => normalizer["normalizers"].as_array().is_some_and(|steps| steps.iter().all(is_local)),
        Some(_) => false,
    }
}

/// Whether a pre-tokenizer splits at every space, and what it makes of a word does not depend on where the word is.
fn splits_words(pre_tokenizer: &Value) -> bool {
    let single = std::slice::from_ref(pre_tokenizer);
    let steps = match pre_tokenizer["type"].as_str() {
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().map_or(single, Vec::as_slice),
        _ => single,
    };
    let splits = |step: &Value| match step["type"].as_str() {
        Some("BertPreTokenizer" | "Whitespace" | "WhitespaceSplit") => true,
        // A chunk begins with a space, so that no other is put before it.
        Some("Metaspace") => step["split"] == true,
        _ => false,
    };
    let by_word = |step: &Value| match step["type"].as_str() {
        Some("Punctuation" | "Digits") => true,
        // The first word of a text would be another in the middle of it.
        Some("Metaspace") => step["prepend_scheme"] != "first",
        _ => splits(step),
    };
    steps.split_first().is_some_and(|(first, others)| splits(first) && others.iter().all(by_word))
}
