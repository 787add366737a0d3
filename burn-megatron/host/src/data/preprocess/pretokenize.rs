//! Text to the pre-tokens of a byte-level BPE: what it never merges across.

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::utils::SysRegex;

use crate::data::tokenizer_file::byte_symbol;

/// The expression of GPT-2's `ByteLevel` pre-tokenizer.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Longer texts are split before a BPE is trained on them.
const LONG: usize = 1 << 18;

/// Splits text into pre-tokens, lazily: a list of them would be several times as large as the text.
pub(super) struct PreTokenizer {
    /// Without one every character is a pre-token.
    expression: Option<SysRegex>,
    /// The symbol of each byte, if the model's symbols are bytes; else they are the characters.
    bytes: Option<Vec<char>>,
}

impl PreTokenizer {
    /// GPT-2's, which the tokenizers that are trained here have too.
    pub fn gpt2() -> Self {
        Self::expression(GPT2).expect("a valid expression")
    }

    fn expression(expression: &str) -> Option<Self> {
        Some(Self { expression: Some(SysRegex::new(expression).ok()?), bytes: Some(symbols()) })
    }

    /// GPT-2's, or that of newer tokenizers, which have a `Split` before a `ByteLevel`.
    pub fn of(pre_tokenizer: &PreTokenizerWrapper) -> Option<Self> {
        let steps = match pre_tokenizer {
            PreTokenizerWrapper::Sequence(steps) => steps.as_ref(),
            single => std::slice::from_ref(single),
        };
        match steps {
            [PreTokenizerWrapper::ByteLevel(bytes)] if bytes.use_regex && !bytes.add_prefix_space => Some(Self::gpt2()),
            [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(bytes)] => {
                let isolated = matches!(split.behavior, SplitDelimiterBehavior::Isolated) && !split.invert;
                let plain = isolated && !bytes.use_regex && !bytes.add_prefix_space;
                match &split.pattern {
                    SplitPattern::Regex(expression) if plain => Self::expression(expression),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Each character, for a model that merges nothing: its symbols are bytes or characters.
    pub fn characters(pre_tokenizer: Option<&PreTokenizerWrapper>) -> Option<Self> {
        match pre_tokenizer {
            None => Some(Self { expression: None, bytes: None }),
            Some(PreTokenizerWrapper::ByteLevel(bytes)) if !bytes.use_regex && !bytes.add_prefix_space => {
                Some(Self { expression: None, bytes: Some(symbols()) })
            }
            _ => None,
        }
    }

    /// The pre-tokens in order; together they are the text.
    pub fn split<'s>(&'s self, text: &'s str) -> impl Iterator<Item = &'s str> {
        let matches = self.expression.as_ref().map(|expression| expression.find_iter(text));
        let characters = text.char_indices().map(|(start, character)| (start, start + character.len_utf8()));
        let characters = matches.is_none().then_some(characters);
        let spans = matches.into_iter().flatten().chain(characters.into_iter().flatten());
        let mut end = 0;
        // What the expression does not match is a pre-token of its own.
        let pre_tokens = spans.chain([(text.len(), text.len())]).flat_map(move |(start, stop)| {
            let unmatched = &text[end..start];
            end = stop;
            [unmatched, &text[start..stop]]
        });
        pre_tokens.filter(|pre_token| !pre_token.is_empty())
    }

    /// A pre-token in the symbols of the model.
    pub fn symbols(&self, pre_token: &str) -> String {
        match &self.bytes {
            Some(symbols) => pre_token.bytes().map(|byte| symbols[usize::from(byte)]).collect(),
            None => pre_token.into(),
        }
    }
}

fn symbols() -> Vec<char> {
    (0..=255).map(byte_symbol).collect()
}

/// A text in chunks that GPT-2's expression splits into the same pre-tokens as the whole: none of them holds white
/// space after anything else.
pub(super) fn chunks(text: String) -> impl Iterator<Item = String> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let bytes = text.as_bytes();
        let boundary = |at: &usize| bytes[at - 1].is_ascii_alphanumeric() && bytes[*at].is_ascii_whitespace();
        let end = (start + LONG..text.len()).find(boundary).unwrap_or(text.len());
        let chunk = text[start..end].to_owned();
        start = end;
        (!chunk.is_empty()).then_some(chunk)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]
        #[test]
        fn chunks_have_the_pre_tokens_of_the_whole(
            words in prop::collection::vec(r"[a-z]{1,9}|'s|[0-9]{1,3}|[ \n\t]{1,3}|[.,!]\n?|é猫", 1..400),
            copies in 1usize..3,
        ) {
            let words = words.concat();
            let text = words.repeat(copies * LONG / words.len() + 1);
            let pre_tokenizer = PreTokenizer::gpt2();
            let whole: Vec<&str> = pre_tokenizer.split(&text).collect();
            let mut next = 0;
            for chunk in chunks(text.clone()) {
                for pre_token in pre_tokenizer.split(&chunk) {
                    prop_assert_eq!(pre_token, whole[next]);
                    next += 1;
                }
            }
            prop_assert_eq!(next, whole.len());
        }
    }

    #[test]
    fn a_short_text_is_one_chunk() {
        assert_eq!(chunks("a b".into()).collect::<Vec<_>>(), ["a b"]);
        assert_eq!(chunks(String::new()).count(), 0);
        let long = "word ".repeat(LONG);
        let parts: Vec<String> = chunks(long.clone()).collect();
        assert!(parts.len() >= 5 && parts.iter().all(|part| part.len() <= LONG + 5) && parts.concat() == long);
    }
}
