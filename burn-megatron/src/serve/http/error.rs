//! Errors in OpenAI's form.

use axum::Json;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// What went wrong, with the parameter that is to blame.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ApiError {
    pub status: StatusCode,
    pub message: String,
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// A parameter is wrong.
    pub fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        Self {
            param: Some(param.clone()),
            ..Self::new(StatusCode::BAD_REQUEST, format!("{param}: {}", message.into()))
        }
    }

    pub fn unknown_model(name: &str, known: &[String]) -> Self {
        let error = Self::param("model", format!("there is no model `{name}`; this server has {}", known.join(", ")));
        Self { status: StatusCode::NOT_FOUND, code: Some("model_not_found"), ..error }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub fn json(&self) -> Value {
        let kind = if self.status.is_server_error() { "server_error" } else { "invalid_request_error" };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// A body that could not be read.
impl From<BytesRejection> for ApiError {
    fn from(refused: BytesRejection) -> Self {
        let status = refused.status();
        match status {
            StatusCode::PAYLOAD_TOO_LARGE => {
                Self::new(status, format!("the body has more than {} MiB", super::BODY >> 20))
            }
            _ => Self::new(status, refused.body_text()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.json())).into_response()
    }
}
