//! The families that a file trains.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType};
use tokenizers::Tokenizer;

use crate::config::ModuleConfig;
use crate::data::read_tokenizer;
use crate::hf::{ModuleFolder, copy_small_files};
use crate::learner::{ReadBatch, Trainable};
use crate::train::TrainError;

/// What a run learns from.
pub(super) struct ModuleData<B> {
    pub train: ReadBatch<B>,
    pub valid: ReadBatch<B>,
    /// Samples of an evaluation.
    pub held_out: usize,
    /// What there is to say of it, in lines.
    pub notes: Vec<String>,
    /// What tells it from other data, of lists that may have changed under the same name.
    pub digest: Option<String>,
}

/// A family.
pub(super) trait Family: Trainable {
    /// Samples of training and of validation.
    fn data(config: &ModuleConfig, sizes: &Self::Config) -> Result<ModuleData<Self::Batch>, TrainError>;

    /// The model of `model.hf`, with these sizes.
    fn read(
        folder: &ModuleFolder,
        sizes: &Self::Config,
        dtype: FloatDType,
        device: &Device,
    ) -> Result<Self, TrainError> {
        Ok(folder.read(sizes, dtype, device)?)
    }

    /// In words, that a run of these sizes does not begin with the head of the folder's model.
    fn new_head(_folder: &Path, _sizes: &Self::Config) -> Result<Option<String>, TrainError> {
        Ok(None)
    }

    /// Adds to an exported folder what the model is used with besides its weights.
    fn complete(config: &ModuleConfig, _sizes: &Self::Config, exported: &Path) -> Result<(), TrainError> {
        match &config.model.hf {
            Some(folder) => Ok(copy_small_files(folder, exported)?),
            None => Ok(()),
        }
    }
}

/// `data.tokenizer`, and its path.
pub(super) fn tokenizer(config: &ModuleConfig) -> Result<(Tokenizer, PathBuf), TrainError> {
    let path = PathBuf::from(config.data.tokenizer.as_deref().unwrap_or_default());
    match read_tokenizer(&path) {
        Ok(tokenizer) => Ok((tokenizer, path)),
        Err(error) => Err(TrainError::Tokenizer { path, what: error.to_string() }),
    }
}

/// Adds it to an exported folder, of whatever kind its file is, as `tokenizer.json`.
pub(super) fn save_tokenizer(config: &ModuleConfig, exported: &Path) -> Result<Tokenizer, TrainError> {
    let (tokenizer, path) = tokenizer(config)?;
    let saved = tokenizer.save(exported.join("tokenizer.json"), true);
    saved.map_err(|error| TrainError::Tokenizer { path, what: error.to_string() })?;
    Ok(tokenizer)
}

/// Evaluates an expression with the name of the model of a configuration's family.
macro_rules! of_family {
    ($config:expr, $family:ident => $value:expr) => {
        match $config.model.model_type() {
            "bert" => {
                type $family = models::Bert;
                $value
            }
            "t5" => {
                type $family = models::T5;
                $value
            }
            "vit" => {
                type $family = models::images::Vit;
                $value
            }
            _ => {
                type $family = models::images::Llava;
                $value
            }
        }
    };
}
pub(super) use of_family;
