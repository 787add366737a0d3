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

#[test]
fn requests_say_which_tokens_come() {
    with_server("TP1", |address, app| {
        let answer = |more: Value| {
            let mut body = json!({"prompt": "abc", "max_tokens": 12, "temperature": 0});
            more.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
            let (status, answer) = post(address, COMPLETIONS, &body);
            assert_eq!(status, 200, "{body}: {answer}");
            let choice = &answer["choices"][0];
            (choice["text"].as_str().unwrap().to_string(), choice["finish_reason"].as_str().unwrap().to_string())
        };
        let (plain, _) = answer(json!({}));
        let first = plain.chars().next().unwrap();
        let id = |c: char| app.tokenizer.token_to_id(&c.to_string()).unwrap();
        let starts = |more: Value| answer(more).0.chars().next().unwrap();
        assert_ne!(starts(json!({"logit_bias": {id(first).to_string(): -100}})), first);
        assert_eq!(answer(json!({"logit_bias": {id('q').to_string(): 100}})).0, "q".repeat(12));
        assert!(!answer(json!({"bad_words": [first.to_string()]})).0.contains(first));
        let two = answer(json!({"allowed_token_ids": [id('x'), id('y')]})).0;
        assert!(two.len() == 12 && two.chars().all(|c| "xy".contains(c)), "{two}");
        // One of them is likelier each time, until it has come often enough.
        let penalties = json!({"allowed_token_ids": [id('x'), id('y')], "frequency_penalty": 2, "presence_penalty": 1,
            "max_tokens": 60});
        let mixed = answer(penalties).0;
        assert!(mixed.contains('x') && mixed.contains('y'), "{mixed}");
        let once = answer(json!({"no_repeat_ngram_size": 1})).0;
        let letters: HashSet<char> = once.chars().collect();
        assert!(letters.len() == once.len() && !letters.contains(&'a'), "{once}");
        // What ends the text, and what is shown of it.
        let ends = |more: Value| answer(more);
        assert_eq!(ends(json!({"stop_token_ids": [id(first)], "ignore_eos": true})), (String::new(), "stop".into()));
        let stop = &plain[..2];
        assert_eq!(ends(json!({"stop": stop})), (String::new(), "stop".into()));
        assert_eq!(ends(json!({"stop": stop, "include_stop_str_in_output": true})), (stop.into(), "stop".into()));
        // Without a stop before the eleventh token.
        let (text, end) = ends(json!({"stop_token_ids": [id('x')], "allowed_token_ids": [id('x'), id('y')],
            "logit_bias": {id('x').to_string(): 100}, "min_tokens": 10}));
        assert_eq!((text, end), ("y".repeat(10), "stop".into()));
        let late = ends(json!({"stop": first.to_string(), "min_tokens": 3})).0;
        assert!(late.starts_with(&plain[..3]), "{late}");
    });
}

/// The tokens are letters and digits: a text of the schema is written with them, and ends.
#[test]
fn answers_are_texts_of_the_schema() {
    with_server("TP1", |address, _| {
        let answer = |schema: Value| {
            let format = json!({"type": "json_schema", "json_schema": {"name": "it", "schema": schema}});
            let body = json!({"prompt": "abc", "max_tokens": 40, "response_format": format, "temperature": 1.5, "seed": 3,
                "ignore_eos": true});
            let (status, answer) = post(address, COMPLETIONS, &body);
            assert_eq!(status, 200, "{answer}");
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{answer}");
            serde_json::from_str::<Value>(choice["text"].as_str().unwrap()).unwrap()
        };
        assert_eq!(answer(json!({"const": true})), json!(true));
        assert!([json!(false), json!(null), json!(42)].contains(&answer(json!({"enum": [false, null, 42]}))));
        assert!(answer(json!({"type": "integer"})).is_u64());
        // A text that can only end ends, however long it ought to be.
        let format = json!({"type": "json_schema", "json_schema": {"name": "it", "schema": {"const": true}}});
        let body = json!({"prompt": "abc", "max_tokens": 40, "response_format": format, "min_tokens": 8});
        let (status, whole) = post(address, COMPLETIONS, &body);
        assert_eq!((status, &whole["choices"][0]["text"]), (200, &json!("true")), "{whole}");
    });
}
