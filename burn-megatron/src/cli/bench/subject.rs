//! The run to measure, and its data.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use backend_dist::gpu::GpuInfo;
use models::ModelConfig;

use crate::bench::{DocumentLengths, SyntheticTokens, Timing, recipe};
use crate::cli::preprocess::Display;
use crate::config::RunConfig;
use crate::data::TokenDataset;
use crate::train::RunData;

/// The run of a file, or a recipe distributed over the ranks.
pub(super) fn config(
    what: &str,
    overrides: &[(String, String)],
    ranks: Option<usize>,
    timing: Timing,
    gpus: &[GpuInfo],
) -> Result<RunConfig> {
    let path = Path::new(what);
    let config = if path.is_file() {
        RunConfig::load(Some(path), overrides)?
    } else {
        let there = if gpus.is_empty() { 2 } else { gpus.len() };
        let memory = gpus.iter().map(|gpu| gpu.total).min();
        recipe::resolve(&recipe::find(what)?, overrides, ranks.unwrap_or(there), timing.total(), memory)?
    };
    config.job()?;
    Ok(config)
}

/// The data that the run names, or random tokens; and their description.
pub(super) fn data(
    config: &RunConfig,
    timing: Timing,
    documents: Option<DocumentLengths>,
) -> Result<(Arc<dyn TokenDataset>, String)> {
    let is_random = config.data.text.is_empty() && config.data.prefixes.is_empty() && !config.has_conversations();
    if documents.is_some() {
        if !is_random {
            bail!("--document-lengths divides random tokens: leave data.text and data.prefixes out");
        }
        if !(config.data.reset_attention_mask && config.data.reset_position_ids) {
            bail!(
                "--document-lengths has an effect with --data.reset-attention-mask true and --data.reset-position-ids true \
                 only"
            );
        }
    }
    if is_random {
        let (training, vocabulary) = (&config.training, config.model.config.vocab_size());
        let rows = timing.total() * training.global_batch;
        let tokens = SyntheticTokens::new(vocabulary, training.seq_length, rows).with_documents(documents);
        let of = documents.map_or(String::new(), |lengths| format!(" in documents of {lengths}"));
        return Ok((Arc::new(tokens), format!("random tokens{of}")));
    }
    config.check()?;
    let mut display = Display::new();
    let data = RunData::open(config, &mut |progress| display.show(progress));
    display.clear();
    Ok((data?.train, "tokens of a text".into()))
}
