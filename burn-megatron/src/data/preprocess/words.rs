//! A short cut for byte-level BPE tokenizers.
//!
//! `Tokenizer::encode` keeps offsets into the original text through every step, which is most of its time, and
//! pre-processing has no use for them. Here the text is cut by the tokenizer's own expression, and each piece goes
//! through the tokenizer's own model once; after that its ids are remembered. Tokenizers with any other step, and texts
//! with special tokens, take the long way.

use std::collections::HashMap;
use std::sync::Mutex;

use tokenizers::pre_tokenizers::PreTokenizerWrapper as PreTokenizer;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::utils::SysRegex;
use tokenizers::{Model, ModelWrapper, Tokenizer};

use super::tokenizer::byte_symbol;

/// The expression of GPT-2's `ByteLevel` pre-tokenizer.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Pieces remembered by a worker, and how long they may be; frequent pieces come early and are short.
const REMEMBERED: usize = 1 << 18;
const LONGEST: usize = 64;

type Memory = HashMap<Box<str>, Box<[u32]>>;

/// Cuts text into the pieces that a byte-level BPE never merges across.
pub(super) struct Pieces {
    expression: SysRegex,
    symbols: Vec<char>,
}

impl Pieces {
    /// As GPT-2 does, and the tokenizers that are trained here.
    pub fn gpt2() -> Self {
        Self::new(GPT2).expect("a valid expression")
    }

    fn new(expression: &str) -> Option<Self> {
        let expression = SysRegex::new(expression).ok()?;
        Some(Self { expression, symbols: (0..=255).map(byte_symbol).collect() })
    }

    /// The pieces in order; together they are the text.
    pub fn cut<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let (mut pieces, mut end) = (Vec::with_capacity(text.len() / 4), 0);
        for (start, stop) in self.expression.find_iter(text) {
            // What the expression does not match is a piece of its own.
            pieces.extend([&text[end..start], &text[start..stop]]);
            end = stop;
        }
        pieces.push(&text[end..]);
        pieces.retain(|piece| !piece.is_empty());
        pieces
    }

    /// A piece in the symbols that stand for its bytes.
    pub fn symbols(&self, piece: &str) -> String {
        piece.bytes().map(|byte| self.symbols[usize::from(byte)]).collect()
    }
}

pub(super) struct WordEncoder<'a> {
    model: &'a ModelWrapper,
    pieces: Pieces,
    special: Vec<String>,
    /// One per worker, so that none waits.
    memories: Vec<Mutex<Memory>>,
}

impl<'a> WordEncoder<'a> {
    /// For tokenizers that consist of a splitting expression and a byte-level BPE.
    pub fn new(tokenizer: &'a Tokenizer, workers: usize) -> Option<Self> {
        let model = tokenizer.get_model();
        let plain = matches!(model, ModelWrapper::BPE(bpe) if bpe.dropout.is_none());
        if !plain || tokenizer.get_normalizer().is_some() || tokenizer.get_truncation().is_some() {
            return None;
        }
        let pieces = Pieces::new(splitting_expression(tokenizer.get_pre_tokenizer()?)?)?;
        let special = tokenizer.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
        let memories = (0..workers.max(1)).map(|_| Mutex::default()).collect();
        Some(Self { model, pieces, special, memories })
    }

    /// The ids of `text`, or `None` if it contains a special token.
    pub fn encode(&self, text: &str) -> Option<Result<Vec<i64>, String>> {
        let contains_special = self.special.iter().any(|token| text.contains(token.as_str()));
        (!contains_special).then(|| self.encode_plain(text))
    }

    fn encode_plain(&self, text: &str) -> Result<Vec<i64>, String> {
        let worker = rayon::current_thread_index().unwrap_or(0) % self.memories.len();
        let mut memory = self.memories[worker].lock().expect("no worker panics while it encodes");
        let mut ids = Vec::with_capacity(text.len() / 3);
        for piece in self.pieces.cut(text) {
            if let Some(known) = memory.get(piece) {
                ids.extend(known.iter().map(|&id| i64::from(id)));
                continue;
            }
            let tokens = self.model.tokenize(&self.pieces.symbols(piece)).map_err(|error| error.to_string())?;
            ids.extend(tokens.iter().map(|token| i64::from(token.id)));
            if memory.len() < REMEMBERED && piece.len() <= LONGEST {
                memory.insert(piece.into(), tokens.into_iter().map(|token| token.id).collect());
            }
        }
        Ok(ids)
    }
}

/// The expression of GPT-2's pre-tokenizer, or of the `Split` before a `ByteLevel` that newer tokenizers have.
fn splitting_expression(pre_tokenizer: &PreTokenizer) -> Option<&str> {
    let steps = match pre_tokenizer {
        PreTokenizer::Sequence(steps) => steps.as_ref(),
        single => std::slice::from_ref(single),
    };
    match steps {
        [PreTokenizer::ByteLevel(bytes)] if bytes.use_regex && !bytes.add_prefix_space => Some(GPT2),
        [PreTokenizer::Split(split), PreTokenizer::ByteLevel(bytes)] => {
            let isolated = matches!(split.behavior, SplitDelimiterBehavior::Isolated) && !split.invert;
            let plain = isolated && !bytes.use_regex && !bytes.add_prefix_space;
            match &split.pattern {
                SplitPattern::Regex(expression) if plain => Some(expression),
                _ => None,
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::TokenizerChoice;
    use super::*;

    /// GPT-2's pre-tokenizer, and the one of Llama 3.
    static TOKENIZERS: LazyLock<[Tokenizer; 2]> = LazyLock::new(|| {
        let text = "The cat's hat, the 123 cats' hats!\n\n  don't  \t we'll see\u{a0}it — naïve 猫猫 <|end".repeat(4);
        let gpt2 = TokenizerChoice::TrainBpe(400).tokenizer([text].into_iter(), true).unwrap().unwrap();
        let mut llama3: Value = serde_json::from_str(&gpt2.to_string(false).unwrap()).unwrap();
        let expression = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        llama3["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]});
        [gpt2, Tokenizer::from_bytes(llama3.to_string()).unwrap()]
    });

    proptest! {
        #[test]
        fn short_cut_and_long_way_agree(text in r"(The|cat|'s|123|[ \t\n]{1,4}|[a-zA-Z0-9'!é猫\u{a0}\u{301}<|>]|\PC|<\|end){0,40}") {
            for tokenizer in &*TOKENIZERS {
                let encoder = WordEncoder::new(tokenizer, 1).unwrap();
                let long: Vec<i64> =
                    tokenizer.encode_fast(text.as_str(), false).unwrap().get_ids().iter().map(|&id| id.into()).collect();
                for pass in ["first", "remembered"] {
                    prop_assert_eq!(&encoder.encode(&text).unwrap().unwrap(), &long, "{}", pass);
                }
            }
        }
    }

    #[test]
    fn special_tokens_and_other_tokenizers_take_the_long_way() {
        let encoder = WordEncoder::new(&TOKENIZERS[0], 1).unwrap();
        assert!(encoder.encode("a cat<|endoftext|>").is_none());
        for choice in [TokenizerChoice::Bytes, TokenizerChoice::Characters] {
            let tokenizer = choice.tokenizer(["abc".to_owned()].into_iter(), false).unwrap().unwrap();
            assert!(WordEncoder::new(&tokenizer, 1).is_none(), "{choice:?}");
        }
    }
}
