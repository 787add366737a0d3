mod choices;
mod client;
mod formats;
mod refusals;
mod templates;

use std::io::BufRead;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use self::client::{CHAT, COMPLETIONS, alone, app, ask, completion, events, joined, open, post, sampled, with_server};
use super::*;
use crate::generate::Sampling;
use crate::serve::Statistics;

/// Clients of different lengths and seeds at the same time; each gets what `generate` gives it alone, whole and part
/// by part.
#[test]
fn answers_are_those_of_generate() {
    for layout in ["TP1", "TP2"] {
        let statistics = with_server(layout, |address, _| {
            let client = |seed: u64| {
                let prompt = &"theQuickBrownFoxJumpsOver"[..1 + seed as usize * 3];
                let (tokens, text) = alone(prompt, 5 + seed as usize, sampled(seed));
                let body = completion(prompt, 5 + seed as usize, seed);
                let (status, whole) = post(address, COMPLETIONS, &body);
                let choice = &whole["choices"][0];
                assert_eq!((status, choice["text"].as_str()), (200, Some(text.as_str())), "{whole}");
                assert_eq!(whole["usage"]["completion_tokens"], tokens.len());
                let reason = if tokens.last() == Some(&60) { "stop" } else { "length" };
                assert_eq!(choice["finish_reason"], reason);
                let mut streamed = body;
                (streamed["stream"], streamed["stream_options"]) = (json!(true), json!({"include_usage": true}));
                let mut parts = events(address, COMPLETIONS, &streamed);
                let usage = parts.pop().unwrap()["usage"].clone();
                assert_eq!(usage["total_tokens"], whole["usage"]["total_tokens"]);
                // The whole answer has read it all, if nobody needed the memory since.
                assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().is_some(), "{usage}");
                assert_eq!(joined(&parts, |part| part["choices"][0]["text"].as_str()), text);
                assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], reason);
            };
            thread::scope(|scope| (0..7).map(|seed| scope.spawn(move || client(seed))).for_each(drop));
        });
        assert_eq!((statistics.used_blocks, statistics.failed, statistics.cancelled), (0, 0, 0), "{layout}");
    }
}

#[test]
fn a_chat_is_the_templates_text() {
    with_server("TP1", |address, _| {
        let (_, text) = alone("uHia", 12, Sampling::greedy());
        let body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "temperature": 0,
            "max_completion_tokens": 12, "user": "me"});
        let (status, whole) = post(address, CHAT, &body);
        assert_eq!((status, &whole["object"], &whole["model"]), (200, &json!("chat.completion"), &json!("tiny")));
        assert_eq!(whole["choices"][0]["message"], json!({"role": "assistant", "content": text}));
        assert_eq!(whole["usage"]["prompt_tokens"], 4);
        let mut streamed = body;
        streamed["stream"] = json!(true);
        let parts = events(address, CHAT, &streamed);
        assert_eq!(parts[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(joined(&parts, |part| part["choices"][0]["delta"]["content"].as_str()), text);
        // The other model says something else.
        streamed["model"] = json!("other");
        let parts = events(address, CHAT, &streamed);
        assert_ne!(joined(&parts, |part| part["choices"][0]["delta"]["content"].as_str()), text);
    });
}

#[test]
fn stop_strings_end_a_text_before_them() {
    let statistics = with_server("TP1", |address, _| {
        let (_, text) = alone("abc", 24, Sampling::greedy());
        let stop = &text[6..9];
        let before = &text[..text.find(stop).unwrap()];
        // So many that none ends before the server hears of its stop string.
        let mut body = json!({"prompt": "abc", "max_tokens": 600, "temperature": 0, "stop": ["never", stop]});
        let (_, whole) = post(address, COMPLETIONS, &body);
        let choice = &whole["choices"][0];
        assert_eq!((choice["text"].as_str(), choice["finish_reason"].as_str()), (Some(before), Some("stop")));
        body["stream"] = json!(true);
        assert_eq!(joined(&events(address, COMPLETIONS, &body), |part| part["choices"][0]["text"].as_str()), before);
        // Next to a choice without it, which comes first.
        let is_without = |prompt: &&str| !alone(prompt, 600, Sampling::greedy()).1.contains(stop);
        let other = ["b", "c", "d", "e", "f", "g", "h"].into_iter().find(is_without).expect("a text without it");
        let body =
            json!({"prompt": [other, "abc"], "max_tokens": 600, "temperature": 0, "stop": stop, "ignore_eos": true});
        let (_, whole) = post(address, COMPLETIONS, &body);
        assert_eq!(
            ["length", "stop"].map(|finish| json!(finish)),
            [0, 1].map(|at| whole["choices"][at]["finish_reason"].clone())
        );
    });
    assert_eq!((statistics.used_blocks, statistics.running), (0, 0));
    assert_eq!((statistics.full, statistics.stopped, statistics.cancelled), (1, 3, 0));
}

/// The log-softmax itself is compared in the tests of the ranks; here its forms, and that parts are the whole.
#[test]
fn log_probabilities_come_in_openais_forms() {
    with_server("TP1", |address, _| {
        let (tokens, _) = alone("abc", 6, Sampling::greedy());
        let mut body = json!({"prompt": "abc", "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": true});
        let (_, whole) = post(address, COMPLETIONS, &body);
        let of = &whole["choices"][0]["logprobs"];
        assert_eq!(of["tokens"].as_array().unwrap().len(), 3 + tokens.len());
        assert_eq!(
            (&of["tokens"][0], &of["token_logprobs"][0], &of["text_offset"][4]),
            (&json!("a"), &Value::Null, &json!(4))
        );
        assert!(whole["choices"][0]["text"].as_str().unwrap().starts_with("abc"));
        for index in 3..of["tokens"].as_array().unwrap().len() {
            let (token, top) = (of["tokens"][index].as_str().unwrap(), of["top_logprobs"][index].as_object().unwrap());
            assert_eq!((top.len(), &top[token]), (2, &of["token_logprobs"][index]), "a greedy token is the likeliest");
        }
        body["stream"] = json!(true);
        let parts = events(address, COMPLETIONS, &body);
        let lists = parts.iter().flat_map(|part| part["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap());
        assert_eq!(lists.collect::<Vec<_>>(), of["token_logprobs"].as_array().unwrap().iter().collect::<Vec<_>>());
        body["logprobs"] = json!(0);
        body["stream"] = json!(false);
        let (_, whole) = post(address, COMPLETIONS, &body);
        let of = &whole["choices"][0]["logprobs"];
        assert_eq!(of["top_logprobs"][3], json!({of["tokens"][3].as_str().unwrap(): of["token_logprobs"][3]}));
        // The prompt alone.
        let body = json!({"prompt": [0, 1, 2], "max_tokens": 0, "logprobs": 0, "echo": true});
        let (_, prompt) = post(address, COMPLETIONS, &body);
        assert_eq!((&prompt["choices"][0]["text"], &prompt["usage"]["completion_tokens"]), (&json!("abc"), &json!(0)));
        let [alone, with] = [&prompt["choices"][0]["logprobs"]["token_logprobs"], &of["token_logprobs"]];
        assert_eq!(alone.as_array().unwrap()[..], with.as_array().unwrap()[..3]);
        let body = json!({"messages": [{"role": "user", "content": "b"}], "max_tokens": 3, "logprobs": true, "top_logprobs": 2});
        let (_, chat) = post(address, CHAT, &body);
        let content = chat["choices"][0]["logprobs"]["content"].as_array().unwrap();
        assert!(
            !content.is_empty() && content.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2)
        );
    });
}

/// Blocks have four positions; `a` is a token.
#[test]
fn usage_says_how_much_of_the_prompts_was_cached() {
    let statistics = with_server("TP1", |address, _| {
        let cached = |prompt: Value, n: usize, more: (&str, Value)| {
            let mut body = completion("", 3, 1);
            (body["prompt"], body["n"], body[more.0]) = (prompt, json!(n), more.1);
            let usage = post(address, COMPLETIONS, &body).1["usage"].clone();
            (
                usage["prompt_tokens"].as_u64().unwrap(),
                usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
            )
        };
        let none = || ("user", json!("me"));
        // Of three choices the second and third find what the first has read, which a prompt is not charged less for.
        assert_eq!(cached(json!("abcdefghij"), 3, none()), (10, 0));
        assert_eq!(cached(json!("abcdefghij"), 3, none()), (10, 8));
        assert_eq!(cached(json!("abcdefgh"), 1, none()), (8, 4), "the last token is read");
        assert_eq!(cached(json!(["abcdexxx", "abcdefghijklm"]), 2, none()), (21, 4 + 8));
        assert_eq!(cached(json!("abcdefghij"), 1, ("model", json!("other"))), (10, 0));
        let body = json!({"prompt": "abcdefghij", "max_tokens": 2, "logprobs": 1, "echo": true});
        let whole = post(address, COMPLETIONS, &body).1;
        assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "all logits are wanted");
        let mut body = completion("abcdefghij", 3, 1);
        (body["stream"], body["stream_options"]) = (json!(true), json!({"include_usage": true}));
        let last = events(address, COMPLETIONS, &body).pop().unwrap();
        assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 8);
        let metrics = ask(address, "GET", "/metrics", "").1;
        let count = |name: &str| {
            let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("burn_megatron_{name} ")));
            line.unwrap_or_else(|| panic!("{metrics}")).parse::<u64>().unwrap()
        };
        assert_eq!(count("prefix_cache_queries_total"), 30 + 30 + 8 + 42 + 10 + 10);
        assert_eq!(count("prefix_cache_hits_total"), 16 + 24 + 4 + (4 + 4 + 8 + 12) + 8);
    });
    assert_eq!((statistics.used_blocks, statistics.failed), (0, 0));
}

#[test]
fn a_client_that_is_gone_frees_its_sequence() {
    let statistics = with_server("TP1", |address, app| {
        let mut body = completion("abc", 4000, 1);
        (body["stream"], body["ignore_eos"], body["n"]) = (json!(true), json!(true), json!(6));
        let mut stream = open(address, "POST", COMPLETIONS, &body.to_string());
        let mut line = String::new();
        while !line.starts_with("data: ") {
            line.clear();
            stream.read_line(&mut line).unwrap();
        }
        let wait_for = |is_so: &dyn Fn(Statistics) -> bool| {
            let start = Instant::now();
            while !is_so(app.requests.statistics()) {
                assert!(start.elapsed() < Duration::from_secs(60), "{:?}", app.requests.statistics());
                thread::sleep(Duration::from_millis(5));
            }
        };
        // There are four places: two of the six wait, and so does another client's, who leaves before it begins.
        let waits = open(address, "POST", COMPLETIONS, &json!({"prompt": "abc", "stream": true}).to_string());
        wait_for(&|now| now.waiting == 3);
        drop(waits);
        wait_for(&|now| now.waiting == 2);
        drop(stream);
        wait_for(&|now| now.running + now.waiting == 0);
        // The server answers the next.
        assert_eq!(post(address, COMPLETIONS, &json!({"prompt": "abc", "max_tokens": 3, "ignore_eos": true})).0, 200);
    });
    assert_eq!((statistics.used_blocks, statistics.cancelled, statistics.full, statistics.failed), (0, 7, 1, 0));
}

#[test]
fn models_health_and_metrics() {
    with_server("TP1", |address, app| {
        let (status, models) = ask(address, "GET", "/v1/models", "");
        let models: Value = serde_json::from_str(&models).unwrap();
        assert_eq!((status, &models["data"][1]["id"]), (200, &json!("other")));
        assert_eq!(ask(address, "GET", "/v1/models/other", ""), (200, models["data"][1].to_string()));
        assert_eq!(ask(address, "GET", "/v1/models/huge", "").0, 404);
        assert_eq!(ask(address, "GET", "/health", "").0, 200);
        app.ready.store(false, Ordering::Relaxed);
        assert_eq!(ask(address, "GET", "/health", "").0, 503);
        post(address, COMPLETIONS, &json!({"prompt": "abcd", "max_tokens": 3, "ignore_eos": true}));
        let counted = || ask(address, "GET", "/metrics", "").1;
        let start = Instant::now();
        // Counted when the step after the last token begins.
        while !counted().contains("generation_tokens_total 3\n") && start.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(5));
        }
        let text = counted();
        assert!(text.contains("burn_megatron_prompt_tokens_total 4\n"), "{text}");
        assert!(text.contains("burn_megatron_request_success_total{finished_reason=\"length\"} 1\n"), "{text}");
    });
}

/// Without a template there is no chat, and who asks is told so.
#[test]
fn a_stopped_server_says_so() {
    let (requests, queue) = Requests::channel();
    let app = Arc::new(app(requests, false));
    let server = Server::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = server.address().unwrap();
    let (end, ended) = oneshot::channel::<()>();
    let http = thread::spawn(move || server.serve(app, async { drop(ended.await) }));
    let body = json!({"messages": [{"role": "user", "content": "a"}]});
    assert!(post(address, CHAT, &body).1["error"]["message"].as_str().unwrap().contains("no chat template"));
    drop(queue);
    let (status, answer) = post(address, COMPLETIONS, &json!({"prompt": "abc"}));
    assert_eq!((status, &answer["error"]["message"]), (503, &json!("the server has stopped")));
    drop(end);
    http.join().unwrap().unwrap();
}
