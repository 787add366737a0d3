//! Where a causal language model comes from: a Hugging Face folder or a checkpoint.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use backend_dist::process::Cluster;
use models::{FamilyConfig, WeightSource};
use tokenizers::Tokenizer;

use super::Args;
use crate::cli::export::adapters;
use crate::cli::{open_checkpoint, open_folder};
use crate::console::warn;
use crate::data::preprocess::end_of_document;
use crate::data::{read_tokenizer, readable_tokenizer};
use crate::hf::{GenerationConfig, model_of};

/// A model on disk and what comes with it.
pub(super) struct Source {
    pub config: FamilyConfig,
    pub weights: Box<dyn WeightSource>,
    pub tokenizer: Option<Tokenizer>,
    pub generation: GenerationConfig,
}

/// The model that the flags name. Fails if it cannot be read or has adapters only.
pub(super) fn open(args: &Args, cluster: &Cluster) -> Result<Source> {
    if let Some(dir) = &args.hf {
        let folder = open_folder(dir, Some(cluster))?;
        // Ids need none.
        let path = match args.tokens {
            Some(_) => readable_tokenizer(dir).unwrap_or_default(),
            None => folder.tokenizer_path(),
        };
        let tokenizer = path.map(|path| tokenizer(&path)).transpose()?;
        let (config, generation) = (folder.config().clone(), folder.generation().clone());
        return Ok(Source { config, weights: Box::new(folder), tokenizer, generation });
    }
    let dir = args.checkpoint.as_ref().context("--hf DIR or --checkpoint DIR says where the model is")?;
    let checkpoint = open_checkpoint(dir)?;
    checkpoint.verify(0, 1)?;
    if let Some(warning) = checkpoint.warning().filter(|_| cluster.is_first()) {
        warn(format_args!("{}: {warning}", checkpoint.path().display()));
    }
    let config = model_of(&checkpoint)?;
    if adapters(&checkpoint, &config)?.is_some() {
        bail!(
            "{} has adapters only: `burn-megatron export --adapter DIR` writes them, `merge` adds them to their base, and --hf \
             takes the result",
            checkpoint.path().display()
        );
    }
    let tokenizer = checkpoint.tokenizer().map(|path| tokenizer(&path)).transpose()?;
    let end = tokenizer.as_ref().and_then(|tokenizer| end_of_document(tokenizer, None));
    let generation = GenerationConfig {
        eos_token_id: end.and_then(|id| u32::try_from(id).ok()).into_iter().collect(),
        ..GenerationConfig::default()
    };
    Ok(Source { config, weights: Box::new(checkpoint), tokenizer, generation })
}

pub(in crate::cli) fn tokenizer(path: &Path) -> Result<Tokenizer> {
    read_tokenizer(path).map_err(|error| anyhow!("{}: {error}", path.display()))
}
