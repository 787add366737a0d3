//! Texts to tokens, as the harness does it for a causal model (`lm_eval/api/model.py`, `TemplateLM`;
//! `lm_eval/models/huggingface.py`, `HFLM`).

use std::path::Path;

use tokenizers::Tokenizer;

use super::EvalError;
use super::likelihood::Request;
use crate::data::chat::{ChatTokenizer, special_token};
use crate::data::preprocess::end_of_document;
use crate::data::{read_tokenizer, tokenizer_path};

/// A tokenizer, and what conditions the first token of a text.
pub struct Encoder {
    tokenizer: Tokenizer,
    /// The beginning-of-sequence token, or the end-of-sequence token of a tokenizer without one.
    prefix: i64,
    /// Contexts are what a user says.
    chat: Option<ChatTokenizer>,
    apart: bool,
}

impl Encoder {
    /// An encoder whose texts follow the token `prefix`.
    pub fn new(tokenizer: Tokenizer, prefix: i64) -> Self {
        Self { tokenizer, prefix, chat: None, apart: false }
    }

    /// The `tokenizer.json` of a folder. The prefix is the `bos_token` of its `tokenizer_config.json`, or else the
    /// `eos_token`, or else the first of `others`, or else the usual end of a document, which a tokenizer that
    /// was made here has. With `chat`, contexts are rendered with the chat template. Fails if a file is missing or
    /// wrong, or there is no prefix.
    pub fn open(folder: &Path, others: &[u32], chat: bool) -> Result<Self, EvalError> {
        let path = tokenizer_path(folder);
        let refused = |error: &dyn std::fmt::Display| EvalError::Tokenizer(format!("{}: {error}", path.display()));
        if !path.is_file() {
            return Err(refused(&"there is no such file; texts need the model's tokenizer"));
        }
        let tokenizer = read_tokenizer(&path).map_err(|error| refused(&error))?;
        let mut prefix = None;
        for name in ["bos_token", "eos_token"] {
            let token = special_token(folder, name)?;
            prefix = prefix.or(token.and_then(|token| tokenizer.token_to_id(&token)));
        }
        let end = || end_of_document(&tokenizer, None).and_then(|id| u32::try_from(id).ok());
        let Some(prefix) = prefix.or(others.first().copied()).or_else(end) else {
            let what = "no bos_token or eos_token is known, which the first token of a text is conditioned on; name one in \
                        tokenizer_config.json";
            return Err(EvalError::Tokenizer(format!("{}: {what}", folder.display())));
        };
        let chat = chat.then(|| ChatTokenizer::open(folder, None)).transpose()?;
        Ok(Self { tokenizer, prefix: i64::from(prefix), chat, apart: false })
    }

    /// For a model whose encoder reads contexts and whose decoder continuations: each has tokens of its own, of which only a
    /// context's have those that the tokenizer puts around a text.
    pub fn apart(self) -> Self {
        Self { apart: true, ..self }
    }

    pub(super) fn is_apart(&self) -> bool {
        self.apart
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// A context as the model gets it.
    pub(super) fn context(&self, context: &str) -> Result<String, String> {
        match &self.chat {
            None => Ok(context.into()),
            Some(chat) => chat.prompt(&[("user".into(), context.into())]).map_err(|what| format!("context: {what}")),
        }
    }

    /// With the tokens that the tokenizer puts around every text, unless the text begins with the prefix already.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<i64>, String> {
        let prefix = self.tokenizer.decode(&[self.prefix as u32], false).unwrap_or_default();
        self.tokens(text, prefix.is_empty() || !text.starts_with(&prefix))
    }

    fn tokens(&self, text: &str, special: bool) -> Result<Vec<i64>, String> {
        let encoded =
            self.tokenizer.encode_fast(text, special).map_err(|error| format!("the text has no tokens: {error}"))?;
        Ok(encoded.get_ids().iter().map(|id| i64::from(*id)).collect())
    }

    /// The tokens of a text and its continuation, of which those of the continuation are scored. Spaces at the end of
    /// the context belong to the continuation; an empty context is the prefix.
    pub(super) fn pair(&self, context: &str, continuation: &str) -> Result<Request, String> {
        let trimmed = context.trim_end();
        if self.apart {
            let read = if trimmed.is_empty() { vec![self.prefix] } else { self.tokens(trimmed, true)? };
            let scored = self.tokens(&format!("{}{continuation}", &context[trimmed.len()..]), false)?;
            return Ok(Request { tokens: [&read[..], &scored].concat(), scored: scored.len() });
        }
        if trimmed.is_empty() {
            let mut tokens = self.tokens(&format!("{context}{continuation}"), false)?;
            if tokens.first() != Some(&self.prefix) {
                tokens.insert(0, self.prefix);
            }
            let scored = tokens.len() - 1;
            return Ok(Request { tokens, scored });
        }
        let whole = self.encode(&format!("{context}{continuation}"))?;
        let scored = whole.len().saturating_sub(self.encode(trimmed)?.len());
        Ok(Request { tokens: whole, scored })
    }

    /// The tokens of a text in windows that score each of them once. A window has at most `most` inputs; all but the
    /// first begin with the last token of the one before and, at the end of the text, with more of them.
    pub(super) fn rolling(&self, text: &str, most: usize) -> Result<Vec<Request>, String> {
        Ok(windows(&self.encode(text)?, self.prefix, most))
    }
}

/// `get_rolling_token_windows` of the harness (`lm_eval/utils.py`) with a context of one token.
fn windows(tokens: &[i64], prefix: i64, most: usize) -> Vec<Request> {
    let first = tokens.len().min(most);
    let mut all = vec![Request { tokens: [&[prefix], &tokens[..first]].concat(), scored: first }];
    let mut done = first;
    while done < tokens.len() {
        let scored = (tokens.len() - done).min(most);
        let end = done + scored;
        all.push(Request { tokens: tokens[end - most - 1..end].to_vec(), scored });
        done = end;
    }
    all.retain(|request| request.scored > 0);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Letters, and spaces before a word that belong to its first letter.
    fn encoder() -> Encoder {
        let vocab: serde_json::Map<String, serde_json::Value> = ["<s>", " ", "a", "b", "c", "ab"]
            .iter()
            .enumerate()
            .map(|(id, word)| (word.to_string(), id.into()))
            .collect();
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
            "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "unk_token": null},
        });
        Encoder::new(Tokenizer::from_bytes(json.to_string()).unwrap(), 0)
    }

    /// A folder that `export` makes of a run with a tokenizer of its own has no `tokenizer_config.json`.
    #[test]
    fn a_tokenizer_that_was_made_here_needs_no_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let end = serde_json::json!({"id": 1, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true});
        for (added, prefix) in [(vec![], None), (vec![end], Some(1))] {
            let json = serde_json::json!({
                "version": "1.0", "added_tokens": added,
                "model": {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 1}, "merges": []},
            });
            let json = if prefix.is_none() { json.to_string().replace("<|endoftext|>", "b") } else { json.to_string() };
            std::fs::write(folder.path().join("tokenizer.json"), json).unwrap();
            assert_eq!(Encoder::open(folder.path(), &[], false).ok().map(|encoder| encoder.prefix), prefix);
        }
    }

    #[test]
    fn the_continuation_is_what_the_whole_text_has_more() {
        let encoder = encoder();
        let pair = |context, continuation| {
            let request = encoder.pair(context, continuation).unwrap();
            (request.tokens, request.scored)
        };
        assert_eq!(pair("a", " c"), (vec![0, 2, 1, 4], 2));
        assert_eq!(pair("a ", "c"), (vec![0, 2, 1, 4], 2), "the space belongs to the continuation");
        assert_eq!(pair("", "c"), (vec![0, 4], 1));
        assert_eq!(pair("", "<s>c"), (vec![0, 4], 1), "the prefix is there already");
        assert_eq!(pair("<s>a", "c"), (vec![0, 2, 4], 1), "and is not put there again");
        assert_eq!(pair("ca", "b"), (vec![0, 4, 5], 0), "a merge over the border leaves nothing, as in the harness");
    }

    #[test]
    fn an_encoder_reads_the_context_and_a_decoder_the_continuation() {
        let encoder = encoder().apart();
        let pair = |context, continuation| {
            let request = encoder.pair(context, continuation).unwrap();
            (request.tokens, request.scored)
        };
        assert_eq!(pair("ca", "b"), (vec![0, 4, 2, 3], 1), "nothing is merged over the border");
        assert_eq!(pair("a ", "c"), (vec![0, 2, 1, 4], 2));
        assert_eq!(pair("", "c"), (vec![0, 4], 1));
    }

    #[test]
    fn windows_score_every_token_once() {
        let tokens: Vec<i64> = (1..=10).collect();
        let of = |most| windows(&tokens, 0, most).into_iter().map(|w| (w.tokens, w.scored)).collect::<Vec<_>>();
        assert_eq!(of(20), [((0..=10).collect::<Vec<_>>(), 10)]);
        // The harness's own example for ten tokens and a length of four.
        assert_eq!(of(4), [(vec![0, 1, 2, 3, 4], 4), (vec![4, 5, 6, 7, 8], 4), (vec![6, 7, 8, 9, 10], 2)]);
        for most in 1..12 {
            let scored: Vec<i64> =
                of(most).iter().flat_map(|(tokens, scored)| tokens[tokens.len() - scored..].to_vec()).collect();
            assert_eq!(scored, tokens, "{most}");
        }
        assert!(windows(&[], 0, 4).is_empty());
    }
}
