//! `POST /v1/chat/completions`: the assistant's next message.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde_json::{Value, json};

use super::App;
use super::api::{Common, MOST_LOGPROBS};
use super::error::ApiError;
use super::logprobs::of_chat;
use super::params::Params;
use super::reply::{Form, Job, now};
use super::speak::Piece;

pub(super) async fn completions(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let mut params = Params::of(body)?;
    let common = Common::take(&mut params, &app, 1)?;
    let wanted = params.bool("logprobs")?;
    let top = params.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
    if top.is_some() && !wanted {
        return Err(ApiError::param("top_logprobs", "it has a meaning with logprobs only"));
    }
    params.without("tools", &[json!([])])?;
    params.without("tool_choice", &[json!("none"), json!("auto")])?;
    params.without("response_format", &[json!({"type": "text"})])?;
    params.without("reasoning_effort", &[])?;
    params.without("modalities", &[json!(["text"])])?;
    let messages = messages(&mut params)?;
    params.finish()?;
    let prompt = prompt(&app, &messages)?;
    let logprobs = wanted.then_some(top.unwrap_or(0) as usize);
    // As long as there is room, if nobody says how long.
    let room = |prompt: usize| common.max_tokens.unwrap_or(app.max_model_len.saturating_sub(prompt).max(1));
    let prompt_tokens = prompt.len();
    let requests = common.requests(&app, &[prompt], room, logprobs, false)?;
    let form = Chat {
        id: format!("chatcmpl-{:x}", app.next()),
        created: now(),
        model: app.models[common.model].clone(),
        begun: vec![false; requests.len()],
        logprobs: wanted,
        app: Arc::clone(&app),
    };
    let Common { n, stop, stream, include_usage, .. } = common;
    Job { app, requests, stop, n, prompt_tokens, prompt_only: false, stream, include_usage }.answer(form).await
}

fn prompt(app: &App, messages: &[(String, String)]) -> Result<Vec<i64>, ApiError> {
    let chat = app.chat.as_ref();
    let chat = chat.ok_or_else(|| ApiError::param("messages", "the model's tokenizer has no chat template"))?;
    let text = chat.prompt(messages).map_err(|error| ApiError::param("messages", error))?;
    app.encode("messages", &text, false)
}

/// Roles and texts.
fn messages(params: &mut Params) -> Result<Vec<(String, String)>, ApiError> {
    let messages = match params.take("messages") {
        Some(Value::Array(messages)) if !messages.is_empty() => messages,
        _ => return Err(ApiError::param("messages", "a list of at least one message is needed")),
    };
    let message = |(index, message): (usize, &Value)| {
        let wrong = |what: &str| ApiError::param(format!("messages[{index}]"), what);
        let role = message["role"].as_str().ok_or_else(|| wrong("it has no role"))?;
        // Clients send an assistant's messages back as they were, with keys that say nothing.
        let says = |value: &Value| !value.is_null() && *value != json!([]);
        let other = |(key, value): &(&String, &Value)| !matches!(key.as_str(), "role" | "content") && says(value);
        if let Some((key, _)) = message.as_object().into_iter().flatten().find(other) {
            return Err(wrong(&format!("this server does not support its key `{key}`, which may change the answer")));
        }
        let content = match &message["content"] {
            Value::String(text) => text.clone(),
            Value::Array(parts) => {
                let text = |part: &Value| match part["type"].as_str() {
                    Some("text") => part["text"].as_str().map(String::from),
                    _ => None,
                };
                let all = parts.iter().map(text).collect::<Option<Vec<String>>>();
                all.ok_or_else(|| wrong("only parts of the type `text` are supported"))?.concat()
            }
            _ => return Err(wrong("its content is neither a string nor a list of parts")),
        };
        Ok((role.to_string(), content))
    };
    messages.iter().enumerate().map(message).collect()
}

struct Chat {
    app: Arc<App>,
    id: String,
    created: u64,
    model: String,
    /// By choice: whether its first part was given, which has the role.
    begun: Vec<bool>,
    logprobs: bool,
}

impl Form for Chat {
    fn envelope(&self, choices: Vec<Value>, is_part: bool) -> Value {
        let object = if is_part { "chat.completion.chunk" } else { "chat.completion" };
        let Self { id, created, model, .. } = self;
        json!({"id": id, "object": object, "created": created, "model": model, "choices": choices})
    }

    fn choice(&mut self, piece: Piece, is_part: bool) -> Option<Value> {
        let Piece { choice, text, tokens, finish, .. } = piece;
        let is_first = !std::mem::replace(&mut self.begun[choice], true);
        if is_part && text.is_empty() && finish.is_none() && !is_first && !self.logprobs {
            return None;
        }
        let of = |(token, logprobs): &(i64, Option<_>)| {
            logprobs.as_ref().map(|logprobs| of_chat(&self.app.tokenizer, *token, logprobs))
        };
        let logprobs = self.logprobs.then(|| json!({"content": tokens.iter().filter_map(of).collect::<Vec<_>>()}));
        let (key, message) = match is_part {
            false => ("message", json!({"role": "assistant", "content": text})),
            true if is_first => ("delta", json!({"role": "assistant", "content": text})),
            true => ("delta", json!({"content": text})),
        };
        let mut answer = json!({"index": choice, "logprobs": logprobs, "finish_reason": finish});
        answer[key] = message;
        Some(answer)
    }
}
