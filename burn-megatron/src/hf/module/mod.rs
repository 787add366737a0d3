//! Hugging Face folders of plain Burn modules, read and written.

mod fill;
mod freeze;
mod merge;
mod small_files;
mod tensors;
mod write;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType};
use models::hf::{ForeignParam, HfModule, ModuleNames, module_classes};
use models::lora::Adapter;
use serde_json::Value;

use super::adapter::read_module_adapter;
use super::error::HfFolderError;
use super::folder::read_config;
use super::tensors::{INDEX, Stored, Tensors};
use fill::Fill;
pub(crate) use freeze::{freeze, names};
pub(crate) use small_files::copy_small_files;
pub(crate) use tensors::{Wanted, named_tensors};
pub use write::ModuleExport;

/// An opened folder whose model is a plain Burn module: `config.json`, and safetensors files.
///
/// ```no_run
/// use burn::tensor::{Device, FloatDType};
/// use burn_megatron::hf::{ModuleExport, ModuleFolder};
/// use models::Bert;
///
/// let folder = ModuleFolder::open("google-bert/bert-base-uncased")?;
/// let config = folder.config::<Bert>()?;
/// let model: Bert = folder.read(&config, FloatDType::F32, &Device::flex().autodiff())?;
/// // ... train it, in any layout of a Burn module ...
/// let what = ModuleExport { original: Some(folder.original()), ..ModuleExport::default() };
/// what.write("runs/bert", &model, &config)?;
/// # Ok::<(), burn_megatron::hf::HfFolderError>(())
/// ```
#[derive(Debug)]
pub struct ModuleFolder {
    folder: PathBuf,
    original: Value,
    tensors: Tensors,
    adapter: Option<PathBuf>,
}

impl ModuleFolder {
    /// Opens `config.json` and the safetensors files of a folder.
    ///
    /// # Errors
    /// If a file is missing, damaged or cut off.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, HfFolderError> {
        let folder = folder.as_ref().to_path_buf();
        let original = read_config(&folder)?;
        let tensors = Tensors::safetensors(&folder)?;
        Ok(Self { folder, original, tensors, adapter: None })
    }

    /// The same with the folder of an adapter that peft wrote, which `forward_module` and
    /// [`write_merged`](Self::write_merged) add to the model.
    pub fn with_adapter(mut self, adapter: impl AsRef<Path>) -> Self {
        self.adapter = Some(adapter.as_ref().to_path_buf());
        self
    }

    /// The adapter, if there is one. Fails as [`read_module_adapter`].
    pub(crate) fn adapter<M: HfModule>(&self, module: &M) -> Result<Option<Adapter>, HfFolderError> {
        self.adapter.as_ref().map(|folder| read_module_adapter(folder, module)).transpose()
    }

    /// Whether the model of a folder is a plain Burn module, by the `model_type` of its `config.json`.
    ///
    /// # Errors
    /// If `config.json` cannot be read.
    pub fn is_one(folder: impl AsRef<Path>) -> Result<bool, HfFolderError> {
        let config = read_config(folder.as_ref())?;
        Ok(config["model_type"].as_str().and_then(module_classes).is_some())
    }

    /// `config.json` as it is.
    pub fn original(&self) -> &Value {
        &self.original
    }

    /// `model_type` of `config.json`, empty if there is none.
    pub fn model_type(&self) -> &str {
        self.original["model_type"].as_str().unwrap_or_default()
    }

    /// Whether the files have a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.get(name).is_some()
    }

    /// The sizes of the model.
    ///
    /// # Errors
    /// Names the key of `config.json` that this model does not have.
    pub fn config<M: HfModule>(&self) -> Result<M::Config, HfFolderError> {
        let wrong = |source| HfFolderError::Config { folder: self.folder.clone(), source };
        let config = M::from_hf(&self.original).map_err(wrong)?;
        Ok(M::present(config, &|name| self.has(name)))
    }

    /// The model with the folder's weights, in `dtype` on `device`.
    ///
    /// # Errors
    /// If a tensor is missing, unexpected, or has another shape or an unknown type. The message names file and tensor.
    pub fn read<M: HfModule>(
        &self,
        config: &M::Config,
        dtype: FloatDType,
        device: &Device,
    ) -> Result<M, HfFolderError> {
        let names = M::NAMES;
        let mut fill = Fill::new::<M>(self, dtype);
        let module = M::init(config, device).map(&mut fill);
        self.refuse_others(&names, &fill.used()?)?;
        Ok(module)
    }

    /// The tensor of a parameter, which may have a name of `older`.
    fn find(&self, foreign: &ForeignParam, older: Vec<String>) -> Result<(String, Stored<'_>), HfFolderError> {
        let names = [foreign.name.clone()].into_iter().chain(foreign.old_name.clone()).chain(older);
        let found = names.into_iter().find_map(|name| self.tensors.get(&name).map(|tensor| (name, tensor)));
        found.ok_or_else(|| {
            let what = "is missing: config.json describes a model that has it";
            HfFolderError::tensor(&self.tensors.any_path(&self.folder), &foreign.name, what)
        })
    }

    /// Every other tensor must be known to be no weight of its own.
    fn refuse_others(&self, names: &ModuleNames, used: &HashSet<String>) -> Result<(), HfFolderError> {
        for name in self.tensors.names() {
            let Some(found) = self.tensors.get(name) else { continue };
            if used.contains(name) || names.derived.contains(&name) {
                continue;
            }
            let original = names.copies.iter().find(|(copy, _)| *copy == name).map(|(_, original)| *original);
            let Some(original) = original else {
                let what = format!(
                    "is not part of the model that config.json describes; remove it from the file, and from {INDEX} if there is one"
                );
                return Err(HfFolderError::tensor(found.path, name, what));
            };
            let equal = self.tensors.get(original).map(|original| original.equals(&found)).transpose();
            if equal.map_err(HfFolderError::io("read", found.path))? != Some(true) {
                let what = format!("differs from `{original}`, but the model has them tied");
                return Err(HfFolderError::tensor(found.path, name, what));
            }
        }
        Ok(())
    }
}
