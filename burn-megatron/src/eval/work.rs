//! What a model has to compute for the questions of tasks.

use super::EvalError;
use super::encode::Encoder;
use super::likelihood::Request;
use super::task::{Question, Task};

/// How much text a model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens that a model sees at once; each of the two parts of one whose encoder reads contexts apart.
    pub max_length: usize,
    /// Tokens of an answer whose row does not say how many.
    pub max_new_tokens: usize,
    /// Tokens that the model knows.
    pub vocab_size: usize,
}

/// A text to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its tokens, at least one.
    pub tokens: Vec<i64>,
    /// Most tokens to write.
    pub max_new_tokens: usize,
    /// Texts that end the answer.
    pub until: Vec<String>,
}

/// All that is asked of a model, in the order of tasks and questions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Log-likelihoods: one of a continuation, one of each continuation, one of each window of a document.
    pub requests: Vec<Request>,
    /// By question: how many requests are its own; none of those that are prompts.
    pub counts: Vec<usize>,
    /// Texts to continue.
    pub prompts: Vec<Prompt>,
    /// Requests and prompts whose first tokens were left out because they were longer than the model takes.
    pub truncated: usize,
}

impl Work {
    /// The work for tasks. Fails if a question has no tokens, tokens that the model does not know, or more than it
    /// takes; with file and line.
    pub fn new(tasks: &[Task], encoder: &Encoder, limits: &Limits) -> Result<Self, EvalError> {
        let mut work = Self::default();
        for task in tasks {
            for (line, question) in &task.questions {
                let refused = |what: String| EvalError::Question { file: task.path.clone(), line: *line, what };
                work.add(question, encoder, limits).map_err(refused)?;
            }
        }
        Ok(work)
    }

    fn add(&mut self, question: &Question, encoder: &Encoder, limits: &Limits) -> Result<(), String> {
        let before = self.requests.len();
        match question {
            Question::MultipleChoice { context, continuations, .. } => {
                let context = encoder.context(context)?;
                for (index, continuation) in continuations.iter().enumerate() {
                    let request = encoder.pair(&context, continuation)?;
                    self.request(request, encoder, limits, &format!("continuations[{index}]"))?;
                }
            }
            Question::LogLikelihood { context, continuation } => {
                let request = encoder.pair(&encoder.context(context)?, continuation)?;
                self.request(request, encoder, limits, "continuation")?;
            }
            Question::Document { text } => {
                for window in encoder.rolling(text, limits.max_length)? {
                    self.request(window, encoder, limits, "text")?;
                }
            }
            Question::Generate { context, until, max_new_tokens, .. } => {
                let max_new_tokens = max_new_tokens.unwrap_or(limits.max_new_tokens);
                // What a decoder writes does not follow what the encoder reads.
                let written = if encoder.is_apart() { 0 } else { max_new_tokens };
                let Some(room) = limits.max_length.checked_sub(written).filter(|room| *room > 0) else {
                    return Err(format!(
                        "max_new_tokens: {max_new_tokens} leave no room for the context, the model takes {}; nearest legal: {}",
                        limits.max_length,
                        limits.max_length - 1
                    ));
                };
                let mut tokens = encoder.encode(&encoder.context(context)?)?;
                known(&tokens, limits, "context")?;
                if tokens.is_empty() {
                    return Err("context: it has no tokens, there is nothing to continue".into());
                }
                self.truncated += usize::from(tokens.len() > room);
                tokens.drain(..tokens.len().saturating_sub(room));
                self.prompts.push(Prompt { tokens, max_new_tokens, until: until.clone() });
            }
        }
        self.counts.push(self.requests.len() - before);
        Ok(())
    }

    /// Its last tokens where it is too long, as in the harness.
    fn request(&mut self, mut request: Request, encoder: &Encoder, limits: &Limits, key: &str) -> Result<(), String> {
        known(&request.tokens, limits, key)?;
        let (scored, most) = (request.scored, limits.max_length);
        if scored == 0 {
            return Err(format!(
                "{key}: no token of its own, the tokenizer joins it with the context; begin it with a space"
            ));
        }
        if scored > most {
            return Err(format!(
                "{key}: {scored} tokens, the model takes {most}; make it shorter, or set --max-length"
            ));
        }
        // The last token is none that a causal model reads.
        let room = if encoder.is_apart() { most + scored } else { most + 1 };
        self.truncated += usize::from(request.tokens.len() > room);
        request.tokens.drain(..request.tokens.len().saturating_sub(room));
        self.requests.push(request);
        Ok(())
    }
}

fn known(tokens: &[i64], limits: &Limits, key: &str) -> Result<(), String> {
    let vocab = limits.vocab_size;
    match tokens.iter().find(|token| !(0..vocab as i64).contains(token)) {
        None => Ok(()),
        Some(token) => Err(format!(
            "{key}: token {token} of the tokenizer, the model knows 0..{vocab}; they do not belong together"
        )),
    }
}
