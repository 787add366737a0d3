//! Prompts that a model is to complete, each several times.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::Tokenizer;

use super::chat::{ChatError, ChatTokenizer, Result, Row, Skipped, rows};
use super::numpy::epochs;
use super::{Sample, SampleError, TokenDataset, read_tokenizer};

/// How files of prompts are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptSet {
    /// Files of rows, in order.
    pub files: Vec<PathBuf>,
    /// A `tokenizer.json`.
    pub tokenizer: PathBuf,
    /// A chat template in place of the one in the tokenizer's folder.
    pub template: Option<PathBuf>,
    /// Completions of each prompt.
    pub generations: usize,
    /// Most tokens of a prompt.
    pub longest: usize,
    /// Whether rows that cannot be used are left out and counted.
    pub skip_bad_rows: bool,
}

/// A prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// What the model reads.
    pub tokens: Vec<i64>,
    /// The same as text.
    pub text: String,
    /// The row of the prompt, with all its keys.
    pub row: Value,
}

/// Prompts in the order in which they are completed. A sample is one completion of a prompt, which the model has yet to
/// write; those of the same prompt follow each other.
#[derive(Clone)]
pub struct PromptDataset {
    tokenizer: Arc<Tokenizer>,
    prompts: Arc<[Prompt]>,
    generations: usize,
    seq_length: usize,
    order: Arc<[u32]>,
    samples: usize,
    content: String,
}

/// Turns rows into prompts.
struct Reader<'a> {
    set: &'a PromptSet,
    tokenizer: Tokenizer,
    /// Opened by the first row that is a conversation.
    chat: Option<ChatTokenizer>,
}

impl PromptDataset {
    /// Reads and encodes the `prompt` of every row: a text, or a list of messages with `role` and `content`. `check` says
    /// what else a row must have. `samples` completions are written, of prompts in epochs that are each in an order of
    /// its own, which follows from the seed.
    pub fn open(
        set: &PromptSet,
        (seq_length, samples, seed): (usize, usize, u32),
        check: impl Fn(&Value) -> Result<(), String>,
    ) -> Result<(Self, Skipped)> {
        let mut reader = Reader { set, tokenizer: tokenizer(&set.tokenizer)?, chat: None };
        let (mut prompts, mut skipped) = (Vec::new(), Skipped::default());
        for file in &set.files {
            for row in rows(file)? {
                let row = row?;
                match reader.prompt(&row, &check)? {
                    Ok(prompt) => prompts.push(prompt),
                    Err(what) => skipped.leave_out(&row, what, (set.skip_bad_rows, "grpo.skip-bad-rows"))?,
                }
            }
        }
        if prompts.is_empty() {
            let (bad, why) = (skipped.rows, skipped.named());
            let what = format!("no prompt of grpo.train can be used: {bad} rows are bad{why}");
            return Err(ChatError::Nothing { what });
        }
        let mut hash = Sha256::new();
        for Prompt { tokens, row, .. } in &prompts {
            hash.update((tokens.len() as u64).to_le_bytes());
            tokens.iter().for_each(|id| hash.update(id.to_le_bytes()));
            hash.update(row.to_string());
        }
        let content = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let generations = set.generations.max(1);
        let order = epochs(prompts.len(), samples.div_ceil(generations).max(1), seed).into();
        let (tokenizer, prompts) = (Arc::new(reader.tokenizer), prompts.into());
        Ok((Self { tokenizer, prompts, generations, seq_length, order, samples, content }, skipped))
    }

    /// Different prompts.
    pub fn prompts(&self) -> usize {
        self.prompts.len()
    }

    /// The prompt of a sample; after the last one they start again.
    pub fn prompt(&self, sample: usize) -> &Prompt {
        &self.prompts[self.order[sample / self.generations % self.order.len()] as usize]
    }

    /// The text of a completion, without special tokens.
    ///
    /// # Errors
    /// If the tokenizer cannot decode it.
    pub fn text(&self, completion: &[i64]) -> Result<String, SampleError> {
        let ids: Vec<u32> = completion.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
        self.tokenizer.decode(&ids, true)
    }
}

fn tokenizer(path: &Path) -> Result<Tokenizer> {
    read_tokenizer(path).map_err(|error| ChatError::Tokenizer { path: path.to_path_buf(), what: error.to_string() })
}

impl Reader<'_> {
    /// The prompt of a row, or why it has none; an error is one of all rows.
    fn prompt(&mut self, row: &Row, check: impl Fn(&Value) -> Result<(), String>) -> Result<Result<Prompt, String>> {
        let row = match row.json() {
            Ok(row) => row,
            Err(what) => return Ok(Err(what)),
        };
        let text = match &row["prompt"] {
            Value::String(text) => Ok(text.clone()),
            Value::Array(messages) if messages.is_empty() => Err("prompt: empty, there is nothing to complete".into()),
            Value::Array(messages) => self.rendered(messages)?,
            _ => Err("prompt: missing; a text, or a list of messages with role and content".into()),
        };
        let is_chat = row["prompt"].is_array();
        Ok(text.and_then(|text| {
            let encoded = self.tokenizer.encode_fast(text.as_str(), !is_chat);
            let encoded = encoded.map_err(|error| format!("prompt: the text has no tokens: {error}"))?;
            let tokens: Vec<i64> = encoded.get_ids().iter().map(|id| i64::from(*id)).collect();
            let longest = self.set.longest;
            if tokens.is_empty() {
                return Err("prompt: empty, there is nothing to complete".into());
            }
            if tokens.len() > longest {
                return Err(format!(
                    "prompt: it has {} tokens; with grpo.max-completion-length there is room for {longest} in training.seq-length",
                    tokens.len()
                ));
            }
            check(&row)?;
            Ok(Prompt { tokens, text, row })
        }))
    }

    /// Messages in the words of the chat template, up to the beginning of the assistant's turn.
    fn rendered(&mut self, messages: &[Value]) -> Result<Result<String, String>> {
        let chat = match self.chat.take() {
            Some(chat) => chat,
            None => ChatTokenizer::open(&self.set.tokenizer, self.set.template.as_deref())?,
        };
        let pair = |(at, message): (usize, &Value)| match (message["role"].as_str(), message["content"].as_str()) {
            (Some(role), Some(content)) => Ok((role.to_string(), content.to_string())),
            _ => Err(format!("prompt[{at}]: a message has a role and a content, both texts")),
        };
        let pairs: Result<Vec<_>, String> = messages.iter().enumerate().map(pair).collect();
        let text = pairs.and_then(|pairs| chat.prompt(&pairs).map_err(|what| format!("prompt: {what}")));
        self.chat = Some(chat);
        Ok(text)
    }
}

impl TokenDataset for PromptDataset {
    fn len(&self) -> usize {
        self.samples
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    /// The prompt and padding, none of which counts.
    fn sample(&self, index: usize) -> Sample {
        let mut tokens = self.prompt(index).tokens.clone();
        tokens.resize(self.seq_length, 0);
        let (labels, mask) = (vec![0; self.seq_length], vec![false; self.seq_length]);
        Sample { tokens, labels, loss_mask: Some(mask), documents: None, references: None, taught: None }
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        Ok(Some(self.content.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token per letter.
    fn set(folder: &Path, lines: &str) -> PromptSet {
        let vocab: serde_json::Map<String, Value> =
            ('a'..='z').enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
        let json = serde_json::json!({"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        std::fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
        let template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}";
        std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
        std::fs::write(folder.join("prompts.jsonl"), lines).unwrap();
        PromptSet {
            files: vec![folder.join("prompts.jsonl")],
            tokenizer: folder.join("tokenizer.json"),
            template: None,
            generations: 2,
            longest: 4,
            skip_bad_rows: false,
        }
    }

    #[test]
    fn completions_of_a_prompt_follow_each_other_and_epochs_have_their_own_order() {
        let folder = tempfile::tempdir().unwrap();
        let lines = "{\"prompt\": \"ab\", \"answer\": 1}\n{\"prompt\": [{\"role\": \"user\", \"content\": \"c\"}]}\n";
        let (data, _) = PromptDataset::open(&set(folder.path(), lines), (8, 7, 3), |_| Ok(())).unwrap();
        assert_eq!((data.len(), data.prompts()), (7, 2));
        let texts: Vec<&str> = (0..8).map(|sample| data.prompt(sample).text.as_str()).collect();
        assert!(texts.chunks(2).all(|pair| pair[0] == pair[1]), "{texts:?}");
        assert!(texts[..4].contains(&"ab") && texts[..4].contains(&"uca"), "{texts:?}");
        let at = texts.iter().position(|text| *text == "ab").unwrap();
        assert_eq!((data.prompt(at).tokens.as_slice(), &data.prompt(at).row["answer"]), ([0, 1].as_slice(), &1.into()));
        assert_eq!(data.sample(at).tokens, [0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(data.text(&[3, 2]).unwrap().replace(' ', ""), "dc");
    }

    #[test]
    fn rows_without_a_prompt_are_refused_or_counted() {
        let folder = tempfile::tempdir().unwrap();
        for (line, words) in [
            (r#"{"text": "ab"}"#, "prompt: missing"),
            (r#"{"prompt": "abcde"}"#, "it has 5 tokens; with grpo.max-completion-length there is room for 4"),
            (r#"{"prompt": [{"role": "user"}]}"#, "prompt[0]: a message has a role"),
            (r#"{"prompt": ""}"#, "prompt: empty"),
            (r#"{"prompt": "ab", "bad": 1}"#, "no good"),
        ] {
            let check = |row: &Value| if row["bad"].is_null() { Ok(()) } else { Err("no good".into()) };
            let all = format!("{{\"prompt\": \"ab\"}}\n{line}\n");
            let mut set = set(folder.path(), &all);
            let refused = PromptDataset::open(&set, (8, 4, 1), check).err().unwrap().to_string();
            assert!(refused.contains(words) && refused.contains("prompts.jsonl:2"), "{line}: {refused}");
            set.skip_bad_rows = true;
            let (data, skipped) = PromptDataset::open(&set, (8, 4, 1), check).unwrap();
            assert_eq!((data.prompts(), skipped.rows), (1, 1), "{line}");
        }
    }
}
