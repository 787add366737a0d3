//! A file of requests in OpenAI's batch form, answered as a server would answer them one by one, many at a time.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::pin::pin;
use std::sync::Arc;

use axum::body::{Bytes, to_bytes};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::error::ApiError;
use super::{App, chat, completions};

/// An endpoint that a batch may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Completions,
    Chat,
}

const ENDPOINTS: [(&str, Endpoint); 2] =
    [("/v1/completions", Endpoint::Completions), ("/v1/chat/completions", Endpoint::Chat)];

/// A request of a file.
#[derive(Clone, Debug)]
pub struct BatchRequest {
    custom_id: String,
    endpoint: Endpoint,
    /// As it is written: templates see the order of its keys.
    body: Box<RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    custom_id: String,
    #[serde(default)]
    method: Option<String>,
    url: String,
    body: Box<RawValue>,
}

/// The requests of a file's text: one JSON object per line with `custom_id`, `url` and `body`.
///
/// # Errors
/// The number of the first line that is none, and why.
pub fn batch_requests(text: &str) -> Result<Vec<BatchRequest>, (usize, String)> {
    let (mut requests, mut known) = (Vec::new(), HashSet::new());
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let read = |line: &str| -> Result<BatchRequest, String> {
            let Line { custom_id, method, url, body } =
                serde_json::from_str(line).map_err(|error| error.to_string())?;
            if let Some(method) = method.filter(|method| method != "POST") {
                return Err(format!("method {method}: endpoints of a batch have POST"));
            }
            let endpoint = ENDPOINTS.iter().find(|(of, _)| *of == url).map(|(_, endpoint)| *endpoint);
            let legal = ENDPOINTS.map(|(url, _)| url).join(", ");
            let endpoint = endpoint.ok_or_else(|| format!("url {url}: there are {legal}"))?;
            let keys: Value = serde_json::from_str(body.get()).map_err(|error| format!("body: {error}"))?;
            if !keys.is_object() {
                return Err("body: a JSON object is needed".into());
            }
            if keys["stream"] == true {
                return Err("body: stream = true, but a batch has whole answers; nearest legal: false".into());
            }
            Ok(BatchRequest { custom_id, endpoint, body })
        };
        let request = read(line).map_err(|why| (index + 1, why))?;
        if !known.insert(request.custom_id.clone()) {
            return Err((index + 1, format!("custom_id {}: an earlier line has it already", request.custom_id)));
        }
        requests.push(request);
    }
    Ok(requests)
}

/// Answers all requests, so many at a time, and gives each answer's line to `write`, in the order of the requests. Returns how
/// many were refused or failed: their lines say why.
///
/// # Errors
/// If a line cannot be written, or the system refuses threads.
pub fn answer_batch(
    app: &Arc<App>,
    requests: Vec<BatchRequest>,
    at_once: usize,
    mut write: impl FnMut(&Value) -> io::Result<()>,
) -> io::Result<usize> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut failed = 0;
    let answers = requests.into_iter().map(|request| answer(Arc::clone(app), request));
    runtime.block_on(in_order(answers, at_once, |(status, line)| {
        failed += usize::from(!status.is_success());
        write(&line)
    }))?;
    Ok(failed)
}

/// Runs so many at once, and writes what they give in their order. One that ends before an earlier one makes room for the next.
async fn in_order<T>(
    all: impl Iterator<Item = impl Future<Output = T>>,
    at_once: usize,
    mut write: impl FnMut(T) -> io::Result<()>,
) -> io::Result<()> {
    let numbered = all.enumerate().map(|(at, one)| async move { (at, one.await) });
    let mut ended = pin!(stream::iter(numbered).buffer_unordered(at_once));
    let (mut waiting, mut next) = (BTreeMap::new(), 0);
    while let Some((at, one)) = ended.next().await {
        waiting.insert(at, one);
        while let Some(one) = waiting.remove(&next) {
            write(one)?;
            next += 1;
        }
    }
    Ok(())
}

async fn answer(app: Arc<App>, request: BatchRequest) -> (StatusCode, Value) {
    let BatchRequest { custom_id, endpoint, body } = request;
    let (id, bytes) = (format!("batch_req_{:x}", app.next()), Ok(Bytes::from(body.get().to_owned())));
    let answered: Result<Response, ApiError> = match endpoint {
        Endpoint::Completions => completions::completions(State(app), bytes).await,
        Endpoint::Chat => chat::completions(State(app), bytes).await,
    };
    let response = answered.unwrap_or_else(IntoResponse::into_response);
    let status = response.status();
    let body = to_bytes(response.into_body(), usize::MAX).await.ok();
    let body: Value = body.and_then(|body| serde_json::from_slice(&body).ok()).unwrap_or_default();
    let response = json!({"status_code": status.as_u16(), "request_id": id, "body": body});
    (status, json!({"id": id, "custom_id": custom_id, "response": response, "error": null}))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    /// The first one waits for the last, so ones behind it have to start while two may run.
    #[test]
    fn a_long_answer_does_not_hold_up_those_behind_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (ended, until) = oneshot::channel::<()>();
        let (mut ended, mut until) = (Some(ended), Some(until));
        let all = (0..6).map(|at| {
            let until = until.take();
            let ended = if at == 5 { ended.take() } else { None };
            async move {
                if let Some(until) = until {
                    until.await.unwrap();
                }
                ended.map(|ended| ended.send(()));
                at
            }
        });
        let mut written = Vec::new();
        let run = in_order(all, 2, |at| {
            written.push(at);
            Ok(())
        });
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), run).await }).unwrap().unwrap();
        assert_eq!(written, (0..6).collect::<Vec<_>>());
    }

    #[test]
    fn lines_that_are_no_requests_are_named() {
        let refused = |line: &str| {
            let good = r#"{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}"#;
            let (number, why) = batch_requests(&format!("{good}\n\n{line}\n")).unwrap_err();
            assert_eq!(number, 3);
            why
        };
        says!(refused("{"), "EOF");
        says!(refused(r#"{"custom_id": "b", "body": {}}"#), "missing field `url`");
        says!(
            refused(r#"{"custom_id": "b", "url": "/v1/embeddings", "body": {}}"#),
            "there are /v1/completions, /v1/chat/completions"
        );
        says!(
            refused(r#"{"custom_id": "a", "url": "/v1/completions", "body": {}}"#),
            "custom_id a: an earlier line has it already"
        );
        says!(refused(r#"{"custom_id": "b", "url": "/v1/completions", "body": {"stream": true}}"#), "whole answers");
        says!(refused(r#"{"custom_id": "b", "url": "/v1/completions", "body": 3}"#), "body: a JSON object is needed");
        says!(refused(r#"{"custom_id": "b", "method": "GET", "url": "/v1/completions", "body": {}}"#), "method GET");
        assert_eq!(batch_requests("\n").map(|all| all.len()), Ok(0));
    }

    #[test]
    fn a_body_reaches_its_endpoint_as_it_is_written() {
        let body = r#"{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f", "b": 1, "a": 2}}]}"#;
        let line = format!(r#"{{"custom_id": "a", "url": "/v1/chat/completions", "body": {body}}}"#);
        assert_eq!(batch_requests(&line).unwrap()[0].body.get(), body);
    }
}
