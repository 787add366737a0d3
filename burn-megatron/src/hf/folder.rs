//! A Hugging Face folder as the source of a model's weights.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use backend_dist::launch::BoxError;
use models::names::Foreign;
use models::{FamilyConfig, ModelConfig, WeightSource};
use serde_json::Value;

use super::companions::Companions;
use super::error::HfFolderError;
use super::generation::GenerationConfig;
use super::tensors::{INDEX, Stored, Tensors};
use super::writer::TensorReader;
use crate::element::Element;

/// An opened folder: `config.json` is understood, and every weight is there with the shape that the model needs. The
/// weights stay on disk; what is read of them is what is asked for.
#[derive(Debug)]
pub struct HfFolder {
    folder: PathBuf,
    config: FamilyConfig,
    generation: GenerationConfig,
    companions: Companions,
    tensors: Tensors,
    /// Our name, where it is in Hugging Face's tensor, and what that is called in this folder.
    places: HashMap<String, (Foreign, String)>,
}

impl HfFolder {
    /// Opens a folder with `config.json` and `model.safetensors`, or `model.safetensors.index.json` and its shards, and
    /// checks every tensor.
    ///
    /// # Errors
    /// If the architecture or a key of the configuration is not supported; if a tensor is missing, unexpected, or has
    /// another shape or an unknown type; if a file is missing or cut off. The message names file and tensor.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, HfFolderError> {
        let folder = folder.as_ref().to_path_buf();
        let path = folder.join("config.json");
        let text = std::fs::read(&path).map_err(HfFolderError::io("read", &path))?;
        let raw: Value =
            serde_json::from_slice(&text).map_err(|source| HfFolderError::Json { path: path.clone(), source })?;
        let config =
            FamilyConfig::from_hf(&raw).map_err(|source| HfFolderError::Config { folder: folder.clone(), source })?;
        config.check().map_err(|error| HfFolderError::file(&path, error.to_string()))?;
        let generation = GenerationConfig::read(&folder, &raw)?;
        let companions = Companions::read(&folder)?;
        let tensors = Tensors::open(&folder)?;
        let config = config.hf_present(|name| tensors.get(name).is_some());
        let places = places(&folder, &config, &tensors)?;
        unexpected(&config, &tensors, &places)?;
        Ok(Self { folder, config, generation, companions, tensors, places })
    }

    /// The model.
    pub fn config(&self) -> &FamilyConfig {
        &self.config
    }

    /// How to sample from the model.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The small text files beside the weights.
    pub fn companions(&self) -> &Companions {
        &self.companions
    }

    /// `tokenizer.json`, if there is one.
    pub fn tokenizer_path(&self) -> Option<PathBuf> {
        Some(self.folder.join("tokenizer.json")).filter(|path| path.exists())
    }

    /// The tensor of ours, where in it our values are, and their type.
    fn find(&self, name: &str, shape: &[usize]) -> Result<(Stored<'_>, &Foreign, Element), BoxError> {
        let (foreign, stored) = self.places.get(name).ok_or("the model of this folder has no tensor of this name")?;
        if foreign.our_shape() != shape {
            return Err(format!("its shape is {:?}, the model needs {shape:?}", foreign.our_shape()).into());
        }
        let found = self.tensors.get(stored).and_then(|found| Some((found, Element::of(found.dtype)?)));
        let (found, element) = found.ok_or("the folder was changed while it was open")?;
        Ok((found, foreign, element))
    }
}

impl TensorReader for HfFolder {
    fn element(&self, name: &str, shape: &[usize]) -> Result<Element, BoxError> {
        Ok(self.find(name, shape)?.2)
    }

    fn read_bytes(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError> {
        let (found, foreign, element) = self.find(name, shape)?;
        let size = element.size();
        let mut bytes = Vec::with_capacity(ranges.iter().map(ExactSizeIterator::len).product::<usize>() * size);
        for run in foreign.runs(ranges) {
            match run.step {
                1 => bytes.extend_from_slice(&found.data[run.start * size..(run.start + run.len) * size]),
                _ => run.positions().for_each(|at| bytes.extend_from_slice(&found.data[at * size..(at + 1) * size])),
            }
        }
        Ok(bytes)
    }
}

impl WeightSource for HfFolder {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        let element = self.element(name, shape)?;
        Ok(element.decode(&self.read_bytes(name, shape, ranges)?))
    }
}

/// Where each of our tensors is; all of them must be there.
fn places(
    folder: &Path,
    config: &FamilyConfig,
    tensors: &Tensors,
) -> Result<HashMap<String, (Foreign, String)>, HfFolderError> {
    let prefix = config.hf_optional_prefix();
    let place = |(ours, foreign): (&str, &Foreign)| {
        let short = prefix.and_then(|prefix| foreign.name.strip_prefix(prefix));
        let names = [Some(foreign.name.as_str()), short];
        let Some((name, found)) = names.into_iter().flatten().find_map(|name| Some((name, tensors.get(name)?))) else {
            let what = "is missing: config.json describes a model that has it";
            return Err(HfFolderError::tensor(&tensors.any_path(folder), &foreign.name, what));
        };
        if found.shape != foreign.shape {
            let what = format!("has shape {:?}, config.json needs {:?}", found.shape, foreign.shape);
            return Err(HfFolderError::tensor(found.path, name, what));
        }
        if Element::of(found.dtype).is_none() {
            let what = format!("has elements of type {:?}, weights can be F64, F32, BF16 or F16", found.dtype);
            return Err(HfFolderError::tensor(found.path, name, what));
        }
        Ok((ours.to_string(), (foreign.clone(), name.to_string())))
    };
    config.hf_names().iter().map(place).collect()
}

/// Every other tensor must be known to be no weight of its own.
fn unexpected(
    config: &FamilyConfig,
    tensors: &Tensors,
    places: &HashMap<String, (Foreign, String)>,
) -> Result<(), HfFolderError> {
    let used: std::collections::HashSet<&str> = places.values().map(|(_, stored)| stored.as_str()).collect();
    let prefix = config.hf_optional_prefix().unwrap_or_default();
    for name in tensors.names().filter(|name| !used.contains(name)) {
        if config.hf_is_derived(name.strip_prefix(prefix).unwrap_or(name)) {
            continue;
        }
        let Some(found) = tensors.get(name) else { continue };
        let original = config.hf_tied_copy().filter(|[copy, _]| *copy == name).map(|[_, original]| original);
        let Some(original) = original else {
            let what = format!(
                "is not part of the model that config.json describes; remove it from the file, and from {INDEX} if there is one"
            );
            return Err(HfFolderError::tensor(found.path, name, what));
        };
        let original = [original, original.strip_prefix(prefix).unwrap_or(original)];
        let of = original.iter().find_map(|name| tensors.get(name));
        if of.is_none_or(|of| of.dtype != found.dtype || of.shape != found.shape || of.data != found.data) {
            let what = format!("differs from `{}`, but config.json says that they are tied", original[0]);
            return Err(HfFolderError::tensor(found.path, name, what));
        }
    }
    Ok(())
}
