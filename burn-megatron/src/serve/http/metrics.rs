//! `GET /metrics`: what the ranks do, in Prometheus' text format and with vLLM's words.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use super::App;
use crate::serve::Statistics;

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text(&app.requests.statistics())).into_response()
}

fn text(of: &Statistics) -> String {
    let usage = of.used_blocks as f64 / of.num_blocks.max(1) as f64;
    let mut text = String::new();
    let mut add = |name: &str, kind: &str, help: &str, values: &[(&str, f64)]| {
        text += &format!("# HELP burn_megatron_{name} {help}\n# TYPE burn_megatron_{name} {kind}\n");
        for (labels, value) in values {
            text += &format!("burn_megatron_{name}{labels} {value}\n");
        }
    };
    add("num_requests_running", "gauge", "Sequences that run.", &[("", of.running as f64)]);
    add("num_requests_waiting", "gauge", "Sequences that wait.", &[("", of.waiting as f64)]);
    add("kv_cache_usage_perc", "gauge", "Share of the blocks of the KV cache that sequences have.", &[("", usage)]);
    add("prompt_tokens_total", "counter", "Tokens of prompts, read or cached.", &[("", of.prompt_tokens as f64)]);
    let [queries, hits] = [of.prefix_cache_queries, of.prefix_cache_hits].map(|tokens| tokens as f64);
    add(
        "prefix_cache_queries_total",
        "counter",
        "Tokens of prompts that were looked for in the cache.",
        &[("", queries)],
    );
    add("prefix_cache_hits_total", "counter", "Tokens of prompts that were in the cache.", &[("", hits)]);
    add("generation_tokens_total", "counter", "New tokens.", &[("", of.generation_tokens as f64)]);
    add("num_preemptions_total", "counter", "Sequences that gave up their blocks.", &[("", of.preemptions as f64)]);
    add("iterations_total", "counter", "Steps.", &[("", of.steps as f64)]);
    let finished = [
        (r#"{finished_reason="stop"}"#, of.stopped as f64),
        (r#"{finished_reason="length"}"#, of.full as f64),
        (r#"{finished_reason="abort"}"#, of.cancelled as f64),
        (r#"{finished_reason="error"}"#, of.failed as f64),
    ];
    add("request_success_total", "counter", "Sequences that ended, by reason.", &finished);
    text
}
