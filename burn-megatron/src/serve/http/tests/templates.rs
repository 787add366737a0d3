//! What of a chat's request reaches the template.

use serde_json::{Value, json};

use super::client::{CHAT, COMPLETIONS, post, with_server};

/// A chat answers as a completion of the text that the template makes.
#[test]
fn tools_variables_and_calls_are_the_templates() {
    with_server("TP1", |address, _| {
        let said = |path: &str, mut body: Value| {
            (body["max_tokens"], body["temperature"]) = (json!(12), json!(0));
            let (status, answer) = post(address, path, &body);
            assert_eq!(status, 200, "{body}: {answer}");
            let choice = &answer["choices"][0];
            (
                choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_string(),
                answer["usage"].clone(),
            )
        };
        let same = |chat: Value, prompt: &str| {
            let ((chat, used), (text, expected)) = (said(CHAT, chat), said(COMPLETIONS, json!({"prompt": prompt})));
            assert_eq!((chat, &used["prompt_tokens"]), (text, &expected["prompt_tokens"]), "{prompt}");
        };
        let tools = json!([{"type": "function", "function": {"name": "add"}}]);
        let hello =
            json!([{"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]}]);
        same(json!({"messages": hello, "tools": tools}), "adduHelloa");
        same(json!({"messages": hello, "tools": tools, "tool_choice": "none"}), "uHelloa");
        same(json!({"messages": hello, "chat_template_kwargs": {"start": "XY"}}), "XYuHelloa");
        let call = json!({"id": "1", "type": "function", "function": {"name": "add", "arguments": "{\"x\": 7}"}});
        let talk = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"}]);
        same(json!({"messages": talk}), "uHia7toka");
        let open = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]);
        same(json!({"messages": open, "continue_final_message": true, "add_generation_prompt": false}), "uHiaWell");
    });
}
