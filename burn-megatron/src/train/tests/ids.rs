//! Tokens of `data.prefixes` that are not those of the tokenizer or the model.

use super::*;

/// Writes the tokens of a text in a folder of their own; returns their prefix and their tokenizer.
fn written(folder: &Path, text: &str, tokenizer: &str, name: &str) -> (String, String) {
    let file = folder.join(format!("{name}.txt"));
    std::fs::write(&file, text).unwrap();
    let (file, output) = (file.display().to_string(), folder.join(name));
    let to = output.display().to_string();
    let overrides = [("data.text", file.as_str()), ("data.tokenizer", tokenizer), ("output.directory", &to)];
    let of = config(folder, &[&overrides[..], &[("data.split", "1,0,0"), ("evaluation.batches", "0")]].concat());
    let tokens = Tokens::find(&of, &mut |_| ()).unwrap();
    assert_eq!(tokens.note(), None);
    let in_data = |file: &str| output.join("data").join(file).display().to_string();
    (in_data("text_text_document"), in_data("text_tokenizer.json"))
}

#[test]
fn a_tokenizer_that_did_not_write_the_tokens_is_refused_before_the_run() {
    let folder = book();
    let bytes = written(folder.path(), "Some words. ", "byte", "bytes");
    let other = written(folder.path(), "ab", "char", "other");
    let of = |tokenizer: &str, more: &[(&str, &str)]| {
        let keys = [("data.prefixes", bytes.0.as_str()), ("data.text", "[]"), ("data.tokenizer", tokenizer)];
        let size = [("model.vocab-size", "300"), ("data.split", "1,0,0"), ("evaluation.batches", "0")];
        config(folder.path(), &[&keys[..], &size, more].concat())
    };
    let checked = |config: &RunConfig| Plan::new(config, &[]).unwrap().check_tokenizer();
    assert_eq!(checked(&of(&bytes.1, &[])).unwrap(), None);
    let refused = checked(&of(&other.1, &[])).unwrap_err().to_string();
    let says = " has 3 tokens, data.prefixes have 257; name the tokenizer that wrote them";
    assert_eq!(refused, format!("data.tokenizer = {}{says}", other.1));
    assert_eq!(RunData::open(&of(&other.1, &[]), &mut |_| ()).err().unwrap().to_string(), refused);
    // The model is too small for the tokens of no known tokenizer.
    let small = of("none", &[("model.vocab-size", "200")]);
    let refused = checked(&small).unwrap_err().to_string();
    says!(refused, "data.prefixes: ", "has token 256, but model.vocab-size = 200; nearest legal: 257, or");
    // Ends of documents need not be the tokenizer's.
    assert_eq!(checked(&of(&other.1, &[("data.eod-id", "256")])).unwrap(), None);
}

/// Nobody has said that it is the tokenizer of the tokens.
#[test]
fn the_tokenizer_of_a_folder_that_did_not_write_the_tokens_is_doubted() {
    let folder = book();
    let hf = folder.path().join("hf");
    std::fs::create_dir(&hf).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf/llama3/config.json");
    std::fs::copy(golden, hf.join("config.json")).unwrap();
    let tokens = written(folder.path(), "Some words. ", "char", "words");
    std::fs::copy(written(folder.path(), "ab", "char", "other").1, hf.join("tokenizer.json")).unwrap();
    let (hf, own) = (hf.display().to_string(), hf.join("tokenizer.json").display().to_string());
    let keys = [("model.hf", hf.as_str()), ("data.prefixes", &tokens.0), ("data.text", "[]")];
    let of = config(folder.path(), &[&keys[..], &[("data.tokenizer", &own)]].concat());
    let note = Tokens::find(&of, &mut |_| ()).unwrap().note().unwrap();
    says!(note, &own, " has 3 tokens, data.prefixes have ", "it is the one of model.hf");
}

/// As far as that is known before the text is tokenized.
#[test]
fn a_tokenizer_made_from_the_text_is_too_large_before_the_run() {
    let folder = book();
    let said = |tokenizer: &str, size: &str| {
        let config = config(folder.path(), &[("data.tokenizer", tokenizer), ("model.vocab-size", size)]);
        Plan::new(&config, &[]).unwrap().check_tokenizer().map_err(|error| error.to_string())
    };
    let text = std::fs::read_to_string(folder.path().join("book.txt")).unwrap();
    let characters = text.chars().collect::<std::collections::BTreeSet<_>>().len();
    let needed = (characters + 1).to_string();
    assert_eq!(said("char", &needed), Ok(None));
    let refused = said("char", &characters.to_string()).unwrap_err();
    let nearest = format!("but model.vocab-size = {characters}; nearest legal: {needed}");
    assert_eq!(refused, format!("data.tokenizer = char has {needed} tokens, {nearest}"));
    assert!(said("byte", "256").unwrap_err().ends_with("nearest legal: 257"));
    assert!(!folder.path().join("run").exists());
}
