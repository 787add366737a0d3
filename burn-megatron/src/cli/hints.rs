//! Hints before a run starts: what its checkpoints lack.

use crate::config::RunConfig;
use crate::data::readable_tokenizer;

/// Why the checkpoints of a run have no tokenizer although the model's folder or who wrote its tokens has one.
pub(super) fn lacks_tokenizer(config: &RunConfig) -> Option<String> {
    if config.data.tokenizer.is_some() || config.checkpoint.directory.is_none() {
        return None;
    }
    let of_folder = config.model.hf.as_ref().and_then(|folder| readable_tokenizer(folder).err());
    let why = match of_folder {
        Some(error) => format!(": {error}"),
        None if config.data.prefixes.is_empty() => return None,
        None => "; name it in data.tokenizer".to_string(),
    };
    Some(format!("checkpoints are without a tokenizer{why}"))
}
