//! What a model is used with besides its weights.

use std::path::Path;

use crate::hf::writer::write_text;
use crate::hf::{Companions, HfFolderError};

/// Files next to the weights, besides [`Companions`].
const SMALL_FILES: [&str; 5] =
    ["preprocessor_config.json", "processor_config.json", "spiece.model", "tokenizer.json", "vocab.txt"];

/// Copies them, as far as the folder `from` has them. Fails if one cannot be read or written.
pub(crate) fn copy_small_files(from: &Path, to: &Path) -> Result<(), HfFolderError> {
    for (name, text) in Companions::read(from)?.others() {
        write_text(&to.join(name), text)?;
    }
    for (file, name) in SMALL_FILES.map(|name| (from.join(name), name)) {
        if file.exists() {
            std::fs::copy(&file, to.join(name)).map_err(HfFolderError::io("read", &file))?;
        }
    }
    Ok(())
}
