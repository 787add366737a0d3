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
            ("presence_penalty", json!(2.5), "nearest legal: 2"),
            ("logit_bias", json!({"61": 1}), "61 is no token of the model, whose tokens are 0 to 60"),
            ("logit_bias", json!({"6": 101}), "token 6: a number from -100 to 100"),
            ("logit_bias", json!({"+5": 1}), "+5 is no token"),
            ("logit_bias", json!({"05": 1}), "05 is no token"),
            ("logit_bias", (0..1025).map(|id| (id.to_string(), json!(1))).collect(), "nearest legal: 1024"),
            ("allowed_token_ids", json!([]), "no token would be left"),
            ("min_tokens", json!(17), "17 is more than the 16 of max_tokens; nearest legal: 16"),
            ("parallel_tool_calls", json!(false), "unrecognized"),
            ("stop_token_ids", json!(["a"]), "\"a\" is no token"),
            ("bad_words", json!([1]), "a list of strings"),
            ("response_format", json!("json"), "an object with a type is needed"),
            ("response_format", json!({"type": "json_schema"}), "json_schema.schema is missing"),
            ("response_format", json!({"type": "xml"}), "legal: text, json_object, json_schema"),
            (
                "response_format",
                json!({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
                "the keyword `not` is not supported",
            ),
            ("temprature", json!(1), "unrecognized request argument"),
            ("stream_options", json!({"include_usage": true}), "with stream only"),
        ] {
            let (status, param, message) = with(key, value.clone());
            assert_eq!((status, param.as_str()), (400, key), "{key} {value}: {message}");
            assert!(message.contains(said), "{key} {value}: {message}");
        }
        let neutral = json!({"prompt": "abc", "presence_penalty": 0, "user": "me", "logit_bias": {}});
        assert_eq!(post(address, COMPLETIONS, &neutral).0, 200, "what changes nothing is accepted");
        let options = json!({"prompt": "abc", "stream": true, "stream_options": [1]});
        says!(refuse(COMPLETIONS, options).2, "stream_options: an object is needed, this is [1]");
        assert_eq!(refuse(COMPLETIONS, json!({"model": "huge", "prompt": "a"})).0, 404);
        // Rules that leave no token, from the first on or later.
        let all = refuse(COMPLETIONS, json!({"prompt": "abc", "allowed_token_ids": [60], "min_tokens": 1}));
        assert_eq!(
            (all.0, all.2.as_str()),
            (400, "after 3 tokens no token may come: min_new_tokens, allowed_token_ids forbid all")
        );
        let once = json!({"prompt": "abc", "allowed_token_ids": [7, 8], "no_repeat_ngram_size": 1, "temperature": 0});
        says!(refuse(COMPLETIONS, once).2, "after 5 tokens no token may come: no_repeat_ngram_size, allowed_token_ids");
        assert_eq!(refuse(CHAT, json!([1])).2, "the body is a list, not a JSON object");
        let chat = |key: &str, value: Value, last: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "a"}, last], "max_tokens": 1});
            body[key] = value;
            let (status, param, said) = refuse(CHAT, body);
            assert_eq!(status, 400, "{said}");
            (param, said)
        };
        let (param, said) = chat("add_generation_prompt", json!("yes"), json!({"role": "user", "content": "b"}));
        assert_eq!(
            (param.as_str(), said.contains("true or false is needed")),
            ("add_generation_prompt", true),
            "{said}"
        );
        let own = chat("chat_template_kwargs", json!({"tools": []}), json!({"role": "user", "content": "b"}));
        assert_eq!(own.0, "chat_template_kwargs");
        let object = json!({"role": "user", "content": {"type": "text", "text": "b"}});
        says!(chat("user", json!("me"), object).1, "messages[1].content: a text or a list of parts, this is an object");
        let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}]});
        says!(chat("continue_final_message", json!(true), call).1, "messages[1].content: there is no text to continue");
        assert_eq!(refuse(CHAT, json!({"messages": []})).1, "messages");
        assert_eq!(refuse(CHAT, json!({"messages": [{"content": "a"}]})).1, "messages[0]");
        let tools = |more: Value| {
            let mut body =
                json!({"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f"}}]});
            more.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
            refuse(CHAT, body)
        };
        says!(tools(json!({"tools": [{"type": "function"}]})).2, "tools: a tool needs a `function` with a `name`");
        says!(
            tools(json!({"tool_choice": "any"})).2,
            "tool_choice: \"any\" is not supported; legal: auto, none, required, or an object with the name of a `function`"
        );
        let named = json!({"type": "function", "function": {"name": "g"}});
        says!(tools(json!({"tool_choice": named})).2, "tool_choice: no tool has the name g; legal: f");
        says!(tools(json!({"tools": null, "tool_choice": "required"})).2, "tool_choice: \"required\" needs tools");
        let both = json!({"tool_choice": "required", "response_format": {"type": "json_object"}});
        says!(tools(both).2, "response_format: tool_choice says that the answer is a call; leave one of them out");
        let odd = json!([{"function": {"name": "f", "parameters": {"not": {}}}}]);
        says!(
            tools(json!({"tool_choice": "required", "tools": odd})).2,
            "tools: #/anyOf/0/properties/arguments: the keyword `not` is not supported"
        );
        says!(refuse(CHAT, json!({"messages": [{"role": "usr", "content": "a"}]})).2, "did you mean `user`?");
        assert_eq!(ask(address, "POST", COMPLETIONS, "{").0, 400);
        assert_eq!(ask(address, "GET", "/v2", "").0, 404);
        let (status, said) = ask(address, "GET", COMPLETIONS, "");
        assert!(status == 405 && said.contains("\"invalid_request_error\""), "{said}");
        // More than axum's limit, and more than ours.
        let long = |size| json!({"prompt": "a", "max_tokens": 1, "user": "u".repeat(size)}).to_string();
        assert_eq!(ask(address, "POST", COMPLETIONS, &long(3 << 20)).0, 200);
    });
}
