//! What ends the texts of published models, what begins them, and what their authors suggest for draws:
//! `tests/golden/published`, whose README has a row for each.

use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::data::chat::special_token;
use burn_megatron::hf::GenerationConfig;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/published")
}

/// Model, and what begins and ends its texts and how tokens are drawn.
fn table() -> Vec<[String; 4]> {
    let readme = fs::read_to_string(folder().join("README.md")).unwrap();
    let row = |line: &str| match &line.split('|').map(str::trim).collect::<Vec<_>>()[..] {
        [_, model, begins, ends, drawn, _, _] if model.contains('/') => {
            Some([*model, *begins, *ends, *drawn].map(String::from))
        }
        _ => None,
    };
    readme.lines().filter_map(row).collect()
}

fn of(model: &str) -> PathBuf {
    folder().join(model.replace('/', "--"))
}

/// A tokenizer of the added tokens that a `tokenizer_config.json` lists.
fn tokenizer(config: &Value) -> Tokenizer {
    let added = config["added_tokens_decoder"].as_object().unwrap().iter();
    let vocab: Value =
        added.map(|(id, token)| (token["content"].as_str().unwrap(), id.parse::<u32>().unwrap())).collect();
    let file = json!({"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "none"}});
    Tokenizer::from_bytes(file.to_string()).unwrap()
}

#[test]
fn ends_beginnings_and_draws_of_published_models() {
    let table = table();
    assert!(table.len() >= 15, "{} models", table.len());
    for [model, begins, ends, drawn] in &table {
        let of = GenerationConfig::of_folder(&of(model)).unwrap();
        let found = of.eos_token_id.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        assert_eq!(&found, ends, "{model}");
        let found = of.bos_token_id.map_or("none".to_string(), |id| id.to_string());
        assert_eq!(&found, begins, "{model}");
        // Without `do_sample` transformers is greedy, and with it has its own numbers for keys that are not there.
        let found = match of.do_sample {
            Some(true) => format!(
                "temperature {}, top-k {}, top-p {}",
                of.temperature.unwrap_or(1.0),
                of.top_k.unwrap_or(50),
                of.top_p.unwrap_or(1.0)
            ),
            _ => "greedy".to_string(),
        };
        assert!(&found == drawn || drawn == "not known", "{model}: {found}");
    }
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path().join("generation_config.json"));
    assert_eq!(files.filter(|file| file.exists()).count(), table.len());
}

#[test]
fn tokenizers_of_published_models_begin_and_end_texts() {
    let mut read = 0;
    for [model, begins, ..] in table() {
        let Ok(bytes) = fs::read(of(&model).join("tokenizer_config.json")) else { continue };
        let config: Value = serde_json::from_slice(&bytes).unwrap();
        let tokenizer = tokenizer(&config);
        let id = |name: &str| special_token(&of(&model), name).unwrap().and_then(|token| tokenizer.token_to_id(&token));
        let generation = GenerationConfig::of_folder(&of(&model)).unwrap();
        // The tokenizer's own end is one of the model's.
        let ends: Vec<i64> = generation.eos_token_id.iter().copied().map(i64::from).collect();
        assert_eq!(generation.stop_tokens(&of(&model), &tokenizer).unwrap(), ends, "{model}");
        assert!(id("eos_token").is_some(), "{model}");
        // Qwen's texts begin with no token of their own, whatever its other files say.
        let begins = (config["bos_token"] != Value::Null).then(|| begins.parse().unwrap());
        assert_eq!(id("bos_token"), begins, "{model}");
        read += 1;
    }
    assert!(read >= 8, "{read} tokenizers");
}
