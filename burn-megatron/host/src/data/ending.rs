//! What a file's name says about its form.

use std::path::Path;

/// Endings of files with a JSON object on each line.
pub const JSON_LINES: [&str; 3] = ["jsonl", "ndjson", "jsonlines"];

/// The part of a file's name after its last dot, in lower case; empty if there is none.
///
/// ```
/// use host::data::{JSON_LINES, ending};
///
/// assert!(JSON_LINES.contains(&&*ending("data/BOOK.JSONL")));
/// assert_eq!(ending("data/book"), "");
/// ```
pub fn ending(path: impl AsRef<Path>) -> String {
    let ending = path.as_ref().extension().unwrap_or_default();
    ending.to_string_lossy().to_ascii_lowercase()
}
