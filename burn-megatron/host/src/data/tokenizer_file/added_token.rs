//! Tokens that are found in a text before it is divided.

use serde_json::{Value, json};

/// A token that is found in texts as it stands there, in the form of `tokenizer.json`.
pub(super) fn added_token(id: usize, content: &str, special: bool) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": special,
    })
}
