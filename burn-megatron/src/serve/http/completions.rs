//! `POST /v1/completions`: texts that are continued.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde_json::{Value, json};

use super::App;
use super::api::{Common, MOST_LOGPROBS, MOST_PROMPTS, refused};
use super::error::ApiError;
use super::logprobs::OfCompletion;
use super::params::Params;
use super::reply::{Form, Job, now};
use super::speak::Piece;
use crate::generate::GenerateError;
use crate::serve::RequestError;

/// New tokens of a request that does not say how many: OpenAI's.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A prompt: tokens, and their text if it came as text or will be echoed.
type Prompt = (Vec<i64>, String);

pub(super) async fn completions(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let mut params = Params::of(body)?;
    let echo = params.bool("echo")?;
    // As in OpenAI's, a prompt's log-probabilities alone can be asked for.
    let common = Common::take(&mut params, &app, i64::from(!echo), None)?;
    let logprobs = params.integer("logprobs", 0..=MOST_LOGPROBS)?.map(|top| top as usize);
    params.without("suffix", &[json!("")])?;
    let prompt_only = echo && common.max_tokens == Some(0);
    let max_tokens = if prompt_only { 1 } else { common.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) };
    let prompts = prompts(&mut params, &app, common.n, max_tokens, echo)?;
    params.finish()?;
    let tokens: Vec<Vec<i64>> = prompts.iter().map(|(tokens, _)| tokens.clone()).collect();
    let room = |prompt: usize| match common.max_tokens {
        Some(_) => max_tokens,
        None => max_tokens.min(app.max_model_len.saturating_sub(prompt).max(1)),
    };
    let requests = common.requests(&app, &tokens, room, logprobs, echo && logprobs.is_some())?;
    let form = Completion {
        id: format!("cmpl-{:x}", app.next()),
        created: now(),
        model: app.models[common.model].clone(),
        echoed: prompts.iter().flat_map(|prompt| vec![echo.then(|| prompt.clone()); common.n]).collect(),
        offsets: vec![0; requests.len()],
        logprobs: logprobs.is_some(),
        prompt_only,
        app: Arc::clone(&app),
    };
    let prompt_tokens = tokens.iter().map(Vec::len).sum();
    let Common { n, stop, stream, include_usage, .. } = common;
    Job { app, requests, stop, n, prompt_tokens, prompt_only, stream, include_usage }.answer(form).await
}

/// A text or tokens, or a list of texts or of lists of tokens, each to be continued `n` times.
///
/// What is too long is refused before it is looked at any further.
fn prompts(params: &mut Params, app: &App, n: usize, max_tokens: usize, echo: bool) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || ApiError::param("prompt", "a string, a list of tokens, or a list of either is needed");
    let tokenizer = &app.tokenizer;
    // With the tokens that the tokenizer puts around every text, as transformers does.
    let text = |text: &str| Ok((app.encode("prompt", text, true)?, text.to_string()));
    let tokens = |values: &[Value]| -> Result<Prompt, ApiError> {
        let (prompt, max_model_len, vocab_size) = (values.len(), app.max_model_len, app.vocab_size);
        if prompt >= max_model_len {
            return Err(refused(RequestError::TooLong { prompt, max_tokens, max_model_len }));
        }
        let ids = values.iter().map(|value| value.as_i64().ok_or_else(wrong)).collect::<Result<Vec<i64>, _>>()?;
        if let Some(&token) = ids.iter().find(|token| !(0..vocab_size as i64).contains(token)) {
            return Err(refused(GenerateError::UnknownToken { token, vocab_size }.into()));
        }
        let text = || {
            let known: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
            tokenizer.decode(&known, true).unwrap_or_default()
        };
        let text = if echo { tokio::task::block_in_place(text) } else { String::new() };
        Ok((ids, text))
    };
    match params.take("prompt").ok_or_else(|| ApiError::param("prompt", "it is missing"))? {
        Value::String(prompt) => Ok(vec![text(&prompt)?]),
        Value::Array(values) if values.first().is_some_and(Value::is_number) => Ok(vec![tokens(&values)?]),
        Value::Array(values) if values.len() * n > MOST_PROMPTS => Err(ApiError::param(
            "prompt",
            format!("{} prompts with n = {n} are too many; nearest legal: {}", values.len(), MOST_PROMPTS / n),
        )),
        Value::Array(values) if !values.is_empty() => (values.iter())
            .map(|value| match value {
                Value::String(prompt) => text(prompt),
                Value::Array(values) => tokens(values),
                _ => Err(wrong()),
            })
            .collect(),
        _ => Err(wrong()),
    }
}

struct Completion {
    app: Arc<App>,
    id: String,
    created: u64,
    model: String,
    /// By choice, until it was given.
    echoed: Vec<Option<Prompt>>,
    /// By choice: characters of the tokens that were given.
    offsets: Vec<usize>,
    logprobs: bool,
    /// The new token was only asked for because a sequence has one.
    prompt_only: bool,
}

impl Form for Completion {
    fn envelope(&self, choices: Vec<Value>, _: bool) -> Value {
        let Self { id, created, model, .. } = self;
        json!({"id": id, "object": "text_completion", "created": created, "model": model, "choices": choices})
    }

    fn choice(&mut self, mut piece: Piece, is_part: bool) -> Option<Value> {
        let (tokenizer, offset) = (&self.app.tokenizer, &mut self.offsets[piece.choice]);
        if self.prompt_only {
            piece.text.clear();
            piece.tokens.clear();
        }
        let mut logprobs = OfCompletion::default();
        let echoed = self.echoed[piece.choice].take();
        if let Some((tokens, text)) = &echoed {
            piece.text.insert_str(0, text);
            let known = piece.prompt.iter().flatten().map(Some);
            let all = tokens.iter().zip(std::iter::once(None).chain(known));
            all.for_each(|(token, of)| logprobs.push(tokenizer, *token, of, offset));
        }
        let new = piece.tokens.iter();
        new.for_each(|(token, of)| logprobs.push(tokenizer, *token, of.as_ref(), offset));
        if is_part && echoed.is_none() && piece.text.is_empty() && piece.finish.is_none() && !self.logprobs {
            return None;
        }
        let logprobs = self.logprobs.then(|| logprobs.json());
        Some(json!({"index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}))
    }
}
