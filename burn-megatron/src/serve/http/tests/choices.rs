//! How the tokens of a request's sequences are chosen.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::client::{COMPLETIONS, alone, completion, post, sampled, with_server, with_server_of};
use crate::generate::Sampling;

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
fn sequences_share_no_draws_unless_a_seed_says_so() {
    with_server("TP1", |address, _| {
        let mut body =
            json!({"prompt": ["abc", "abc"], "temperature": 1, "n": 2, "max_tokens": 20, "ignore_eos": true});
        let texts = |body: &Value| {
            let (_, whole) = post(address, COMPLETIONS, body);
            let choices = whole["choices"].as_array().unwrap().iter();
            choices.map(|choice| choice["text"].as_str().unwrap().to_string()).collect::<Vec<_>>()
        };
        let all = [texts(&body), texts(&body)].concat();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), 8, "{all:?}");
        body["seed"] = json!(7);
        let all = texts(&body);
        assert!(all[..2] == all[2..] && all[0] != all[1], "{all:?}");
    });
}

#[test]
fn requests_and_the_models_author_say_how_tokens_are_chosen() {
    let sampling = Sampling { temperature: 0.0, repetition_penalty: 1.4, ..Sampling::greedy() };
    let near = Sampling { temperature: 1.5, min_p: Some(0.2), seed: 3, ..Sampling::greedy() };
    let body = |more: Value| {
        let mut body = json!({"prompt": "abc", "max_tokens": 30, "temperature": 0});
        more.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
        body
    };
    let text = |address, more| post(address, COMPLETIONS, &body(more)).1["choices"][0]["text"].clone();
    let penalised = json!(alone("abc", 30, sampling).1);
    with_server("TP1", |address, _| {
        assert_eq!(text(address, json!({"repetition_penalty": 1.4})), penalised);
        assert_ne!(text(address, json!({})), penalised);
        let found = text(address, json!({"temperature": 1.5, "min_p": 0.2, "seed": 3}));
        assert_eq!(found, json!(alone("abc", 30, near).1));
        assert_ne!(text(address, json!({"temperature": 1.5, "seed": 3})), found);
    });
    with_server_of(Sampling { temperature: 0.7, ..sampling }, "TP1", |address, _| {
        assert_eq!(text(address, json!({})), penalised);
        assert_eq!(text(address, json!({"repetition_penalty": 1})), json!(alone("abc", 30, Sampling::greedy()).1));
    });
}
