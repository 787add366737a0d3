//! Tokens that `tokenizer_config.json` adds to a tokenizer's file, and those around a text.

use std::fs;

use serde_json::json;

use super::*;

/// What transformers 5.24 makes of the same folder.
#[test]
fn tokens_that_a_configuration_adds_to_sentencepieces_are_found() {
    let llama = fs::read(golden("llama2.model")).unwrap();
    let text = "<|im_start|>user\nHello<|im_end|>  <think>x";
    let listed = |legacy: bool| {
        let token = |content: &str, special: bool, rstrip: bool| json!({"content": content, "special": special, "normalized": !special, "rstrip": rstrip});
        let config = json!({"legacy": legacy, "added_tokens_decoder": {
            "0": token("<unk>", true, false), "1": token("<s>", true, false), "600": token("<|im_start|>", true, false),
            "601": token("<|im_end|>", true, true), "602": token("<think>", false, false),
        }});
        read_as("tokenizer.model", &llama, &config.to_string()).unwrap()
    };
    let ids = [1, 600, 507, 503, 268, 13, 75, 289, 380, 601, 602, 546];
    assert_eq!(around(&listed(false), text), ids);
    assert_eq!(listed(false).decode(&ids, true).unwrap(), "user\nHello<think>x");
    assert_eq!(around(&listed(true), text), [1, 600, 496, 507, 503, 268, 13, 75, 289, 380, 601, 602, 496, 546]);
    assert_eq!(around(&listed(true), "a<unk>b"), [1, 275, 0, 269]);

    // T5 has one space of several, and none at the ends.
    let t5 = fs::read(golden("t5.model")).unwrap();
    for legacy in [true, false] {
        let config =
            json!({"legacy": legacy, "added_tokens_decoder": {"195": {"content": "<extra_id_0>", "special": true}}});
        let t5 = read_as("spiece.model", &t5, &config.to_string()).unwrap();
        let ids = [17, 195, 17, 120, 15, 44, 20, 195, 1];
        assert_eq!(around(&t5, "  the <extra_id_0> the  world <extra_id_0>  "), ids, "legacy {legacy}");
    }

    // Of old: ids alone.
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    write("tokenizer.model", &llama);
    write("tokenizer_config.json", br#"{"legacy": false, "additional_special_tokens": ["<|im_start|>"]}"#);
    write("added_tokens.json", br#"{"<|im_start|>": 600, "<|im_end|>": 601, "<think>": 602}"#);
    let old = read_tokenizer(&folder.path().join("tokenizer.model")).unwrap();
    let ids = [1, 600, 507, 503, 268, 13, 75, 289, 380, 601, 496, 496, 602, 546];
    assert_eq!(around(&old, text), ids);
    assert_eq!(old.decode(&ids, true).unwrap(), "user\nHello<|im_end|>  <think>x");
    write("added_tokens.json", br#"{"<|im_start|>": 700}"#);
    let said = read_tokenizer(&folder.path().join("tokenizer.model")).unwrap_err().to_string();
    assert!(said.contains("\"<|im_start|>\" has the id 700, and would have 600"), "{said}");
}

/// Gemma's runs of spaces: transformers lists them as they are in the model, where no text has them before spaces are escaped.
#[test]
fn symbols_of_the_model_are_found_also_where_they_are_listed() {
    let pieces = [("<unk>", 2), ("a", 1), ("▁", 1), ("▁▁", 4)];
    let piece = |(text, kind): (&str, u8)| field(1, &[field(1, text.as_bytes()), vec![0x18, kind]].concat());
    // A BPE; neither a dummy prefix nor fewer spaces.
    let ends = [field(2, &[0x18, 2]), field(3, &[0x18, 0, 0x20, 0])].concat();
    let model = [pieces.map(piece).concat(), ends].concat();
    let listed = r#"{"added_tokens_decoder": {"3": {"content": "▁▁", "special": true, "normalized": false}}}"#;
    for config in ["", listed] {
        let tokenizer = read_as("tokenizer.model", &model, config).unwrap();
        assert_eq!(around(&tokenizer, "a  a a"), [1, 3, 1, 2, 1], "{config}");
    }
}

/// Listed ids are kept, whatever their order and however far they are, or refused.
#[test]
fn listed_special_tokens_have_their_ids() {
    let listed = |tokens: &[(usize, &str)]| {
        let tokens: Vec<String> =
            tokens.iter().map(|(id, text)| format!(r#""{id}": {{"content": "{text}"}}"#)).collect();
        let config = format!(r#"{{"added_tokens_decoder": {{{}}}}}"#, tokens.join(", "));
        read_as("tiktoken.model", &ranks(998), &config)
    };
    let tokenizer = listed(&[(1000, "<c>"), (998, "<b>"), (1002, "<a>"), (999, "<d>")]).unwrap();
    assert_eq!(around(&tokenizer, "<a><b><c><d>"), [1002, 998, 1000, 999]);
    assert_eq!(tokenizer.token_to_id("<|reserved_token_1001|>"), Some(1001));
    assert_eq!(tokenizer.get_vocab_size(true), 1003);
    assert!(listed(&[(998 + 4096, "<a>")]).is_ok());
    for (tokens, text) in [
        (&[(998 + 4097, "<a>")][..], "more than 4096 ids"),
        (&[(usize::MAX, "<a>")], "more than 4096 ids"),
        (&[(7, "<a>")], "\"<a>\" has the id 7, and would have 998"),
        (&[(998, "<a>"), (999, "<a>")], "\"<a>\" has the id 999, and would have 998"),
    ] {
        let said = listed(tokens).unwrap_err();
        assert!(said.contains(text), "{said}");
    }
}

#[test]
fn texts_begin_and_end_as_the_models_tokenizer_has_them() {
    let [llama, t5, letters] =
        ["llama2.model", "t5.model", "letters.tiktoken"].map(|file| fs::read(golden(file)).unwrap());
    let added = |name: &str, bytes: &[u8], config: &str| {
        let tokenizer = read_as(name, bytes, config).unwrap();
        let (text, all) = (tokenizer.encode("Hello", false).unwrap().get_ids().to_vec(), around(&tokenizer, "Hello"));
        let at = all.windows(text.len()).position(|part| part == text).unwrap();
        (all[..at].to_vec(), all[at + text.len()..].to_vec())
    };
    let eos =
        r#"{"add_bos_token": false, "add_eos_token": true, "bos_token": "<s>", "eos_token": {"content": "</s>"}}"#;
    assert_eq!(added("tokenizer.model", &llama, ""), (vec![1], vec![]));
    assert_eq!(added("llama2.model", &llama, ""), (vec![], vec![]));
    assert_eq!(added("tokenizer.model", &llama, eos), (vec![], vec![2]));
    assert_eq!(added("tokenizer.model", &llama, r#"{"add_eos_token": true}"#), (vec![1], vec![2]));
    assert_eq!(added("tokenizer.model", &llama, r#"{"bos_token": null}"#), (vec![], vec![]));
    assert_eq!(added("spiece.model", &t5, ""), (vec![], vec![1]));
    let begin = r#"{"add_bos_token": true, "bos_token": "<b>", "added_tokens_decoder": {"480": {"content": "<b>"}}}"#;
    assert_eq!(added("tiktoken.model", &letters, begin), (vec![480], vec![]));
    let pair = read_as("tokenizer.model", &llama, "").unwrap().encode(("a", "a"), true).unwrap();
    assert_eq!(pair.get_ids().iter().filter(|id| **id == 1).count(), 2);
    for (config, text) in [
        (r#"{"add_bos_token": true, "bos_token": "<b>"}"#, "its special token <b> is not in it"),
        (r#"{"add_bos_token": true, "bos_token": null}"#, "adds a bos_token and has none"),
        ("{", "tokenizer_config.json: "),
    ] {
        let said = read_as("tokenizer.model", &llama, config).unwrap_err();
        assert!(said.contains(text), "{said}");
    }
}

#[test]
fn t5_has_extra_ids_and_shifted_ids_are_refused() {
    let t5 = fs::read(golden("t5.model")).unwrap();
    let size = read_as("spiece.model", &t5, "").unwrap().get_vocab_size(true) as u32;
    for (config, count) in [(r#"{"tokenizer_class": "T5Tokenizer"}"#, 100), (r#"{"extra_ids": 3}"#, 3)] {
        let tokenizer = read_as("spiece.model", &t5, config).unwrap();
        assert_eq!(tokenizer.get_vocab_size(true) as u32, size + count);
        assert_eq!(tokenizer.token_to_id(&format!("<extra_id_{}>", count - 1)), Some(size));
        assert_eq!(tokenizer.token_to_id("<extra_id_0>"), Some(size + count - 1));
    }
    assert!(read_as("sentencepiece.bpe.model", &t5, "").unwrap_err().contains("XLM-R"));
}
