//! Answers in JSON, byte by byte.

use serde_json::{Value, json};

use super::super::*;
use super::client::{CHAT, COMPLETIONS, post, with_app, with_server};

/// GPT-2's symbols of bytes that JSON is made of: a space, a line break and the two bytes of `é` among them.
const SYMBOLS: &str = "{}[]\":,.-+\\/0123456789abcdefghijklmnopqrstuvwxyzĠĊÃ©EABCDFG";

fn tokenizer() -> Tokenizer {
    let vocab: serde_json::Map<String, Value> =
        SYMBOLS.chars().enumerate().map(|(id, symbol)| (symbol.to_string(), id.into())).collect();
    let json = json!({
        "version": "1.0",
        "added_tokens": [{"id": 60, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

fn asks(format: &Value, seed: u64) -> Value {
    json!({"prompt": "abc", "max_tokens": 1500, "temperature": 1.5, "seed": seed, "response_format": format})
}

#[test]
fn answers_of_bytes_are_json_of_the_schema() {
    let schema = json!({"type": "object", "required": ["é", "n", "a\"b"], "additionalProperties": false, "properties": {
        "é": {"type": "string", "minLength": 1, "maxLength": 5}, "n": {"type": "integer"},
        "a\"b": {"type": "array", "items": {"enum": ["red", "é", 12]}, "minItems": 1, "maxItems": 2}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "it", "schema": schema}});
    let statistics = with_app(
        "TP1",
        |app| App { tokenizer: tokenizer(), ..app },
        |address, _| {
            for seed in 0..4 {
                let (status, answer) = post(address, COMPLETIONS, &asks(&format, seed));
                assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("stop")), "{answer}");
                let text = answer["choices"][0]["text"].as_str().unwrap();
                let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
                let name = value["é"].as_str().unwrap();
                assert!((1..=5).contains(&name.chars().count()) && value["n"].is_i64(), "{text}");
                let items = value["a\"b"].as_array().unwrap();
                assert!((1..=2).contains(&items.len()) && value.as_object().unwrap().len() == 3, "{text}");
                assert!(items.iter().all(|item| [json!("red"), json!("é"), json!(12)].contains(item)), "{text}");
            }
        },
    );
    assert_eq!(statistics.stopped, 4);
}

/// A model that knows no tools calls one if it must.
#[test]
fn answers_that_must_be_calls_are_calls() {
    let point = json!({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/n"}},
        "additionalProperties": false, "$defs": {"n": {"type": "integer", "minimum": 3, "maximum": 5}}});
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": point}},
        {"type": "function", "function": {"name": "now"}}]);
    let named = json!({"type": "function", "function": {"name": "add"}});
    with_app(
        "TP1",
        |app| App { tokenizer: tokenizer(), ..app },
        |address, _| {
            let mut called = std::collections::BTreeSet::new();
            for seed in 0..8 {
                let is_named = seed % 2 == 0;
                let choice = if is_named { named.clone() } else { json!("required") };
                let body = json!({"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1500, "temperature": 1.5,
                    "seed": seed, "tools": tools, "tool_choice": choice});
                let (status, answer) = post(address, CHAT, &body);
                let choice = &answer["choices"][0];
                assert_eq!((status, &choice["finish_reason"]), (200, &json!("tool_calls")), "{answer}");
                assert_eq!(choice["message"]["content"], Value::Null);
                let call = &choice["message"]["tool_calls"][0]["function"];
                let name = call["name"].as_str().unwrap().to_string();
                let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
                match name.as_str() {
                    "add" => assert!((3..=5).contains(&arguments["a"].as_i64().unwrap()), "{call}"),
                    _ => assert!(!is_named && name == "now" && arguments == json!({}), "{call}"),
                }
                called.insert(name);
            }
            assert_eq!(called.len(), 2, "{called:?}");
        },
    );
}

/// No token has a brace: that is said, and no answer is one.
#[test]
fn a_text_that_no_token_begins_is_an_error() {
    with_server("TP1", |address, _| {
        let (status, answer) = post(address, COMPLETIONS, &asks(&json!({"type": "json_object"}), 0));
        let said = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && said.contains("no token may come: response_format"), "{status} {answer}");
    });
}
