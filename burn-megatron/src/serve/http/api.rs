//! What both endpoints have in common: from parameters to sequences.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::guides::guide;
use super::params::Params;
use super::speak::Stop;
use crate::generate::{GenerateError, PENALTIES, Sampling};
use crate::logits::LogitsProcessors;
use crate::serve::{Request, RequestError};

/// Most choices for a prompt.
const MOST: i64 = 128;

/// Most prompts of a request (OpenAI's), and most sequences for them.
pub(super) const MOST_PROMPTS: usize = 2048;

/// Most likeliest tokens: OpenAI's limit for chat.
pub(super) const MOST_LOGPROBS: i64 = 20;

/// Parameters that say nothing of the text.
const IGNORED: &str = "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention";

/// The parameters that both endpoints have.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Common {
    pub model: usize,
    /// Of every sequence, but for the seed.
    pub sampling: Sampling,
    pub processors: Arc<LogitsProcessors>,
    /// As the request says it, not the model.
    min_tokens: Option<usize>,
    /// Of the first choice of each prompt.
    pub seed: Option<u64>,
    /// Choices for each prompt.
    pub n: usize,
    pub max_tokens: Option<usize>,
    pub stop: Stop,
    pub stop_tokens: Vec<i64>,
    pub stream: bool,
    pub include_usage: bool,
}

impl Common {
    /// Takes them, and refuses what would change the answer and is not supported. `least` new tokens must be asked for. An answer
    /// that must be a call is of the schema of `calls`.
    pub fn take(params: &mut Params, app: &App, least: i64, calls: Option<&Value>) -> Result<Self, ApiError> {
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
            ..*defaults
        };
        let min_tokens = params.integer("min_tokens", 0..=i64::from(u32::MAX))?.map(|tokens| tokens as usize);
        let processors = Arc::new(processors(params, app, min_tokens, calls)?);
        let seed = params.integer("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64);
        let n = params.integer("n", 1..=MOST)?.unwrap_or(1) as usize;
        let completion = params.integer("max_completion_tokens", least..=i64::MAX)?;
        let max_tokens = params.integer("max_tokens", least..=i64::MAX)?;
        let stop = Stop {
            strings: params.strings("stop")?,
            is_shown: params.bool("include_stop_str_in_output")?,
            min_tokens: processors.min_new_tokens,
        };
        // For measurements (vLLM's): the text is as long as asked for, whatever it says.
        let goes_on = params.bool("ignore_eos")? && processors.guide.is_none();
        let mut stop_tokens = if goes_on { Vec::new() } else { app.stop_tokens.clone() };
        stop_tokens.extend(params.tokens("stop_token_ids", app.vocab_size)?.unwrap_or_default());
        let stream = params.bool("stream")?;
        let include_usage = stream_options(params, stream)?;
        params.without("best_of", &[json!(n)])?;
        IGNORED.split(' ').for_each(|key| drop(params.take(key)));
        let max_tokens = completion.or(max_tokens).map(|tokens| tokens as usize);
        Ok(Self {
            model,
            sampling,
            processors,
            min_tokens,
            seed,
            n,
            max_tokens,
            stop,
            stop_tokens,
            stream,
            include_usage,
        })
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
                stop_tokens: self.stop_tokens.clone(),
                processors: Arc::clone(&self.processors),
                // Each choice has draws of its own; the first has those of the seed. Without one no two sequences share draws.
                sampling: Sampling {
                    seed: self.seed.map_or_else(random, |seed| seed.wrapping_add(choice as u64)),
                    ..self.sampling
                },
                logprobs,
                prompt_logprobs,
            };
            request.check(app.vocab_size, app.max_model_len).map_err(refused)?;
            match self.min_tokens.filter(|least| *least > request.max_tokens) {
                Some(least) => {
                    let most = request.max_tokens;
                    let what = format!("{least} is more than the {most} of max_tokens; nearest legal: {most}");
                    Err(ApiError::param("min_tokens", what))
                }
                None => Ok(request),
            }
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
        RequestError::Generate(GenerateError::EmptyPrompt | GenerateError::UnknownToken { .. }) => {
            (Some("prompt"), None)
        }
        RequestError::Generate(_) => (None, None),
    };
    ApiError { param: param.map(String::from), code, ..ApiError::new(StatusCode::BAD_REQUEST, error.to_string()) }
}

fn stream_options(params: &mut Params, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = params.take("stream_options") else { return Ok(false) };
    if !stream {
        return Err(ApiError::param("stream_options", "it has a meaning with stream only"));
    }
    let named = |error: ApiError| ApiError { param: Some("stream_options".into()), ..error };
    let Value::Object(options) = options else {
        return Err(ApiError::param("stream_options", format!("an object is needed, this is {options}")));
    };
    let mut options = Params::new(options);
    let include_usage = options.bool("include_usage").map_err(named)?;
    options.finish().map_err(named)?;
    Ok(include_usage)
}

/// The model's rules with those of the request.
fn processors(
    params: &mut Params,
    app: &App,
    min_tokens: Option<usize>,
    calls: Option<&Value>,
) -> Result<LogitsProcessors, ApiError> {
    let of = &app.processors;
    let ngram = params.integer("no_repeat_ngram_size", 0..=i64::from(u32::MAX))?;
    let allowed = params.tokens("allowed_token_ids", app.vocab_size)?;
    if allowed.as_ref().is_some_and(Vec::is_empty) {
        return Err(ApiError::param(
            "allowed_token_ids",
            "no token would be left; nearest legal: one token, or null for all",
        ));
    }
    let presence = params.float("presence_penalty", -2.0..=2.0)?;
    let frequency = params.float("frequency_penalty", -2.0..=2.0)?;
    let mut rules = LogitsProcessors {
        no_repeat_ngram_size: ngram.map_or(of.no_repeat_ngram_size, |size| size as usize),
        presence_penalty: presence.unwrap_or(of.presence_penalty),
        frequency_penalty: frequency.unwrap_or(of.frequency_penalty),
        allowed_token_ids: allowed.unwrap_or_default(),
        guide: guide(params, app, calls)?,
        ..of.clone()
    }
    .with_min_new_tokens(min_tokens);
    rules.sequence_bias.extend(params.biases("logit_bias", app.vocab_size)?);
    for word in params.strings("bad_words")? {
        rules.bad_words_ids.extend(spellings(app, &word)?);
    }
    Ok(rules)
}

/// The tokens of a word at the beginning of a text, and behind a space if these are as many others (vLLM's rule).
fn spellings(app: &App, word: &str) -> Result<Vec<Vec<i64>>, ApiError> {
    let word = word.trim_start();
    let plain = app.encode("bad_words", word, false)?;
    let spaced = app.encode("bad_words", &format!(" {word}"), false)?;
    let differs = spaced.len() == plain.len() && spaced.first() != plain.first();
    let all = [Some(plain), Some(spaced).filter(|_| differs)].into_iter().flatten();
    Ok(all.filter(|tokens| !tokens.is_empty()).collect())
}

/// A seed for who gives none: another one with every call and every start.
fn random() -> u64 {
    RandomState::new().hash_one(())
}
