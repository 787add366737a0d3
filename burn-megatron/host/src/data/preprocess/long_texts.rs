//! Long texts through `Tokenizer::encode`, which takes hundreds of times the memory of a text for its offsets: in
//! chunks where the tokenizer gives them the ids of the whole, and else only where there is the memory.

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
    splits: bool,
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
        let deterministic = model["dropout"].is_null();
        Self { splits: stays_whole && deterministic && is_local(&normalizer) && splits_words(&pre_tokenizer) }
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
            let end = if self.splits { boundary(rest) } else { None };
            let (chunk, after) = rest.split_at(end.unwrap_or(rest.len()));
            check(chunk.len(), available)?;
            let encoding = tokenizer.encode_fast(chunk, false).map_err(|error| error.to_string())?;
            encoding.get_ids().iter().for_each(|&id| give(id));
            rest = after;
        }
        Ok(())
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

/// The first place after a chunk at which a space follows a letter or digit.
fn boundary(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    (CHUNK..text.len()).find(|&at| bytes[at - 1].is_ascii_alphanumeric() && bytes[at] == b' ')
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// A tokenizer of these parts over the pieces of a few words; `mark` stands before the first piece of a word.
    fn tokenizer(model: &str, normalizer: Value, pre_tokenizer: Value, added: Value) -> Tokenizer {
        let pieces = ["the", "cat", "sat", "a", "b", "c", "1", "2", "ab", "na", "ive", ".", ",", "'", "é", "猫"];
        let model = match model {
            "WordPiece" => {
                let mut vocab = serde_json::Map::from_iter([("[UNK]".to_string(), json!(0))]);
                for piece in pieces {
                    for form in [piece.to_string(), format!("##{piece}")] {
                        vocab.insert(form, json!(vocab.len()));
                    }
                }
                json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": vocab})
            }
            _ => {
                let both = pieces.iter().flat_map(|piece| [format!("▁{piece}"), piece.to_string()]);
                let all = ["<unk>".to_string(), "▁".into()].into_iter().chain(both);
                let vocab: Vec<Value> = all.enumerate().map(|(i, piece)| json!([piece, -(i as f64)])).collect();
                json!({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false})
            }
        };
        let whole = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
                           "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null,
                           "decoder": null, "model": model});
        Tokenizer::from_bytes(whole.to_string()).unwrap()
    }

    fn bert() -> Value {
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
               "lowercase": true})
    }

    fn metaspace(scheme: &str) -> Value {
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true})
    }

    fn special(content: &str, lstrip: bool, rstrip: bool) -> Value {
        json!([{"id": 1000, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": rstrip,
                "normalized": false, "special": true}])
    }

    /// Tokenizers that see words only: BERT's, T5's, and others of these parts.
    fn splitting() -> Vec<Tokenizer> {
        let double = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
        let right = json!({"type": "Strip", "strip_left": false, "strip_right": true});
        let t5 = json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, right, double]});
        let words = |more: Value| json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, more]});
        vec![
            tokenizer("WordPiece", bert(), json!({"type": "BertPreTokenizer"}), special("[MASK]", true, false)),
            tokenizer("WordPiece", json!(null), json!({"type": "Whitespace"}), json!([])),
            tokenizer("Unigram", t5, metaspace("always"), special("<extra>", false, true)),
            tokenizer("Unigram", json!(null), metaspace("first"), special("<mask>", true, true)),
            tokenizer("Unigram", json!({"type": "NFKC"}), words(metaspace("always")), json!([])),
            tokenizer(
                "Unigram",
                json!({"type": "Lowercase"}),
                words(json!({"type": "Punctuation", "behavior": "Isolated"})),
                json!([]),
            ),
        ]
    }

    fn ids(long: &LongTexts, tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        long.encode_within(tokenizer, text, None, |id| ids.push(id)).unwrap();
        ids
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]
        #[test]
        fn chunks_have_the_ids_of_the_whole(
            words in prop::collection::vec(
                r"(the|CAT|sat|ab|1|naïve|e\u{301}|猫|é|ﬁ|\[MASK\]|<extra>|<mask>|[.,'\u{301}\u{200d}])|[ \n\t\u{a0}▁]{1,3}", 1..300
            ),
            more in 1usize..40,
        ) {
            let words = words.concat();
            // Boundaries fall at other words in each chunk.
            let text = words.repeat((2 * CHUNK + CHUNK / 2) / words.len() + 1) + &" the cat".repeat(more);
            for tokenizer in splitting() {
                let long = LongTexts::of(&tokenizer);
                prop_assert!(long.splits, "{:?}", tokenizer.get_pre_tokenizer());
                let whole = tokenizer.encode_fast(text.as_str(), false).unwrap();
                prop_assert!(ids(&long, &tokenizer, &text) == whole.get_ids(), "{:?}", tokenizer.get_pre_tokenizer());
            }
        }
    }

    #[test]
    fn a_text_is_split_where_a_space_follows_a_letter_or_digit_and_only_there() {
        let long = "word ".repeat(CHUNK);
        let mut rest = long.as_str();
        while let Some(end) = boundary(rest) {
            assert!((CHUNK..CHUNK + 5).contains(&end) && rest[end..].starts_with(' '));
            rest = &rest[end..];
        }
        assert_eq!(rest.len() % 5, 1);
        assert_eq!(boundary(&"猫 ".repeat(CHUNK)), None);
        assert_eq!(boundary(&"word\n".repeat(CHUNK)), None);
    }

    #[test]
    fn tokenizers_that_see_more_than_words_get_the_whole_text() {
        let splits = |tokenizer: Tokenizer| LongTexts::of(&tokenizer).splits;
        let left = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let later = json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace("first")]});
        for (what, tokenizer) in [
            ("no words", tokenizer("Unigram", json!(null), json!(null), json!([]))),
            ("the beginning", tokenizer("Unigram", prepend, metaspace("never"), json!([]))),
            ("the first space", tokenizer("Unigram", left, metaspace("always"), json!([]))),
            ("the first word", tokenizer("Unigram", json!(null), later, json!([]))),
            (
                "a token with a space",
                tokenizer("WordPiece", bert(), json!({"type": "BertPreTokenizer"}), special("a b", false, false)),
            ),
            (
                "a token and its space",
                tokenizer("WordPiece", bert(), json!({"type": "BertPreTokenizer"}), special("end", false, true)),
            ),
        ] {
            assert!(!splits(tokenizer), "{what}");
        }
    }

    #[test]
    fn a_text_that_memory_does_not_suffice_for_is_refused() {
        let tokenizer = tokenizer("Unigram", json!(null), json!(null), json!([]));
        let long = LongTexts::of(&tokenizer);
        let encode =
            |bytes: usize, available| long.encode_within(&tokenizer, &"a".repeat(bytes), Some(available), |_| {});
        assert!(encode(SMALL, 0).is_ok());
        let said = encode(SMALL + 1, 300 << 20).unwrap_err();
        assert!(said.starts_with("1048577 bytes of text at once can take 524288500 bytes of memory"), "{said}");
        assert!(said.contains("314572800 are available; split the document"), "{said}");
    }
}
