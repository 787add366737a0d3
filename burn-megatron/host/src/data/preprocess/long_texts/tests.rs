//! Chunks have the ids of the whole.

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
        for tokenizer in splitting().into_iter().chain(symbols()) {
            let long = LongTexts::of(&tokenizer);
            prop_assert!(long.split.is_some(), "{:?}", tokenizer.get_pre_tokenizer());
            let whole = tokenizer.encode_fast(text.as_str(), false).unwrap();
            prop_assert!(ids(&long, &tokenizer, &text) == whole.get_ids(), "{:?}", tokenizer.get_pre_tokenizer());
        }
    }
}

/// A tokenizer as that of Llama 2, of a few merges; `more` are further symbols.
fn of_symbols(normalizer: Value, pre_tokenizer: Value, more: &[&str], added: Value) -> Tokenizer {
    let merges = [
        "▁ ▁",
        "▁▁ ▁▁",
        "▁ t",
        "h e",
        "▁t he",
        "c a",
        "▁ ca",
        "ca t",
        "▁ca t",
        "1 2",
        "▁ 12",
        "s a",
        "n a",
        "ï v",
        ". .",
    ];
    let letters = "▁thecasb12nïvi.,'CATX";
    let symbols = letters.chars().map(String::from).chain(merges.iter().map(|pair| pair.replace(' ', "")));
    let symbols = ["<unk>".to_string()].into_iter().chain(symbols).chain(more.iter().map(ToString::to_string));
    let mut vocab = serde_json::Map::new();
    symbols.for_each(|symbol| drop(vocab.insert(symbol, json!(vocab.len()))));
    let model = json!({"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": false, "vocab": vocab, "merges": merges});
    let whole = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null, "model": model});
    Tokenizer::from_bytes(whole.to_string()).unwrap()
}

fn spaces() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

fn prepended() -> Value {
    json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces()]})
}

/// Llama 2's and Mistral's, Gemma's, and those of `legacy = false`.
fn symbols() -> Vec<Tokenizer> {
    let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    let metaspace =
        |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    vec![
        of_symbols(prepended(), json!(null), &[], special("<mask>", true, true)),
        of_symbols(spaces(), split, &[], special("<extra>", false, true)),
        of_symbols(spaces(), json!(null), &[], json!([])),
        of_symbols(json!(null), metaspace("first"), &[], special("[MASK]", true, false)),
        of_symbols(json!(null), metaspace("always"), &[], json!([])),
        of_symbols(json!(null), metaspace("never"), &[], json!([])),
    ]
}

#[test]
fn a_text_is_split_where_a_space_follows_a_letter_or_digit_and_only_there() {
    let long = "word ".repeat(CHUNK);
    let mut rest = long.as_str();
    while let Some(end) = Split::Words.boundary(rest) {
        assert!((CHUNK..CHUNK + 5).contains(&end) && rest[end..].starts_with(' '));
        rest = &rest[end..];
    }
    assert_eq!(rest.len() % 5, 1);
    assert_eq!(Split::Words.boundary(&"猫 ".repeat(CHUNK)), None);
    assert_eq!(Split::Words.boundary(&"word\n".repeat(CHUNK)), None);
}

#[test]
fn tokenizers_that_see_more_than_words_get_the_whole_text() {
    let splits = |tokenizer: Tokenizer| LongTexts::of(&tokenizer).split.is_some();
    let left = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let later = json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace("first")]});
    for (what, tokenizer) in [
        ("a space in a symbol", of_symbols(prepended(), json!(null), &["t▁"], json!([]))),
        ("a token of letters", of_symbols(prepended(), json!(null), &[], special("cat", false, false))),
        ("spaces of another kind", of_symbols(json!({"type": "NFKC"}), json!(null), &[], json!([]))),
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
    let encode = |bytes: usize, available| long.encode_within(&tokenizer, &"a".repeat(bytes), Some(available), |_| {});
    assert!(encode(SMALL, 0).is_ok());
    let said = encode(SMALL + 1, 300 << 20).unwrap_err();
    assert!(said.starts_with("1048577 bytes of text at once can take 524288500 bytes of memory"), "{said}");
    assert!(said.contains("314572800 are available; split the document"), "{said}");
}
