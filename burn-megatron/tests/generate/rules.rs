//! Rules that change logits give transformers' own texts.

use serde_json::json;

use crate::{PROMPT, list, run, with_tokenizer, written};

/// What transformers 5.24 writes in f64 (torch 2.15): `generate(PROMPT, max_new_tokens=24, do_sample=False,
/// repetition_penalty=1.3, eos_token_id=None)`.
const PENALISED: [(&str, [i64; 24]); 2] = [
    (
        "qwen3",
        [220, 189, 158, 23, 59, 93, 93, 194, 189, 182, 165, 192, 161, 167, 162, 50, 116, 50, 50, 148, 93, 162, 13, 50],
    ),
    (
        "gpt2",
        [
            61, 61, 177, 151, 16, 16, 193, 252, 78, 178, 236, 236, 236, 236, 236, 236, 236, 236, 236, 236, 236, 236,
            236, 236,
        ],
    ),
];

#[test]
fn repeated_tokens_are_penalised_as_in_transformers_and_other_keys_are_named() {
    for (name, expected) in PENALISED {
        let greedy = |generation: serde_json::Value, more: &[&str]| {
            let (folder, prompt) = (with_tokenizer(name, &generation), list(&PROMPT));
            let dir = folder.path().to_str().unwrap();
            let flags = ["--hf", dir, "--tokens", &prompt, "--max-new-tokens", "24", "--dtype", "f64"];
            let output = run(&[&flags[..], more].concat());
            let [text, said] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
            (text, said.contains("generation_config.json has num_beams = 3,"))
        };
        let expected = format!("{}\n", list(&expected));
        assert_eq!(greedy(json!({"repetition_penalty": 1.3}), &[]), (expected.clone(), false), "{name}");
        assert_eq!(greedy(json!({}), &["--repetition-penalty", "1.3"]), (expected.clone(), false), "{name}");
        let layout = ["--repetition-penalty", "1.3", "--tensor-parallel", "2"];
        assert_eq!(greedy(json!({"num_beams": 3}), &layout), (expected.clone(), true), "{name}");
        assert_ne!(greedy(json!({}), &[]).0, expected, "{name}");
    }
}

/// What transformers 5.24 writes in f64 (torch 2.15) with these keys: `generate(PROMPT, max_new_tokens=24, do_sample=False)`.
const RULES: [(&str, &str, &[i64]); 6] = [
    (
        "qwen3",
        r#"{"sequence_bias": [[[9], -40.0], [[189, 158], -3.0], [[5], 1.5]], "encoder_repetition_penalty": 1.3,
            "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}"#,
        &[5, 161, 5, 189, 5, 192, 201, 93, 97, 5, 192, 57, 108, 5, 67, 93, 93, 93, 167, 5, 131, 130, 167, 5],
    ),
    (
        "qwen3",
        r#"{"eos_token_id": 93, "min_new_tokens": 8, "exponential_decay_length_penalty": [4, 1.05]}"#,
        &[220, 189, 158, 220, 9, 192, 192, 59, 93],
    ),
    (
        "qwen3",
        r#"{"eos_token_id": [93, 220], "min_length": 26, "encoder_no_repeat_ngram_size": 1, "suppress_tokens": [189]}"#,
        &[192, 48, 50, 116, 50, 50, 50, 93],
    ),
    (
        "gpt2",
        r#"{"no_repeat_ngram_size": 2, "bad_words_ids": [[25, 25], [16, 193], [61]], "begin_suppress_tokens": [173],
            "forced_eos_token_id": 3}"#,
        &[132, 132, 252, 252, 21, 21, 177, 4, 204, 204, 159, 159, 132, 236, 236, 16, 16, 54, 16, 204, 48, 48, 252, 3],
    ),
    (
        "gpt2",
        r#"{"eos_token_id": 16, "min_new_tokens": 5, "suppress_tokens": [173], "repetition_penalty": 1.1}"#,
        &[
            61, 61, 61, 61, 235, 177, 177, 4, 204, 204, 204, 204, 204, 204, 204, 204, 204, 204, 204, 204, 100, 100,
            100, 100,
        ],
    ),
    (
        "t5",
        r#"{"forced_bos_token_id": 7, "begin_suppress_tokens": [0, 7], "no_repeat_ngram_size": 2,
            "encoder_no_repeat_ngram_size": 1}"#,
        &[7, 15, 15, 246, 246, 15, 134, 134, 15, 149, 149, 15, 163, 163, 15, 175, 175, 15, 4, 4, 15, 35, 15, 230],
    ),
];

#[test]
fn keys_of_generation_config_have_the_effect_that_they_have_in_transformers() {
    for (name, keys, expected) in RULES {
        let folder = with_tokenizer(name, &serde_json::from_str(keys).unwrap());
        let (dir, prompt) = (folder.path().to_str().unwrap(), list(&PROMPT));
        let flags = ["--hf", dir, "--tokens", &prompt, "--max-new-tokens", "24", "--dtype", "f64"];
        assert_eq!(written(&flags), format!("{}\n", list(expected)), "{name} {keys}");
    }
}

#[test]
fn flags_are_rules_too() {
    let with = |generation: &serde_json::Value, more: &[&str]| {
        let folder = with_tokenizer("gpt2", generation);
        let (dir, prompt) = (folder.path().to_str().unwrap(), list(&PROMPT));
        let flags = ["--hf", dir, "--tokens", &prompt, "--max-new-tokens", "24", "--dtype", "f64"];
        written(&[&flags[..], more].concat())
    };
    let keys = json!({"no_repeat_ngram_size": 2, "min_new_tokens": 5, "eos_token_id": 81});
    let flags = ["--no-repeat-ngram-size", "2", "--min-new-tokens", "5", "--stop-token", "81"];
    let expected = with(&keys, &[]);
    assert_eq!(with(&json!({}), &flags), expected);
    assert_ne!(with(&keys, &["--no-repeat-ngram-size", "0"]), expected);
    assert_ne!(with(&keys, &["--min-new-tokens", "0"]), expected);
}
