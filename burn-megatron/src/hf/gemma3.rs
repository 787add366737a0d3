//! The tensors of a Gemma 3 with images as those of its language model.

use std::path::Path;

use models::hf::name_in_language_model;

use super::error::HfFolderError;
use super::tensors::Tensors;

/// Gives the tensors of a Gemma 3 with images the names of its language model, and says what it has besides.
pub(super) fn language_model(folder: &Path, tensors: &mut Tensors) -> Result<String, HfFolderError> {
    // None are counted in a DCP checkpoint, of which only what the model has is opened.
    let images = match tensors.rename(name_in_language_model)? {
        0 => "tensors".to_string(),
        count => format!("{count} tensors"),
    };
    Ok(format!(
        "{}: of this Gemma 3 the language model is read; {images} for images (vision_tower, multi_modal_projector) are \
         not, and what is written of it is a `gemma3_text` folder",
        folder.display()
    ))
}
