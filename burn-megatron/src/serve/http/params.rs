//! The parameters of a request, taken one by one: what is left over is unknown.

use std::fmt::Display;
use std::ops::RangeInclusive;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Most entries of `logit_bias`, which are looked at for every token.
const MOST_BIASES: usize = 1024;

/// The object of a request's body.
#[derive(Debug)]
pub(super) struct Params(Map<String, Value>);

impl Params {
    /// Those of a request. A body may be long: meanwhile other requests are answered.
    pub fn of(body: Result<Bytes, BytesRejection>) -> Result<Self, ApiError> {
        let body = body?;
        match tokio::task::block_in_place(|| serde_json::from_slice(&body)) {
            Ok(Value::Object(body)) => Ok(Self(body)),
            Ok(_) => Err(ApiError::new(StatusCode::BAD_REQUEST, "the body is JSON, but no object")),
            Err(error) => Err(ApiError::new(StatusCode::BAD_REQUEST, format!("the body is no JSON: {error}"))),
        }
    }

    /// Those of an object that is read already.
    pub fn new(object: Map<String, Value>) -> Self {
        Self(object)
    }

    /// The value of a parameter that is there and not null.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key).filter(|value| !value.is_null())
    }

    pub fn text(&mut self, key: &str) -> Result<Option<String>, ApiError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(ApiError::param(key, format!("a string is needed, this is {other}"))),
        }
    }

    pub fn bool(&mut self, key: &str) -> Result<bool, ApiError> {
        Ok(self.flag(key)?.unwrap_or(false))
    }

    pub fn flag(&mut self, key: &str) -> Result<Option<bool>, ApiError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(ApiError::param(key, format!("true or false is needed, this is {other}"))),
        }
    }

    pub fn float(&mut self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let number = |value: &Value| value.as_f64();
        self.number(key, "a number", number, range)
    }

    pub fn integer(&mut self, key: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        self.number(key, "an integer", Value::as_i64, range)
    }

    fn number<T: PartialOrd + Display + Copy>(
        &mut self,
        key: &str,
        kind: &str,
        number: impl Fn(&Value) -> Option<T>,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let (low, high) = (*range.start(), *range.end());
        match number(&value) {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            Some(number) => {
                let nearest = if number < low { low } else { high };
                let what = format!("{value} is not in {low} to {high}; nearest legal: {nearest}");
                Err(ApiError::param(key, what))
            }
            None if value.is_u64() => {
                Err(ApiError::param(key, format!("{value} is not in {low} to {high}; nearest legal: {high}")))
            }
            None => Err(ApiError::param(key, format!("{kind} is needed, this is {value}"))),
        }
    }

    /// A string or a list of them.
    pub fn strings(&mut self, key: &str) -> Result<Vec<String>, ApiError> {
        let wrong =
            |value: &Value| ApiError::param(key, format!("a string or a list of strings is needed, this is {value}"));
        match self.take(key) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(values)) => {
                values.iter().map(|value| value.as_str().map(String::from).ok_or_else(|| wrong(value))).collect()
            }
            Some(other) => Err(wrong(&other)),
        }
    }

    /// A list of tokens of the vocabulary.
    pub fn tokens(&mut self, key: &str, vocab_size: usize) -> Result<Option<Vec<i64>>, ApiError> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Array(values)) => values
                .iter()
                .map(|value| token(key, &value.to_string(), vocab_size))
                .collect::<Result<_, _>>()
                .map(Some),
            Some(other) => Err(ApiError::param(key, format!("a list of token ids is needed, this is {other}"))),
        }
    }

    /// What is added to the logits of some tokens, `{"50256": -100}`.
    pub fn biases(&mut self, key: &str, vocab_size: usize) -> Result<Vec<(Vec<i64>, f64)>, ApiError> {
        let biases = match self.take(key) {
            None => return Ok(Vec::new()),
            Some(Value::Object(biases)) if biases.len() <= MOST_BIASES => biases,
            Some(Value::Object(biases)) => {
                let what = format!("{} tokens are too many; nearest legal: {MOST_BIASES}", biases.len());
                return Err(ApiError::param(key, what));
            }
            Some(other) => {
                return Err(ApiError::param(
                    key,
                    format!("an object of token ids and numbers is needed, this is {other}"),
                ));
            }
        };
        let of = |(id, by): (&String, &Value)| match by.as_f64().filter(|by| (-100.0..=100.0).contains(by)) {
            Some(by) => Ok((vec![token(key, id, vocab_size)?], by)),
            None => Err(ApiError::param(key, format!("token {id}: a number from -100 to 100 is needed, this is {by}"))),
        };
        biases.iter().map(of).collect()
    }

    /// A parameter of OpenAI's that this server does not have: only values that change nothing are accepted.
    pub fn without(&mut self, key: &str, neutral: &[Value]) -> Result<(), ApiError> {
        match self.take(key) {
            Some(value) if !neutral.contains(&value) => Err(ApiError::param(
                key,
                format!("this server does not support it, and {value} would change the answer"),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses what nobody has taken, as OpenAI does.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.0.into_iter().next() {
            Some((key, _)) => Err(ApiError::param(key, "unrecognized request argument")),
            None => Ok(()),
        }
    }
}

fn token(key: &str, id: &str, vocab_size: usize) -> Result<i64, ApiError> {
    // Written as JSON writes numbers: not `+5` or `05`, which would name a token twice.
    let is_token = |token: &i64| (0..vocab_size as i64).contains(token) && token.to_string() == id;
    let token = id.parse().ok().filter(is_token);
    token.ok_or_else(|| {
        ApiError::param(key, format!("{id} is no token of the model, whose tokens are 0 to {}", vocab_size - 1))
    })
}
