//! Tokenizers that see spaces as symbols of a byte-pair encoding over the whole text: Llama 2's, Mistral's, Gemma's.

use serde_json::{Value, json};

/// A space among the symbols.
const SPACE: &str = "▁";

/// Whether such a tokenizer puts a space in front of every text. `None` if it is another, or one that may merge a space with what is
/// before it: then what it makes of a text depends on where the text begins.
pub(super) fn puts_space(normalizer: &Value, pre_tokenizer: &Value, model: &Value) -> Option<bool> {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let steps = match normalizer["type"].as_str() {
        Some("Sequence") => normalizer["normalizers"].as_array()?.as_slice(),
        _ => std::slice::from_ref(normalizer),
    };
    let is_whole = pre_tokenizer.is_null();
    let puts_space = match steps {
        [prepend, last] if *prepend == json!({"type": "Prepend", "prepend": SPACE}) && *last == replace && is_whole => {
            true
        }
        // There is no space any more at which it could split.
        [only] if *only == replace && (is_whole || is_split_at_spaces(pre_tokenizer)) => false,
        [none] if none.is_null() && is_metaspace(pre_tokenizer) => false,
        _ => return None,
    };
    merges_no_word_with_a_space(model).then_some(puts_space)
}

fn is_split_at_spaces(pre_tokenizer: &Value) -> bool {
    pre_tokenizer["type"] == "Split" && pre_tokenizer["pattern"]["String"] == " "
}

/// Its chunks begin with a space, so that it puts no other in front of them.
fn is_metaspace(pre_tokenizer: &Value) -> bool {
    pre_tokenizer["type"] == "Metaspace" && pre_tokenizer["replacement"] == SPACE && pre_tokenizer["split"] == false
}

/// Whether a model is a byte-pair encoding none of whose symbols has a space behind anything else: nothing is ever merged across the
/// end of a word, and merges on both sides do not know of each other.
fn merges_no_word_with_a_space(model: &Value) -> bool {
    let is_none = |key: &str| model[key].as_str().is_none_or(str::is_empty);
    let ends_words = !is_none("continuing_subword_prefix") || !is_none("end_of_word_suffix");
    let Some(vocabulary) = model["vocab"].as_object() else { return false };
    model["type"] == "BPE"
        && model["ignore_merges"] != true
        && !ends_words
        // Unknown symbols may be fused with their neighbors.
        && vocabulary.contains_key(SPACE)
        && vocabulary.keys().all(|symbol| !symbol.trim_start_matches(SPACE).contains(SPACE))
}
