//! From the tokens of a sequence to its text.

use std::ops::ControlFlow;

use tokenizers::Tokenizer;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use axum::http::StatusCode;

use super::App;
use super::error::ApiError;
use crate::generate::TextStream;
use crate::serve::{Event, Finish, Request, StopStrings, Ticket, TokenLogprobs};

/// A sequence that was asked for. When it is dropped, the ranks forget it.
pub(super) struct Running {
    events: UnboundedReceiver<Event>,
    prompt: Vec<i64>,
    stop_tokens: Vec<i64>,
    ticket: Ticket,
}

/// Which texts end a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Stop {
    pub strings: Vec<String>,
    /// What ends the text, a string or a token, is shown too.
    pub is_shown: bool,
    /// So many new tokens are not looked at.
    pub min_tokens: usize,
}

/// A part of a text.
#[derive(Debug, Default)]
pub(super) struct Piece {
    /// Of which choice.
    pub choice: usize,
    pub text: String,
    /// The tokens that came since the last part; the text may lag behind.
    pub tokens: Vec<(i64, Option<TokenLogprobs>)>,
    /// Log-probabilities of the prompt's tokens but the first, with the first part.
    pub prompt: Option<Vec<TokenLogprobs>>,
    /// Tokens of the prompt that were in the cache, with the first part.
    pub cached: usize,
    /// With the last part.
    pub finish: Option<&'static str>,
}

pub(super) fn submit(app: &App, request: Request) -> Result<Running, ApiError> {
    let (send, events) = unbounded_channel();
    let (prompt, stop_tokens) = (request.prompt.clone(), request.stop_tokens.clone());
    let on_event = move |event| send.send(event).map_or(ControlFlow::Break(()), ControlFlow::Continue);
    let ticket = app.requests.submit(request, on_event);
    let ticket = ticket.map_err(|error| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()))?;
    Ok(Running { events, prompt, stop_tokens, ticket })
}

/// Gives the text of choice `choice` part by part, up to the first stop string.
pub(super) async fn speak(
    tokenizer: &Tokenizer,
    choice: usize,
    mut running: Running,
    Stop { strings, is_shown, min_tokens }: Stop,
    mut give: impl FnMut(Piece),
) -> Result<(), ApiError> {
    let mut stream = TextStream::after(tokenizer, &running.prompt);
    let mut stop = StopStrings::new(strings).shown(is_shown);
    let mut count = 0;
    let mut piece = Piece { choice, ..Piece::default() };
    let undecodable = |error| ApiError::internal(format!("a token cannot be decoded: {error}"));
    loop {
        let (token, logprobs, finish) = match running.events.recv().await {
            Some(Event::Token { token, logprobs, finish }) => (token, logprobs, finish),
            Some(Event::Prompt(logprobs)) => {
                piece.prompt = Some(logprobs);
                continue;
            }
            Some(Event::Cached(tokens)) => {
                piece.cached = tokens;
                continue;
            }
            Some(Event::Failed(why)) => return Err(ApiError::internal(why)),
            Some(Event::Refused(why)) => return Err(ApiError::new(StatusCode::BAD_REQUEST, why)),
            None => return Err(ApiError::internal("the server has stopped")),
        };
        piece.tokens.push((token, logprobs));
        count += 1;
        let mut text = match running.stop_tokens.contains(&token) && !is_shown {
            true => String::new(),
            false => stream.push(token).map_err(undecodable)?,
        };
        if finish.is_some() {
            text += &stream.rest().map_err(undecodable)?;
        }
        let (shown, stopped) = if count > min_tokens { stop.push(&text) } else { (text, false) };
        piece.text = shown;
        piece.finish = match finish {
            _ if stopped => Some("stop"),
            Some(Finish::Stop) => Some("stop"),
            Some(Finish::Length) => Some("length"),
            None => None,
        };
        if piece.finish.is_some() && !stopped {
            piece.text += &stop.rest();
        }
        let is_last = piece.finish.is_some();
        give(std::mem::replace(&mut piece, Piece { choice, ..Piece::default() }));
        if is_last {
            if finish.is_none() {
                running.ticket.complete();
            }
            return Ok(());
        }
    }
}
