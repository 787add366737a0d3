//! Tokens to text as they come.

use tokenizers::{Result, Tokenizer};

use crate::data::token_bytes;

/// What follows an incomplete character when bytes are decoded.
const INCOMPLETE: char = char::REPLACEMENT_CHARACTER;

/// So many tokens before the new ones tell how those are written: whether a space comes first, for example. As in vLLM
/// (`INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET`).
const CONTEXT: usize = 5;

/// So many tokens are held back at most. A character has four bytes: what is still incomplete behind more tokens than that
/// has bytes that are no text.
const MOST_HELD: usize = 16;

/// Gives the text of new tokens as soon as it cannot change any more: the bytes of a character may come in several
/// tokens.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Those that are decoded: some whose text was given, and all that follow. None is without a text, so that there are few.
    tokens: Vec<u32>,
    /// The text of so many of them was given, or is the prompt's.
    given: usize,
}

impl<'a> TextStream<'a> {
    /// The text that follows a prompt. Of a character that the prompt ends in, the whole character follows.
    pub fn after(tokenizer: &'a Tokenizer, prompt: &[i64]) -> Self {
        let texts = prompt.iter().rev().map(|token| *token as u32).filter(|token| has_text(tokenizer, *token));
        // Other bytes of a character are in the tokens before.
        let is_inside = |token: &u32| token_bytes(tokenizer, *token).first().is_some_and(|byte| byte & 0xC0 == 0x80);
        let (mut tokens, mut inside) = (Vec::new(), false);
        for token in texts.take(CONTEXT + 3) {
            if tokens.len() >= CONTEXT && !inside {
                break;
            }
            inside = is_inside(&token);
            tokens.push(token);
        }
        tokens.reverse();
        Self { tokenizer, given: tokens.len(), tokens }
    }

    /// Takes a token and gives the text that is complete with it; empty while a character is incomplete, and for
    /// special tokens.
    ///
    /// # Errors
    /// If the tokenizer cannot decode.
    pub fn push(&mut self, token: i64) -> Result<String> {
        // What follows a special token is written as after the last token that has a text.
        if !has_text(self.tokenizer, token as u32) {
            return Ok(String::new());
        }
        self.tokens.push(token as u32);
        let ((from, text), held) = (self.pending()?, self.tokens.len() - self.given);
        if (text.is_empty() || text.ends_with(INCOMPLETE)) && held < MOST_HELD {
            return Ok(String::new());
        }
        self.tokens.drain(..from);
        self.given = self.tokens.len();
        Ok(text)
    }

    /// What is held back, for the end of the text: an incomplete character as its replacement.
    ///
    /// # Errors
    /// If the tokenizer cannot decode.
    pub fn rest(&self) -> Result<String> {
        Ok(self.pending()?.1)
    }

    /// The text of the tokens behind the given ones, and the token that it begins with.
    fn pending(&self) -> Result<(usize, String)> {
        let decode = |end: usize| self.tokenizer.decode(&self.tokens[..end], true);
        let (mut end, all) = (self.given, decode(self.tokens.len())?);
        let mut before = decode(end)?;
        // A character that the given tokens end in, and the new ones complete.
        while !all.starts_with(&before) && before.ends_with(INCOMPLETE) {
            end -= 1;
            before = decode(end)?;
        }
        match all.strip_prefix(&before) {
            Some(new) => Ok((end, new.to_string())),
            // New bytes that are no text make those before them none, where a decoder looks at all of them at once.
            None => Ok((self.given, self.tokenizer.decode(&self.tokens[self.given..], true)?)),
        }
    }
}

/// Whether a token is written at all: special ones are not, nor are those that the tokenizer does not know.
fn has_text(tokenizer: &Tokenizer, token: u32) -> bool {
    let text = tokenizer.id_to_token(token);
    text.is_some_and(|text| !tokenizer.get_added_vocabulary().is_special_token(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in Llama 2: words with a leading space, which is dropped at the beginning of a text, and bytes.
    fn tokenizer() -> Tokenizer {
        let words = ["</s>", "▁the", "▁cat", "s", "!", "<0xE7>", "<0x8C>", "<0xAB>"];
        let vocab: serde_json::Map<String, serde_json::Value> =
            words.iter().enumerate().map(|(id, word)| (word.to_string(), id.into())).collect();
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null,
            "added_tokens": [{"id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "</s>"},
        });
        Tokenizer::from_bytes(json.to_string()).unwrap()
    }

    fn texts(prompt: &[i64], tokens: &[i64]) -> Vec<String> {
        let tokenizer = tokenizer();
        let mut stream = TextStream::after(&tokenizer, prompt);
        let mut texts: Vec<String> = tokens.iter().map(|token| stream.push(*token).unwrap()).collect();
        texts.push(stream.rest().unwrap());
        texts
    }

    #[test]
    fn words_keep_the_space_before_them() {
        assert_eq!(texts(&[1], &[2, 3, 1, 0, 2]), [" cat", "s", " the", "", " cat", ""]);
        assert_eq!(texts(&[0], &[1, 2]), ["the", " cat", ""]);
    }

    #[test]
    fn bytes_are_held_back_until_the_character_is_complete() {
        assert_eq!(texts(&[1], &[2, 5, 6, 7, 4]), [" cat", "", "", "猫", "!", ""]);
        // An end in the middle of a character.
        assert_eq!(texts(&[1], &[2, 5, 6]).concat(), " cat��");
    }

    /// The 256 bytes as tokens, as in GPT-2 or as in Llama 2, and a special token.
    fn bytes(byte_level: bool) -> Tokenizer {
        let is_printed = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let mut others = 256..;
        let mut symbol = |byte: u8| match byte_level {
            true if is_printed(&byte) => char::from(byte).to_string(),
            true => others.next().and_then(char::from_u32).unwrap().to_string(),
            false if byte.is_ascii() => char::from(byte).to_string(),
            false => format!("<0x{byte:02X}>"),
        };
        let vocab: serde_json::Map<String, serde_json::Value> =
            (0..=255).map(|byte| (symbol(byte), byte.into())).collect();
        let decoder = match byte_level {
            true => serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}),
            false => serde_json::json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}),
        };
        let json = serde_json::json!({
            "version": "1.0", "decoder": decoder, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"},
            "added_tokens": [{"id": 256, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
        });
        Tokenizer::from_bytes(json.to_string()).unwrap()
    }

    fn ids(bytes: &[u8]) -> Vec<i64> {
        bytes.iter().map(|byte| i64::from(*byte)).collect()
    }

    #[test]
    fn the_answer_has_the_character_that_the_prompt_ends_in() {
        for (tokenizer, before) in
            [true, false].into_iter().flat_map(|of| ["", "a", "猫猫é"].map(|text| (bytes(of), text)))
        {
            for character in ["é", "猫", "😀"] {
                for end in 1..character.len() {
                    let (begun, new) = character.as_bytes().split_at(end);
                    let mut stream = TextStream::after(&tokenizer, &ids(&[before.as_bytes(), begun].concat()));
                    let new = [new, "! 猫".as_bytes()].concat();
                    let text: String = ids(&new).into_iter().map(|token| stream.push(token).unwrap()).collect();
                    assert_eq!(text, format!("{character}! 猫"), "{before} and {end} bytes of {character}");
                }
            }
        }
    }

    #[test]
    fn few_tokens_are_decoded_for_each_new_one() {
        for tokenizer in [bytes(true), bytes(false)] {
            let mut stream = TextStream::after(&tokenizer, &ids(b"ab"));
            // A special token has no text, and a byte that begins a character is never followed by the next one.
            let new = [vec![256; 500], ids(&[0xE7; 40]), ids(b"c")].concat();
            let mut text = String::new();
            for token in new {
                text += &stream.push(token).unwrap();
                assert!(stream.tokens.len() <= 2 * MOST_HELD);
            }
            assert_eq!(text, "�".repeat(40) + "c");
        }
    }

    #[test]
    fn pieces_make_up_the_text() {
        let tokens: Vec<i64> = (0..200).map(|index| [1, 2, 5, 6, 7, 3, 4, 5, 6, 7, 2][index % 11]).collect();
        let whole: Vec<u32> = [&[1], tokens.as_slice()].concat().iter().map(|token| *token as u32).collect();
        assert_eq!(format!("the{}", texts(&[1], &tokens).concat()), tokenizer().decode(&whole, true).unwrap());
    }
}
