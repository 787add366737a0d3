//! Requests that cannot be answered are refused by the name of their parameter.

use serde_json::{Value, json};

use super::client::{CHAT, COMPLETIONS, MAX_MODEL_LEN, ask, post, with_server};

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
            ("max_tokens", json!(0), "nearest legal: 1"),
            ("seed", json!(u64::MAX), "nearest legal: 9223372036854775807"),
            ("logprobs", json!(21), "nearest legal: 20"),
            ("prompt", json!([1, 61]), "the model knows 0..61"),
            ("prompt", json!(""), "no tokens"),
            ("prompt", json!(vec!["a"; 2049]), "nearest legal: 2048"),
            ("prompt", json!("a".repeat(MAX_MODEL_LEN + 1)), "--max-model-len"),
            ("prompt", json!(vec![1; MAX_MODEL_LEN]), "at most 4095 tokens of prompt"),
            // What is too long is not looked at.
            ("prompt", json!(vec![61; MAX_MODEL_LEN]), "at most 4095 tokens of prompt"),
            ("min_p", json!(1.5), "nearest legal: 1"),
            ("repetition_penalty", json!(0), "nearest legal: 0.01"),
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
        let tool = json!({"messages": [{"role": "tool", "content": "42", "tool_call_id": "x", "name": null}]});
        assert!(refuse(CHAT, tool).2.contains("`tool_call_id`"));
        let tools = json!({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]});
        assert_eq!(refuse(CHAT, tools).1, "tools");
        assert_eq!(ask(address, "POST", COMPLETIONS, "{").0, 400);
        assert_eq!(ask(address, "GET", "/v2", "").0, 404);
        let (status, said) = ask(address, "GET", COMPLETIONS, "");
        assert!(status == 405 && said.contains("\"invalid_request_error\""), "{said}");
        // More than axum's limit, and more than ours.
        let long = |size| json!({"prompt": "a", "max_tokens": 1, "user": "u".repeat(size)}).to_string();
        assert_eq!(ask(address, "POST", COMPLETIONS, &long(3 << 20)).0, 200);
    });
}
