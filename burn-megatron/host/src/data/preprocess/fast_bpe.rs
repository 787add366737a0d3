//! The fast path for byte-level BPE tokenizers.
//!
//! `Tokenizer::encode` keeps offsets into the original text through every step, which takes most of its time and a
//! hundred times the memory of the text, and pre-processing has no use for them. Here the text is split by the
//! tokenizer's own expression, each pre-token goes through the tokenizer's own model once, and its ids are cached.
//! Tokenizers with any other step take the slow path.

use parking_lot::Mutex;
use std::collections::HashMap;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{Model, ModelWrapper, Tokenizer};

use super::pretokenize::PreTokenizer;

/// Pre-tokens in a worker's cache, and how long they may be; frequent ones come early and are short.
const CACHED: usize = 1 << 18;
const LONGEST: usize = 64;

type Cache = HashMap<Box<str>, Box<[u32]>>;

pub(super) struct FastBpe<'a> {
    model: &'a ModelWrapper,
    pre_tokenizer: PreTokenizer,
    /// Finds special tokens in a text; their ids in the same order.
    special: (AhoCorasick, Vec<u32>),
    /// One per worker, so that none waits.
    caches: Vec<Mutex<Cache>>,
}

impl<'a> FastBpe<'a> {
    /// For tokenizers that consist of a splitting expression and a byte-level BPE, or of single bytes or characters.
    pub fn new(tokenizer: &'a Tokenizer, workers: usize) -> Option<Self> {
        let model = tokenizer.get_model();
        let ModelWrapper::BPE(bpe) = model else { return None };
        if bpe.dropout.is_some() || tokenizer.get_normalizer().is_some() || tokenizer.get_truncation().is_some() {
            return None;
        }
        let pre_tokenizer = tokenizer.get_pre_tokenizer();
        let pre_tokenizer = pre_tokenizer
            .and_then(PreTokenizer::of)
            .or_else(|| PreTokenizer::characters(pre_tokenizer).filter(|_| merges_nothing(model)))?;
        let caches = (0..workers.max(1)).map(|_| Mutex::default()).collect();
        Some(Self { model, pre_tokenizer, special: special(tokenizer)?, caches })
    }

    /// Gives the ids of `text` one after the other.
    pub fn encode(&self, text: &str, mut give: impl FnMut(u32)) -> Result<(), String> {
        let worker = rayon::current_thread_index().unwrap_or(0) % self.caches.len();
        let mut cache = self.caches[worker].lock();
        let (special, ids) = &self.special;
        let mut end = 0;
        for found in special.find_iter(text) {
            self.encode_plain(&text[end..found.start()], &mut cache, &mut give)?;
            give(ids[found.pattern().as_usize()]);
            end = found.end();
        }
        self.encode_plain(&text[end..], &mut cache, &mut give)
    }

    fn encode_plain(&self, text: &str, cache: &mut Cache, give: &mut impl FnMut(u32)) -> Result<(), String> {
        for pre_token in self.pre_tokenizer.split(text) {
            if let Some(known) = cache.get(pre_token) {
                known.iter().for_each(|&id| give(id));
                continue;
            }
            let symbols = self.pre_tokenizer.symbols(pre_token);
            let tokens = self.model.tokenize(&symbols).map_err(|error| error.to_string())?;
            tokens.iter().for_each(|token| give(token.id));
            if cache.len() < CACHED && pre_token.len() <= LONGEST {
                cache.insert(pre_token.into(), tokens.into_iter().map(|token| token.id).collect());
            }
        }
        Ok(())
    }
}

/// The added tokens, if each is found wherever its text is: others take white space or word boundaries into account.
fn special(tokenizer: &Tokenizer) -> Option<(AhoCorasick, Vec<u32>)> {
    let added = tokenizer.get_added_tokens_decoder();
    let plain = |token: &tokenizers::AddedToken| !(token.lstrip || token.rstrip || token.single_word);
    // Those that are looked for in normalized text come after the others, whatever their length.
    let one_kind = added.values().all(|token| token.normalized) || added.values().all(|token| !token.normalized);
    if !added.values().all(plain) || !one_kind || tokenizer.get_encode_special_tokens() {
        return None;
    }
    let (ids, texts): (Vec<u32>, Vec<String>) = added.into_iter().map(|(id, token)| (id, token.content)).unzip();
    let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts).ok()?;
    Some((finder, ids))
}

/// Whether every symbol of a text is a token, whatever stands around it.
fn merges_nothing(model: &ModelWrapper) -> bool {
    let ModelWrapper::BPE(bpe) = model else { return false };
    let affixes = bpe.continuing_subword_prefix.is_some() || bpe.end_of_word_suffix.is_some();
    let merges = || serde_json::to_value(bpe).ok()?["merges"].as_array().map(Vec::len);
    !affixes && !bpe.fuse_unk && !bpe.ignore_merges && merges() == Some(0)
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::TokenizerChoice;
    use super::*;

    const TEXT: &str = "The cat's hat, the 123 cats' hats!\n\n  don't  \t we'll see\u{a0}it — naïve 猫猫 <|end";

    /// GPT-2's pre-tokenizer, the one of Llama 3, bytes, and characters.
    static TOKENIZERS: LazyLock<[Tokenizer; 4]> = LazyLock::new(|| {
        let make = |choice: TokenizerChoice| choice.tokenizer([TEXT.repeat(4)].into_iter(), true).unwrap().unwrap();
        let gpt2 = make(TokenizerChoice::TrainBpe(400));
        let mut llama3: Value = serde_json::from_str(&gpt2.to_string(false).unwrap()).unwrap();
        let expression = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        llama3["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]});
        let llama3 = Tokenizer::from_bytes(llama3.to_string()).unwrap();
        [gpt2, llama3, make(TokenizerChoice::Bytes), make(TokenizerChoice::Characters)]
    });

    fn fast(encoder: &FastBpe, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        encoder.encode(text, |id| ids.push(id)).map(|()| ids)
    }

    fn agree(text: &str) -> Result<(), TestCaseError> {
        for tokenizer in &*TOKENIZERS {
            let encoder = FastBpe::new(tokenizer, 1).unwrap();
            let slow = tokenizer.encode_fast(text, false);
            let slow = slow.map(|encoded| encoded.get_ids().to_vec()).map_err(|error| error.to_string());
            for pass in ["first", "cached"] {
                prop_assert_eq!(&fast(&encoder, text), &slow, "{}", pass);
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn fast_and_slow_path_agree(
            text in r"(The|cat|'s|123|[ \t\n]{1,4}|[a-zA-Z0-9'!é猫\u{a0}\u{301}<|>]|\PC|<\|end|<\|endoftext\|>){0,40}",
            known in r"(The|cat|'s|123|  |\n\n|naïve|猫|<\|end|<\|endoftext\|>){0,40}",
        ) {
            agree(&text)?;
            agree(&known)?;
        }
    }

    #[test]
    fn other_tokenizers_take_the_slow_path() {
        let changed = |change: fn(&mut Value)| {
            let mut json: Value = serde_json::from_str(&TOKENIZERS[0].to_string(false).unwrap()).unwrap();
            change(&mut json);
            Tokenizer::from_bytes(json.to_string()).unwrap()
        };
        assert!(FastBpe::new(&changed(|_| {}), 1).is_some());
        type Change = fn(&mut Value);
        let changes: [(&str, Change); 4] = [
            ("white space before a special token", |json| json["added_tokens"][0]["lstrip"] = true.into()),
            ("a normalizer", |json| json["normalizer"] = json!({"type": "NFC"})),
            ("a space at the beginning", |json| json["pre_tokenizer"]["add_prefix_space"] = true.into()),
            ("words of the whole text", |json| json["pre_tokenizer"] = Value::Null),
        ];
        for (what, change) in changes {
            assert!(FastBpe::new(&changed(change), 1).is_none(), "{what}");
        }
    }
}
