//! What both endpoints have in common: from parameters to sequences.

use std::hash::{BuildHasher, RandomState};

use axum::http::StatusCode;
use serde_json::json;

use super::App;
use super::error::ApiError;
use super::params::Params;
use crate::generate::{PENALTIES, Sampling};
use crate::serve::{Request, RequestError};

/// Most choices for a prompt.
const MOST: i64 = 128;

/// Most prompts of a request (OpenAI's), and most sequences for them.
pub(super) const MOST_PROMPTS: usize = 2048;

/// Most likeliest tokens: OpenAI's limit for chat.
pub(super) const MOST_LOGPROBS: i64 = 20;

/// Parameters that say nothing of the text.
const IGNORED: &str =
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls";

/// The parameters that both endpoints have.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Common {
    pub model: usize,
    /// Of every sequence, but for the seed.
    pub sampling: Sampling,
    /// Of the first choice of each prompt.
    pub seed: Option<u64>,
    /// Choices for each prompt.
    pub n: usize,
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
    /// The text is as long as asked for, whatever it says (vLLM's, for measurements).
    pub ignore_eos: bool,
    pub stream: bool,
    pub include_usage: bool,
}

impl Common {
    /// Takes them, and refuses what would change the answer and is not supported. `least` new tokens must be asked for.
    pub fn take(params: &mut Params, app: &App, least: i64) -> Result<Self, ApiError> {
        let model = app.model(params.text("model")?.as_deref())?;
        let defaults = &app.defaults;
        let top_p = params.float("top_p", 0.0..=1.0)?;
        let sampling = Sampling {
            temperature: params.float("temperature", 0.0..=2.0)?.unwrap_or(defaults.temperature),
            // 0 and, as in vLLM, -1 mean all tokens.
            top_k: match params.integer("top_k", -1..=i64::from(u32::MAX))? {
                Some(k) => usize::try_from(k).ok().filter(|k| *k > 0),
                None => defaults.top_k,
            },
            // OpenAI allows 0, which leaves the likeliest token.
            top_p: top_p.map(|p| p.max(f64::MIN_POSITIVE)).or(defaults.top_p),
            min_p: params.float("min_p", 0.0..=1.0)?.or(defaults.min_p),
            repetition_penalty: params.float("repetition_penalty", PENALTIES)?.unwrap_or(defaults.repetition_penalty),
            seed: 0,
        };
        let seed = params.integer("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64);
        let n = params.integer("n", 1..=MOST)?.unwrap_or(1) as usize;
        let completion = params.integer("max_completion_tokens", least..=i64::MAX)?;
        let max_tokens = params.integer("max_tokens", least..=i64::MAX)?;
        let stop = params.strings("stop")?;
        let ignore_eos = params.bool("ignore_eos")?;
        let stream = params.bool("stream")?;
        let include_usage = stream_options(params, stream)?;
        for penalty in ["presence_penalty", "frequency_penalty"] {
            params.without(penalty, &[json!(0), json!(0.0)])?;
        }
        params.without("logit_bias", &[json!({})])?;
        params.without("best_of", &[json!(n)])?;
        IGNORED.split(' ').for_each(|key| drop(params.take(key)));
        let max_tokens = completion.or(max_tokens).map(|tokens| tokens as usize);
        Ok(Self { model, sampling, seed, n, max_tokens, stop, ignore_eos, stream, include_usage })
    }

    /// One sequence for each choice: all of the first prompt, then all of the next.
    pub fn requests(
        &self,
        app: &App,
        prompts: &[Vec<i64>],
        max_tokens: impl Fn(usize) -> usize,
        logprobs: Option<usize>,
        prompt_logprobs: bool,
    ) -> Result<Vec<Request>, ApiError> {
        let of = |prompt: &Vec<i64>, choice: usize| {
            let request = Request {
                model: self.model,
                prompt: prompt.clone(),
                max_tokens: max_tokens(prompt.len()),
                stop_tokens: if self.ignore_eos { Vec::new() } else { app.stop_tokens.clone() },
                // Each choice has draws of its own; the first has those of the seed. Without one no two sequences share draws.
                sampling: Sampling {
                    seed: self.seed.map_or_else(random, |seed| seed.wrapping_add(choice as u64)),
                    ..self.sampling
                },
                logprobs,
                prompt_logprobs,
            };
            request.check(app.vocab_size, app.max_model_len).map_err(refused)?;
            Ok(request)
        };
        prompts.iter().flat_map(|prompt| (0..self.n).map(move |choice| of(prompt, choice))).collect()
    }
}

pub(super) fn refused(error: RequestError) -> ApiError {
    let (param, code) = match &error {
        RequestError::TooLong { prompt, max_model_len, .. } if prompt >= max_model_len => {
            (Some("prompt"), Some("context_length_exceeded"))
        }
        RequestError::TooLong { .. } => (Some("max_tokens"), Some("context_length_exceeded")),
        RequestError::NoTokens => (Some("max_tokens"), None),
        RequestError::Generate(_) => (Some("prompt"), None),
    };
    ApiError { param: param.map(String::from), code, ..ApiError::new(StatusCode::BAD_REQUEST, error.to_string()) }
}

fn stream_options(params: &mut Params, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = params.take("stream_options") else { return Ok(false) };
    if !stream {
        return Err(ApiError::param("stream_options", "it has a meaning with stream only"));
    }
    let named = |error: ApiError| ApiError { param: Some("stream_options".into()), ..error };
    let mut options = Params::parse(options.to_string().as_bytes()).map_err(named)?;
    let include_usage = options.bool("include_usage").map_err(named)?;
    options.finish().map_err(named)?;
    Ok(include_usage)
}

/// A seed for who gives none: another one with every call and every start.
fn random() -> u64 {
    RandomState::new().hash_one(())
}
