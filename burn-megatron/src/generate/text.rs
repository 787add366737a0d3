//! Tokens to text as they come.

use tokenizers::{Result, Tokenizer};

/// What follows an incomplete character when bytes are decoded.
const INCOMPLETE: char = char::REPLACEMENT_CHARACTER;

/// So many tokens before the new ones tell how those are written: whether a space comes first, for example. As in vLLM
/// (`INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET`).
const CONTEXT: usize = 5;

/// Gives the text of new tokens as soon as it cannot change any more: the bytes of a character may come in several
/// tokens.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Tokens from here on are decoded.
    from: usize,
    /// The text of tokens before was given.
    given: usize,
}

impl<'a> TextStream<'a> {
    /// The text that follows a prompt.
    pub fn after(tokenizer: &'a Tokenizer, prompt: &[i64]) -> Self {
        let tokens: Vec<u32> = prompt.iter().map(|token| *token as u32).collect();
        Self { tokenizer, from: tokens.len().saturating_sub(CONTEXT), given: tokens.len(), tokens }
    }

    /// Takes a token and gives the text that is complete with it; empty while a character is incomplete, and for
    /// special tokens.
    ///
    /// # Errors
    /// If the tokenizer cannot decode.
    pub fn push(&mut self, token: i64) -> Result<String> {
        self.tokens.push(token as u32);
        let text = self.pending()?;
        // A special token has no text: what follows it is still written as after the last token that has.
        if text.is_empty() || text.ends_with(INCOMPLETE) {
            return Ok(String::new());
        }
        (self.from, self.given) = (self.given, self.tokens.len());
        Ok(text)
    }

    /// What is held back, for the end of the text: an incomplete character as its replacement.
    ///
    /// # Errors
    /// If the tokenizer cannot decode.
    pub fn rest(&self) -> Result<String> {
        self.pending()
    }

    fn pending(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.tokens[self.from..self.given], true)?;
        let all = self.tokenizer.decode(&self.tokens[self.from..], true)?;
        Ok(all.get(before.len()..).unwrap_or_default().to_string())
    }
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

    #[test]
    fn pieces_make_up_the_text() {
        let tokens: Vec<i64> = (0..200).map(|index| [1, 2, 5, 6, 7, 3, 4, 5, 6, 7, 2][index % 11]).collect();
        let whole: Vec<u32> = [&[1], tokens.as_slice()].concat().iter().map(|token| *token as u32).collect();
        assert_eq!(format!("the{}", texts(&[1], &tokens).concat()), tokenizer().decode(&whole, true).unwrap());
    }
}
