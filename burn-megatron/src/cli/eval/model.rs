//! The model that is evaluated: one of the engine, or a T5.

use std::path::Path;

use anyhow::{Result, bail};
use backend_dist::mesh::ParallelLayout;
use backend_dist::process::Cluster;
use models::layout::sequence_unit;
use models::lora::Adapter;
use models::{FamilyConfig, ModelConfig, T5};
use tokenizers::Tokenizer;

use super::Args;
use crate::cli::open_folder;
use crate::console::warn;
use crate::eval::{Answers, EvalError, EvalSettings, Work, compute, compute_module};
use crate::hf::{GenerationConfig, HfFolder, HfFolderError, ModuleFolder, read_adapter};

/// What T5 was trained with, if `config.json` does not say.
const T5_LENGTH: usize = 512;

pub(super) enum Model {
    Causal(Box<HfFolder>, Option<Adapter>),
    /// With the size of its vocabulary.
    T5(ModuleFolder, usize),
}

impl Model {
    /// Fails if a file is wrong, or the model can be neither.
    pub fn open(args: &Args, cluster: &Cluster) -> Result<Self> {
        if ModuleFolder::is_one(&args.hf)? {
            let folder = ModuleFolder::open(&args.hf)?;
            if folder.model_type() == "t5" {
                let vocabulary = folder.config::<T5>()?.vocab_size;
                return Ok(Self::T5(args.adapter.iter().fold(folder, ModuleFolder::with_adapter), vocabulary));
            }
        }
        let folder = open_folder(&args.hf, Some(cluster))?;
        let adapter = args.adapter.as_deref().map(|path| read_adapter(path, folder.config())).transpose()?;
        Ok(Self::Causal(Box::new(folder), adapter))
    }

    pub fn generation(&self, folder: &Path) -> Result<GenerationConfig, HfFolderError> {
        match self {
            Self::Causal(opened, _) => Ok(opened.generation().clone()),
            Self::T5(..) => GenerationConfig::of_folder(folder),
        }
    }

    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Causal(folder, _) => folder.config().vocab_size(),
            Self::T5(_, vocabulary) => *vocabulary,
        }
    }

    /// What `--max-length` says or the model is made for, as much of it as all ranks can share.
    pub fn max_length(&self, layout: &ParallelLayout, asked: Option<usize>) -> Result<usize> {
        match self {
            Self::Causal(folder, _) => causal_length(folder.config(), layout, asked, None),
            // Its positions are distances, of which there are as many as one likes.
            Self::T5(folder, _) => {
                let trained = folder.original()["n_positions"].as_u64().map(|positions| positions as usize);
                match asked.or(trained).unwrap_or(T5_LENGTH) {
                    0 => bail!("--max-length 0 leaves nothing to do; nearest legal: 1"),
                    length => Ok(length),
                }
            }
        }
    }

    /// What the model says to all of the work.
    pub fn answers(self, work: &Work, tokenizer: &Tokenizer, mut settings: EvalSettings) -> Result<Answers, EvalError> {
        match self {
            Self::Causal(folder, adapter) => {
                settings.forward.adapter = adapter;
                compute((folder.config(), &*folder), work, tokenizer, &settings)
            }
            Self::T5(folder, _) => compute_module(&folder, work, tokenizer, &settings),
        }
    }
}

/// What `--max-length` says or the model is made for, without a word at most `longest`.
pub(in crate::cli) fn causal_length(
    config: &FamilyConfig,
    layout: &ParallelLayout,
    asked: Option<usize>,
    longest: Option<usize>,
) -> Result<usize> {
    let trained = serde_json::to_value(config)?["max_position_embeddings"].as_u64().map(|positions| positions as usize);
    let unit = sequence_unit(layout);
    if let (Some(asked), Some(most)) = (asked, config.dims().max_positions)
        && asked > most
    {
        bail!("--max-length {asked}: the model has {most} learned positions; nearest legal: {most}");
    }
    if let (Some(asked), Some(trained)) = (asked, trained)
        && asked > trained
    {
        warn(format_args!("note: --max-length {asked}: the model is made for {trained} positions"));
    }
    let most = asked.unwrap_or(trained.unwrap_or(2048).min(longest.unwrap_or(usize::MAX)));
    let length = most - most % unit;
    if length < 2 {
        bail!("--max-length {most} is too little in layout {layout}; nearest legal: {}", unit.max(2));
    }
    Ok(length)
}
