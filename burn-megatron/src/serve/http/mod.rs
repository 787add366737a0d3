//! OpenAI's completion and chat endpoints over HTTP.
//!
//! `GET /v1/models` and one of them, `POST /v1/completions`, `POST /v1/chat/completions`, `GET /health`, and `GET /metrics` in
//! Prometheus' text format. Handlers speak with the ranks through [`Requests`]; all text is made here.

mod api;
mod batch;
mod chat;
mod completions;
mod error;
mod guides;
mod logprobs;
mod metrics;
mod params;
mod reply;
mod speak;
#[cfg(test)]
mod tests;
mod tools;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokio::sync::oneshot;

pub use self::batch::{BatchRequest, answer_batch, batch_requests};
use self::error::ApiError;
pub use self::guides::Guides;
use super::Requests;
use crate::data::chat::ChatTokenizer;
use crate::data::token_bytes;
use crate::generate::Sampling;
use crate::json_grammar::TokenTexts;
use crate::logits::LogitsProcessors;

/// How long connections may take to end when the server stops.
const GRACE: Duration = Duration::from_secs(5);

/// Most bytes of a request's body.
const BODY: usize = 64 << 20;

/// What handlers need to know of the models that ranks serve.
pub struct App {
    /// The way to the ranks.
    pub requests: Requests,
    /// Names of the models, by number.
    pub models: Vec<String>,
    /// From text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Messages to text; without it there is no chat.
    pub chat: Option<ChatTokenizer>,
    /// How tokens are chosen, where a request does not say it.
    pub defaults: Sampling,
    /// What changes logits, where a request does not say it.
    pub processors: LogitsProcessors,
    /// Tokens that end a text.
    pub stop_tokens: Vec<i64>,
    /// What guides the texts of the last kinds that requests have asked for.
    pub guides: Guides,
    /// The bytes of tokens, once a request has asked for a text of a grammar.
    pub token_texts: OnceLock<Arc<TokenTexts>>,
    /// Most bytes of a token's text.
    pub longest_token: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Most tokens of a sequence.
    pub max_model_len: usize,
    /// Whether the ranks have their weights.
    pub ready: AtomicBool,
    /// Requests so far.
    pub count: AtomicU64,
}

impl App {
    fn model(&self, name: Option<&str>) -> Result<usize, ApiError> {
        match name {
            None => Ok(0),
            Some(name) => self
                .models
                .iter()
                .position(|model| model == name)
                .ok_or_else(|| ApiError::unknown_model(name, &self.models)),
        }
    }

    /// The tokens of the text under a key. A text that has more tokens than a sequence, whatever they are, is refused before
    /// it is encoded, which may take long: meanwhile other requests are answered.
    fn encode(&self, key: &str, text: &str, special: bool) -> Result<Vec<i64>, ApiError> {
        if text.len() / self.longest_token.max(1) > self.max_model_len {
            let (bytes, most) = (text.len(), self.max_model_len);
            return Err(ApiError::param(
                key,
                format!("{bytes} bytes have more tokens than the {most} of --max-model-len"),
            ));
        }
        let encoded = tokio::task::block_in_place(|| self.tokenizer.encode_fast(text, special));
        let ids = encoded.map_err(|error| ApiError::param(key, format!("it cannot be encoded: {error}")))?;
        Ok(ids.get_ids().iter().map(|id| i64::from(*id)).collect())
    }

    /// The bytes of the model's tokens, without special ones.
    fn token_texts(&self) -> Arc<TokenTexts> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let is_special = |token: &u32| added.get(token).is_some_and(|token| token.special);
        let text = |token| if is_special(&token) { Vec::new() } else { token_bytes(&self.tokenizer, token) };
        let texts = || Arc::new(TokenTexts::new((0..self.vocab_size as u32).map(text)));
        Arc::clone(tokio::task::block_in_place(|| self.token_texts.get_or_init(texts)))
    }

    /// A number that no other request has.
    fn next(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
}

impl Server {
    /// Listens at an address; port 0 is any free one. Requests wait until [`serve`](Self::serve) is called. Fails if
    /// the address is taken or none of this machine's.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// Where it listens. Fails if the system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers requests until Ctrl-C, SIGTERM, or `until` is ready; then it stops the ranks, whose sequences fail.
    /// Fails if the system refuses threads or the socket.
    pub fn serve(self, app: Arc<App>, until: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(self.listener)?;
            let (requests, loading) = (app.requests.clone(), Arc::clone(&app));
            let (tell, told) = oneshot::channel();
            let stop = async move {
                tokio::select! {
                    () = signalled() => {
                        // Ranks that load weights hear nothing.
                        if !loading.ready.load(Ordering::Relaxed) {
                            std::process::exit(130);
                        }
                    }
                    () = until => {}
                }
                requests.stop();
                // The receiver lives as long as this server.
                let _ = tell.send(());
            };
            tokio::select! {
                served = axum::serve(listener, router(app)).with_graceful_shutdown(stop) => served,
                () = late(told) => Ok(()),
            }
        })
    }
}

/// Ready when connections have had their time to end.
async fn late(told: oneshot::Receiver<()>) {
    match told.await {
        Ok(()) => tokio::time::sleep(GRACE).await,
        Err(_) => std::future::pending().await,
    }
}

/// Ctrl-C, or what an orchestrator sends.
async fn signalled() {
    let mut terminate = match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        Ok(terminate) => terminate,
        Err(error) => {
            log::warn!("SIGTERM ends this process at once: {error}");
            return std::future::pending().await;
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics::metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::completions))
        .layer(DefaultBodyLimit::max(BODY))
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this endpoint has another method")
        })
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "there is no such endpoint") })
        .with_state(app)
}

/// 200 when requests are answered at once, 503 while weights are loaded.
async fn health(State(app): State<Arc<App>>) -> StatusCode {
    if app.ready.load(Ordering::Relaxed) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let data: Vec<Value> = app.models.iter().map(|name| about(&app, name)).collect();
    Json(json!({"object": "list", "data": data})).into_response()
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    app.model(Some(&name))?;
    Ok(Json(about(&app, &name)).into_response())
}

fn about(app: &App, name: &str) -> Value {
    let max_model_len = app.max_model_len;
    json!({"id": name, "object": "model", "created": 0, "owned_by": "burn-megatron", "max_model_len": max_model_len})
}
