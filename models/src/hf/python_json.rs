//! JSON as Python writes it.

use serde_json::Value;

/// Reads a `config.json`. Python's `json` writes infinity as a bare `Infinity`, which is no JSON; transformers 5 writes
/// `{"__float__": "Infinity"}` for it, which this gives for both.
///
/// ```
/// let file = br#"{"time_step_limit": [0.0, Infinity], "note": "Infinity"}"#;
/// let config = models::hf::parse_config(file)?;
/// assert_eq!(config["time_step_limit"][1]["__float__"], "Infinity");
/// assert_eq!(config["note"], "Infinity");
/// # Ok::<(), serde_json::Error>(())
/// ```
///
/// # Errors
/// If the text is no JSON otherwise.
pub fn parse_config(text: &[u8]) -> serde_json::Result<Value> {
    const BARE: &[u8] = b"Infinity";
    let plain = serde_json::from_slice(text);
    if plain.is_ok() || !text.windows(BARE.len()).any(|part| part == BARE) {
        return plain;
    }
    let (mut written, mut at, mut in_string) = (Vec::with_capacity(text.len()), 0, false);
    while at < text.len() {
        match text[at] {
            b'\\' if in_string => {
                written.push(text[at]);
                at += 1;
            }
            b'"' => in_string = !in_string,
            b'I' if !in_string && text[at..].starts_with(BARE) => {
                written.extend_from_slice(br#"{"__float__": "Infinity"}"#);
                at += BARE.len();
                continue;
            }
            _ => {}
        }
        written.extend(text.get(at));
        at += 1;
    }
    serde_json::from_slice(&written).or(plain)
}
