//! The mark with which some editors begin a file in UTF-8.

use std::io::{self, BufRead};

/// Leaves it out.
pub(super) fn skip_bom(file: &mut impl BufRead) -> io::Result<()> {
    if file.fill_buf()?.starts_with(b"\xEF\xBB\xBF") {
        file.consume(3);
    }
    Ok(())
}
