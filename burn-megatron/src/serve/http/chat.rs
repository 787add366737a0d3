//! `POST /v1/chat/completions`: the assistant's next message.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::App;
use super::api::{Common, MOST_LOGPROBS};
use super::error::ApiError;
use super::logprobs::of_chat;
use super::params::Params;
use super::reply::{Form, Job, now};
use super::speak::Piece;
use super::tools::{CallReader, Tools};
use crate::data::chat::{Conversation, PromptBody};

pub(super) async fn completions(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = body?;
    // Once: messages and tools keep the order of their keys.
    let (body, others) = tokio::task::block_in_place(|| PromptBody::read(&body))
        .map_err(|what| ApiError::new(StatusCode::BAD_REQUEST, format!("the body is {what}")))?;
    let mut params = Params::new(others);
    let tools = Tools::take(&mut params)?;
    let common = Common::take(&mut params, &app, 1, tools.schema.as_ref())?;
    let wanted = params.bool("logprobs")?;
    let top = params.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
    if top.is_some() && !wanted {
        return Err(ApiError::param("top_logprobs", "it has a meaning with logprobs only"));
    }
    params.without("reasoning_effort", &[])?;
    params.without("modalities", &[json!(["text"])])?;
    let continues = params.bool("continue_final_message")?;
    if params.flag("add_generation_prompt")?.is_some_and(|prompted| prompted == continues) {
        return Err(ApiError::param("add_generation_prompt", "it is true unless continue_final_message is"));
    }
    params.finish()?;
    let row = tokio::task::block_in_place(|| body.conversation()).map_err(refused)?;
    let row = if tools.names.is_empty() { row.without_tools() } else { row };
    let prompt = prompt(&app, &if continues { row.continued() } else { row })?;
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
        calls: requests.iter().map(|_| tools.reader()).collect(),
        logprobs: wanted,
        app: Arc::clone(&app),
    };
    let Common { n, stop, stream, include_usage, .. } = common;
    Job { app, requests, stop, n, prompt_tokens, prompt_only: false, stream, include_usage }.answer(form).await
}

fn prompt(app: &App, row: &Conversation) -> Result<Vec<i64>, ApiError> {
    let chat = app.chat.as_ref();
    let chat = chat.ok_or_else(|| ApiError::param("messages", "the model's tokenizer has no chat template"))?;
    app.encode("messages", &chat.prompt_of(row).map_err(refused)?, false)
}

/// By the key that the message begins with.
fn refused(what: String) -> ApiError {
    let key = what.split([':', '.', ' ']).next().unwrap_or_default();
    let known = ["messages", "tools", "chat_template_kwargs"].iter().any(|known| key.starts_with(known));
    match known {
        true => ApiError { param: Some(key.into()), ..ApiError::new(StatusCode::BAD_REQUEST, what) },
        false => ApiError::param("messages", what),
    }
}

struct Chat {
    app: Arc<App>,
    id: String,
    created: u64,
    model: String,
    /// By choice: whether its first part was given, which has the role.
    begun: Vec<bool>,
    /// By choice, if there are tools.
    calls: Vec<Option<CallReader>>,
    logprobs: bool,
}

impl Form for Chat {
    fn envelope(&self, choices: Vec<Value>, is_part: bool) -> Value {
        let object = if is_part { "chat.completion.chunk" } else { "chat.completion" };
        let Self { id, created, model, .. } = self;
        json!({"id": id, "object": object, "created": created, "model": model, "choices": choices})
    }

    fn choice(&mut self, piece: Piece, is_part: bool) -> Option<Value> {
        let Piece { choice, mut text, tokens, mut finish, .. } = piece;
        let mut calls = Vec::new();
        if let Some(reader) = &mut self.calls[choice] {
            text = reader.push(&text);
            if finish.is_some() {
                let (rest, all) = reader.end();
                (text, calls) = (text + &rest, all);
                finish = if calls.is_empty() { finish } else { Some("tool_calls") };
            }
        }
        let is_first = !std::mem::replace(&mut self.begun[choice], true);
        if is_part && text.is_empty() && finish.is_none() && !is_first && !self.logprobs {
            return None;
        }
        let of = |(token, logprobs): &(i64, Option<_>)| {
            logprobs.as_ref().map(|logprobs| of_chat(&self.app.tokenizer, *token, logprobs))
        };
        let logprobs = self.logprobs.then(|| json!({"content": tokens.iter().filter_map(of).collect::<Vec<_>>()}));
        // OpenAI's content is null if there are only calls.
        let content = if text.is_empty() && !calls.is_empty() { Value::Null } else { text.into() };
        let (key, mut message) = match is_part {
            false => ("message", json!({"role": "assistant", "content": content})),
            true if is_first => ("delta", json!({"role": "assistant", "content": content})),
            true => ("delta", json!({"content": content})),
        };
        if !calls.is_empty() {
            let id = |at: usize| format!("{}-{choice}-{at}", self.id.replace("chatcmpl", "call"));
            message["tool_calls"] =
                calls.iter().enumerate().map(|(at, call)| call.json(at, &id(at), is_part)).collect();
        }
        let mut answer = json!({"index": choice, "logprobs": logprobs, "finish_reason": finish});
        answer[key] = message;
        Some(answer)
    }
}
