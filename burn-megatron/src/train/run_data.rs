//! What the data sets of all kinds of runs are.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::ModelConfig;

use super::TrainError;
use crate::config::RunConfig;
use crate::data::preprocess::SMALLEST_BPE;
use crate::data::{TokenDataset, tokenizer_path};
use crate::learner::GrpoRun;

/// What a run trains on and is evaluated on.
pub struct RunData {
    /// Sequences to learn from.
    pub train: Arc<dyn TokenDataset>,
    /// Sequences to evaluate on; those to learn from where no evaluation is asked for.
    pub valid: Arc<dyn TokenDataset>,
    /// Sequences for the end: test data, or else validation data.
    pub last: Option<Arc<dyn TokenDataset>>,
    /// The `tokenizer.json` that made the tokens, if it is known.
    pub tokenizer: Option<PathBuf>,
    /// Lines about the data for the user.
    pub notes: Vec<String>,
    /// What is completed, and who judges it, in a run of GRPO.
    pub grpo: Option<GrpoRun>,
}

/// Whether the model has an entry for every token.
pub(super) fn fits(config: &RunConfig, tokens: usize, tokenizer: Option<&Path>) -> Result<(), TrainError> {
    let vocabulary = config.model.config.vocab_size();
    if tokens <= vocabulary {
        return Ok(());
    }
    let path = tokenizer.unwrap_or(Path::new("tokenizer")).to_path_buf();
    let advice = match &config.model.hf {
        None => format!("nearest legal: {tokens}"),
        Some(folder) => smaller_tokenizer(config, folder, &path),
    };
    Err(TrainError::Vocabulary { path, tokens, vocabulary, advice })
}

/// What to do about a tokenizer that is too large for a model that has its size from a folder.
fn smaller_tokenizer(config: &RunConfig, folder: &Path, tokenizer: &Path) -> String {
    let vocabulary = config.model.config.vocab_size();
    let own = tokenizer_path(folder);
    let (fixed, text) = (format!("{} has no more", folder.display()), !config.data.text.is_empty());
    let same = |a: &Path, b: &Path| a.canonicalize().ok().is_some_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    match own.is_file() {
        true if !same(&own, tokenizer) => format!("{fixed}: take its own, data.tokenizer = {}", own.display()),
        _ if text && config.data.tokenizer.as_deref() == Some("bpe") && vocabulary >= SMALLEST_BPE => {
            format!("{fixed}; nearest legal: data.bpe-size = {vocabulary}")
        }
        // Its tokens may be more than the model has ever seen, and the data need not have them.
        _ if text => format!(
            "{fixed}: tokenize with `preprocess`, and name the files in data.prefixes without data.tokenizer; tokens that the model \
             lacks are then looked for in the data"
        ),
        _ => format!(
            "{fixed}: leave data.tokenizer out (none), and name data.eod-id if it is needed; tokens that the model lacks are then \
             looked for in the data"
        ),
    }
}
