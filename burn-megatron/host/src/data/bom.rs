//! The mark with which some editors begin a file in UTF-8.

use std::io::{self, BufRead};
use std::path::Path;

const MARK: &[u8] = b"\xEF\xBB\xBF";

/// Leaves it out.
pub(super) fn skip_bom(file: &mut impl BufRead) -> io::Result<()> {
    if file.fill_buf()?.starts_with(MARK) {
        file.consume(MARK.len());
    }
    Ok(())
}

/// A file without it.
pub(super) fn without_bom(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(MARK).unwrap_or(bytes)
}

/// The text of a file in UTF-8, without the mark with which some editors begin it.
///
/// # Errors
/// If it cannot be read, or is no UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    let text = std::fs::read_to_string(path)?;
    Ok(text.strip_prefix('\u{feff}').map(String::from).unwrap_or(text))
}
