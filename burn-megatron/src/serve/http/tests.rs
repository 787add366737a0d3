use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use models::{CausalLm, Llama, LlamaConfig, ParamBuilder};
use serde_json::Value;

use super::*;
use crate::generate::{GenerateOptions, Sampling, generate};
use crate::serve::{Queue, SchedulerConfig, run};

const VOCAB: usize = 61;

/// So long that a text is not written before its reader is gone.
const MAX_MODEL_LEN: usize = 4096;

/// A token for each of 60 characters, and the end.
fn tokenizer() -> Value {
    let letters = ('a'..='z').chain('A'..='Z').chain('0'..='7');
    let vocab: serde_json::Map<String, Value> =
        letters.enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
    json!({
        "version": "1.0",
        "added_tokens": [{"id": 60, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    })
}

fn config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: VOCAB,
        hidden_size: 32,
        intermediate_size: 48,
        num_key_value_heads: 2,
        initializer_range: 0.4,
        ..LlamaConfig::tiny()
    }
}

fn model(rank: &Rank, seed: u64) -> Llama {
    Llama::build(&config(), ParamBuilder::new(rank, FloatDType::F64, seed).without_autodiff()).unwrap()
}

fn app(requests: Requests, chat: bool) -> App {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer().to_string()).unwrap();
    let template =
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    App {
        requests,
        models: vec!["tiny".into(), "other".into()],
        tokenizer: Tokenizer::from_bytes(tokenizer().to_string()).unwrap(),
        chat: chat.then(|| ChatTokenizer::open(folder.path(), None).unwrap()),
        defaults: GenerationConfig::default(),
        stop_tokens: vec![60],
        vocab_size: VOCAB,
        max_model_len: MAX_MODEL_LEN,
        ready: AtomicBool::new(true),
        count: AtomicU64::new(0),
    }
}

/// Runs `client` against a server of two models in a layout, and gives the statistics at the end.
fn with_server(layout: &str, client: impl FnOnce(SocketAddr, &App)) -> crate::serve::Statistics {
    let (requests, queue) = Requests::channel();
    let app = Arc::new(app(requests.clone(), true));
    let server = Server::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = server.address().unwrap();
    let (end, ended) = oneshot::channel::<()>();
    let handlers = Arc::clone(&app);
    let http = thread::spawn(move || server.serve(handlers, async { drop(ended.await) }));
    let layout = layout.to_string();
    let ranks = thread::spawn(move || ranks(&layout, queue));
    client(address, &app);
    drop(end);
    http.join().unwrap().unwrap();
    ranks.join().unwrap();
    requests.statistics()
}

fn ranks(layout: &str, queue: Queue) {
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: MAX_MODEL_LEN,
        block_size: 4,
        num_blocks: MAX_MODEL_LEN / 2,
    };
    let (queue, mesh) = (Mutex::new(Some(queue)), Mesh::new(layout.parse().unwrap()).unwrap());
    launch(&mesh, &[Device::flex()], |rank: Rank| {
        let queue = if rank.rank == 0 { queue.lock().unwrap().take() } else { None };
        Ok(run(&rank, &[model(&rank, 11), model(&rank, 12)], config, queue)?)
    })
    .unwrap();
}

/// What `generate` says, as text.
fn alone(prompt: &str, max_tokens: usize, sampling: Sampling) -> (Vec<i64>, String) {
    let rank = Rank::single(Device::flex());
    let tokenizer = Tokenizer::from_bytes(tokenizer().to_string()).unwrap();
    let ids: Vec<i64> = tokenizer.encode(prompt, true).unwrap().get_ids().iter().map(|id| i64::from(*id)).collect();
    let options = GenerateOptions { stop_tokens: vec![60], ..GenerateOptions::new(max_tokens, sampling) };
    let said = generate(&rank, &model(&rank, 11), &ids, &options, |_| std::ops::ControlFlow::Continue(())).unwrap();
    let known: Vec<u32> = said.tokens.iter().map(|token| *token as u32).collect();
    (said.tokens, tokenizer.decode(&known, true).unwrap())
}

fn sampled(seed: u64) -> Sampling {
    Sampling { temperature: 1.2, top_k: Some(40), top_p: Some(0.95), seed }
}

fn open(address: SocketAddr, method: &str, path: &str, body: &str) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    BufReader::new(stream)
}

/// The status and the body, of which chunks are put together.
fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut answer = String::new();
    open(address, method, path, body).read_to_string(&mut answer).unwrap();
    let (head, mut body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    if !head.to_lowercase().contains("transfer-encoding: chunked") {
        return (status, body.to_string());
    }
    let mut whole = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        whole += &rest[..length];
        body = rest[length..].trim_start_matches("\r\n");
        if length == 0 {
            break;
        }
    }
    (status, whole)
}

fn post(address: SocketAddr, path: &str, body: &Value) -> (u16, Value) {
    let (status, answer) = ask(address, "POST", path, &body.to_string());
    (status, serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

/// The objects of server-sent events; the last is `[DONE]`.
fn events(address: SocketAddr, path: &str, body: &Value) -> Vec<Value> {
    let (status, answer) = ask(address, "POST", path, &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let mut lines: Vec<&str> = answer.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(lines.pop(), Some("[DONE]"));
    lines.into_iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn completion(prompt: &str, max_tokens: usize, seed: u64) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 1.2, "top_k": 40, "top_p": 0.95,
        "seed": seed})
}

fn joined<'a>(parts: &'a [Value], text: impl Fn(&'a Value) -> Option<&'a str>) -> String {
    parts.iter().filter_map(text).collect()
}

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
                assert_eq!(parts.pop().unwrap()["usage"], whole["usage"]);
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
        let mut body = json!({"prompt": "abc", "max_tokens": 24, "temperature": 0, "stop": ["never", stop]});
        let (_, whole) = post(address, COMPLETIONS, &body);
        let choice = &whole["choices"][0];
        assert_eq!((choice["text"].as_str(), choice["finish_reason"].as_str()), (Some(before), Some("stop")));
        body["stream"] = json!(true);
        assert_eq!(joined(&events(address, COMPLETIONS, &body), |part| part["choices"][0]["text"].as_str()), before);
    });
    assert_eq!((statistics.used_blocks, statistics.running), (0, 0));
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
        // The prompt alone.
        let body = json!({"prompt": [0, 1, 2], "max_tokens": 0, "logprobs": 0, "echo": true});
        let (_, prompt) = post(address, COMPLETIONS, &body);
        assert_eq!(prompt["choices"][0]["text"], "abc");
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

#[test]
fn choices_and_prompts_are_numbered() {
    with_server("TP1", |address, _| {
        let mut body = completion("", 8, 5);
        (body["prompt"], body["n"]) = (json!(["ab", "cde"]), json!(2));
        let (_, whole) = post(address, COMPLETIONS, &body);
        let choices = whole["choices"].as_array().unwrap();
        let expected =
            [("ab", 5), ("ab", 6), ("cde", 5), ("cde", 6)].map(|(prompt, seed)| alone(prompt, 8, sampled(seed)).1);
        for (index, text) in expected.iter().enumerate() {
            assert_eq!(
                (&choices[index]["index"], choices[index]["text"].as_str()),
                (&json!(index), Some(text.as_str()))
            );
        }
        assert_eq!(whole["usage"]["prompt_tokens"], 5);
    });
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
        drop(stream);
        let start = Instant::now();
        while app.requests.statistics().running + app.requests.statistics().waiting > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", app.requests.statistics());
            thread::sleep(Duration::from_millis(5));
        }
        // The server answers the next.
        assert_eq!(post(address, COMPLETIONS, &json!({"prompt": "abc", "max_tokens": 3, "ignore_eos": true})).0, 200);
    });
    assert_eq!((statistics.used_blocks, statistics.cancelled, statistics.full, statistics.failed), (0, 6, 1, 0));
}

#[test]
fn bad_requests_are_named() {
    with_server("TP1", |address, _| {
        let refuse = |path: &str, body: Value| {
            let (status, answer) = post(address, path, &body);
            let error = &answer["error"];
            assert_eq!(error["type"], "invalid_request_error", "{answer}");
            let text = |key: &str| error[key].as_str().unwrap_or_default().to_string();
            (status, text("param"), text("message"))
        };
        let with = |key: &str, value: Value| {
            let mut body = json!({"prompt": "abc"});
            body[key] = value;
            refuse(COMPLETIONS, body)
        };
        for (key, value, said) in [
            ("temperature", json!(2.5), "nearest legal: 2"),
            ("temperature", json!("hot"), "a number is needed"),
            ("n", json!(0), "nearest legal: 1"),
            ("max_tokens", json!(4096), "at most 4093 new tokens"),
            ("max_tokens", json!(0), "at least 1"),
            ("logprobs", json!(21), "nearest legal: 20"),
            ("prompt", json!([1, 61]), "the model knows 0..61"),
            ("prompt", json!(""), "no tokens"),
            ("stop", json!([1]), "a list of strings"),
            ("presence_penalty", json!(0.5), "does not support"),
            ("temprature", json!(1), "unrecognized request argument"),
            ("stream_options", json!({"include_usage": true}), "with stream only"),
        ] {
            let (status, param, message) = with(key, value.clone());
            assert_eq!((status, param.as_str()), (400, key), "{key} {value}: {message}");
            assert!(message.contains(said), "{key} {value}: {message}");
        }
        let neutral = json!({"prompt": "abc", "presence_penalty": 0, "user": "me", "logit_bias": {}});
        assert_eq!(post(address, COMPLETIONS, &neutral).0, 200, "what changes nothing is accepted");
        assert_eq!(refuse(COMPLETIONS, json!({"model": "huge", "prompt": "a"})).0, 404);
        assert_eq!(refuse(CHAT, json!({"messages": []})).1, "messages");
        assert_eq!(refuse(CHAT, json!({"messages": [{"content": "a"}]})).1, "messages[0]");
        let tools = json!({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]});
        assert_eq!(refuse(CHAT, tools).1, "tools");
        assert_eq!(ask(address, "POST", COMPLETIONS, "{").0, 400);
        assert_eq!(ask(address, "GET", "/v2", "").0, 404);
    });
}

#[test]
fn models_health_and_metrics() {
    with_server("TP1", |address, app| {
        let (status, models) = ask(address, "GET", "/v1/models", "");
        let models: Value = serde_json::from_str(&models).unwrap();
        assert_eq!((status, &models["data"][1]["id"]), (200, &json!("other")));
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
