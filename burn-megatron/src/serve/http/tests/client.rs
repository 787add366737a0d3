//! A server of tiny models in threads, and a client over TCP.

use parking_lot::Mutex;
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use models::{CausalLm, Llama, LlamaConfig, ParamBuilder};
use serde_json::Value;

use super::super::*;
use crate::generate::{GenerateOptions, Sampling, generate};
use crate::logits::LogitsProcessors;
use crate::serve::{Queue, SchedulerConfig, Statistics, run};

pub const VOCAB: usize = 61;

/// So long that a text is not written before its reader is gone.
pub const MAX_MODEL_LEN: usize = 4096;

/// A token for each of 60 characters, and the end.
pub fn tokenizer() -> Value {
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

pub fn config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: VOCAB,
        hidden_size: 32,
        intermediate_size: 48,
        num_key_value_heads: 2,
        initializer_range: 0.4,
        ..LlamaConfig::tiny()
    }
}

pub fn model(rank: &Rank, seed: u64) -> Llama {
    Llama::build(&config(), ParamBuilder::new(rank, FloatDType::F64, seed).without_autodiff()).unwrap()
}

pub fn app(requests: Requests, chat: bool) -> App {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer().to_string()).unwrap();
    let template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ start }}{% for m in messages %}{{ m.role[0] }}\
                    {{ m.tool_calls[0].function.arguments.x if m.tool_calls else m.content }}{% endfor %}\
                    {% if add_generation_prompt %}a{% endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    App {
        requests,
        models: vec!["tiny".into(), "other".into()],
        tokenizer: Tokenizer::from_bytes(tokenizer().to_string()).unwrap(),
        chat: chat.then(|| ChatTokenizer::open(folder.path(), None).unwrap()),
        defaults: Sampling { temperature: 1.0, ..Sampling::greedy() },
        processors: LogitsProcessors::default(),
        stop_tokens: vec![60],
        vocab_size: VOCAB,
        guides: crate::serve::http::Guides::default(),
        token_texts: OnceLock::new(),
        longest_token: 1,
        max_model_len: MAX_MODEL_LEN,
        ready: AtomicBool::new(true),
        count: AtomicU64::new(0),
    }
}

/// Runs `client` against a server of two models in a layout, and gives the statistics at the end.
pub fn with_server(layout: &str, client: impl FnOnce(SocketAddr, &App)) -> Statistics {
    with_server_of(Sampling { temperature: 1.0, ..Sampling::greedy() }, layout, client)
}

/// The same with what their author suggests.
pub fn with_server_of(defaults: Sampling, layout: &str, client: impl FnOnce(SocketAddr, &App)) -> Statistics {
    with_app(layout, |app| App { defaults, ..app }, client)
}

/// The same with what `change` makes of the app.
pub fn with_app(layout: &str, change: impl FnOnce(App) -> App, client: impl FnOnce(SocketAddr, &App)) -> Statistics {
    let (requests, queue) = Requests::channel();
    let app = Arc::new(change(app(requests.clone(), true)));
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

pub fn ranks(layout: &str, queue: Queue) {
    let config = SchedulerConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: MAX_MODEL_LEN,
        block_size: 4,
        num_blocks: MAX_MODEL_LEN / 2,
        enable_prefix_caching: true,
        enforce_eager: false,
    };
    let (queue, mesh) = (Mutex::new(Some(queue)), Mesh::new(layout.parse().unwrap()).unwrap());
    launch(&mesh, &[Device::flex()], |rank: Rank| {
        let queue = if rank.rank == 0 { queue.lock().take() } else { None };
        Ok(run(&rank, &[model(&rank, 11), model(&rank, 12)], config, queue)?)
    })
    .unwrap();
}

/// What `generate` says, as text.
pub fn alone(prompt: &str, max_tokens: usize, sampling: Sampling) -> (Vec<i64>, String) {
    let rank = Rank::single(Device::flex());
    let tokenizer = Tokenizer::from_bytes(tokenizer().to_string()).unwrap();
    let ids: Vec<i64> = tokenizer.encode(prompt, true).unwrap().get_ids().iter().map(|id| i64::from(*id)).collect();
    let options = GenerateOptions { stop_tokens: vec![60], ..GenerateOptions::new(max_tokens, sampling) };
    let said = generate(&rank, &model(&rank, 11), &ids, &options, |_| std::ops::ControlFlow::Continue(())).unwrap();
    let known: Vec<u32> = said.tokens.iter().map(|token| *token as u32).collect();
    (said.tokens, tokenizer.decode(&known, true).unwrap())
}

pub fn sampled(seed: u64) -> Sampling {
    Sampling { temperature: 1.2, top_k: Some(40), top_p: Some(0.95), seed, ..Sampling::default() }
}

pub fn open(address: SocketAddr, method: &str, path: &str, body: &str) -> BufReader<TcpStream> {
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
pub fn ask(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
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

pub fn post(address: SocketAddr, path: &str, body: &Value) -> (u16, Value) {
    let (status, answer) = ask(address, "POST", path, &body.to_string());
    (status, serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

/// The objects of server-sent events; the last is `[DONE]`.
pub fn events(address: SocketAddr, path: &str, body: &Value) -> Vec<Value> {
    let (status, answer) = ask(address, "POST", path, &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let mut lines: Vec<&str> = answer.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(lines.pop(), Some("[DONE]"));
    lines.into_iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub const COMPLETIONS: &str = "/v1/completions";
pub const CHAT: &str = "/v1/chat/completions";

pub fn completion(prompt: &str, max_tokens: usize, seed: u64) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 1.2, "top_k": 40, "top_p": 0.95,
        "seed": seed})
}

pub fn joined<'a>(parts: &'a [Value], text: impl Fn(&'a Value) -> Option<&'a str>) -> String {
    parts.iter().filter_map(text).collect()
}
