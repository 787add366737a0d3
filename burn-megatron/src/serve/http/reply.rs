//! Answers: whole, or part by part as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::future::try_join_all;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::App;
use super::error::ApiError;
use super::speak::{Piece, Running, Stop, speak, submit};
use crate::serve::Request;

/// What one endpoint makes of parts of texts.
pub(super) trait Form: Send + 'static {
    /// The object around choices.
    fn envelope(&self, choices: Vec<Value>, is_part: bool) -> Value;

    /// A choice, or a part of one; `None` if the part has nothing to show.
    fn choice(&mut self, piece: Piece, is_part: bool) -> Option<Value>;
}

/// An answer to `requests`, `n` sequences for each prompt; the prompts have `prompt_tokens` tokens, each counted once.
pub(super) struct Job {
    pub app: Arc<App>,
    pub requests: Vec<Request>,
    pub stop: Stop,
    pub n: usize,
    pub prompt_tokens: usize,
    /// The new token was only asked for because a sequence has one.
    pub prompt_only: bool,
    pub stream: bool,
    pub include_usage: bool,
}

impl Job {
    pub async fn answer(self, form: impl Form) -> Result<Response, ApiError> {
        let app = Arc::clone(&self.app);
        // All at once: the ranks read them together.
        let running =
            self.requests.iter().map(|request| submit(&app, request.clone())).collect::<Result<Vec<_>, _>>()?;
        if self.stream { Ok(self.part_by_part(running, form)) } else { self.whole(running, form).await }
    }

    async fn whole(self, running: Vec<Running>, mut form: impl Form) -> Result<Response, ApiError> {
        let whole = async |(choice, running)| {
            let mut whole = Piece { choice, ..Piece::default() };
            speak(&self.app.tokenizer, choice, running, self.stop.clone(), |piece| {
                whole.text += &piece.text;
                whole.tokens.extend(piece.tokens);
                whole.prompt = whole.prompt.take().or(piece.prompt);
                whole.cached += piece.cached;
                whole.finish = piece.finish;
            })
            .await?;
            Ok::<_, ApiError>(whole)
        };
        let (mut choices, mut used) = (Vec::new(), Used::default());
        // Together: a choice ends at its own stop string, whatever the others do.
        for whole in try_join_all(running.into_iter().enumerate().map(whole)).await? {
            used.add(&whole, self.n);
            choices.extend(form.choice(whole, false));
        }
        let mut answer = form.envelope(choices, false);
        answer["usage"] = self.usage(&used);
        Ok(Json(answer).into_response())
    }

    fn part_by_part(self, running: Vec<Running>, mut form: impl Form) -> Response {
        let (pieces, mut receive) = unbounded_channel();
        for (choice, running) in running.into_iter().enumerate() {
            tokio::spawn(say(Arc::clone(&self.app), choice, running, self.stop.clone(), pieces.clone()));
        }
        drop(pieces);
        let (send, parts) = unbounded_channel::<String>();
        tokio::spawn(async move {
            let mut used = Used::default();
            loop {
                // Without a listener the sequences end as their channel does, also before they begin.
                let piece = tokio::select! {
                    piece = receive.recv() => piece,
                    () = send.closed() => return,
                };
                let Some(piece) = piece else { break };
                let part = match piece {
                    Ok(piece) => {
                        used.add(&piece, self.n);
                        form.choice(piece, true).map(|choice| form.envelope(vec![choice], true))
                    }
                    Err(error) => Some(ApiError::json(&error)),
                };
                part.into_iter().for_each(|part| drop(send.send(part.to_string())));
            }
            if self.include_usage {
                let mut last = form.envelope(Vec::new(), true);
                last["usage"] = self.usage(&used);
                let _ = send.send(last.to_string());
            }
            let _ = send.send("[DONE]".into());
        });
        let events = stream::unfold(parts, |mut parts| async move {
            let part = parts.recv().await?;
            Some((Ok::<_, Infallible>(Event::default().data(part)), parts))
        });
        Sse::new(events).keep_alive(KeepAlive::default()).into_response()
    }

    fn usage(&self, used: &Used) -> Value {
        let prompt_tokens = self.prompt_tokens;
        let completion_tokens = if self.prompt_only { 0 } else { used.tokens };
        let total_tokens = prompt_tokens + completion_tokens;
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": total_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached},
        })
    }
}

/// Tokens of an answer.
#[derive(Debug, Default)]
struct Used {
    /// New ones, of all choices.
    tokens: usize,
    /// Those of the prompts that were in the cache. A prompt is counted once, for its first choice: the others find what that
    /// one has read.
    cached: usize,
}

impl Used {
    /// Counts a part of a choice, of which there are `n` for each prompt.
    fn add(&mut self, piece: &Piece, n: usize) {
        self.tokens += piece.tokens.len();
        if piece.choice.is_multiple_of(n) {
            self.cached += piece.cached;
        }
    }
}

/// Sends the parts of a choice, until nobody listens.
async fn say(
    app: Arc<App>,
    choice: usize,
    running: Running,
    stop: Stop,
    pieces: UnboundedSender<Result<Piece, ApiError>>,
) {
    let give = |piece| drop(pieces.send(Ok(piece)));
    tokio::select! {
        said = speak(&app.tokenizer, choice, running, stop, give) => {
            if let Err(error) = said {
                let _ = pieces.send(Err(error));
            }
        }
        () = pieces.closed() => {}
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}
