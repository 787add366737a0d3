//! A Hugging Face folder as the source of a model's weights.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use backend_dist::launch::BoxError;
use backend_dist::shard::HostFloats;
use models::hf::{has_images, parse_config};
use models::names::Foreign;
use models::{FamilyConfig, ModelConfig, WeightSource};
use serde_json::Value;

use super::companions::Companions;
use super::compressed::read_compressed;
use super::distributed;
use super::error::HfFolderError;
use super::gemma3::language_model;
use super::generation::GenerationConfig;
use super::outputs::TensorReader;
use super::plain::read_plain;
use super::quantised::{Storage, read_fp8, read_mxfp4};
use super::tensors::{INDEX, Stored, Tensors};
use crate::data::{find_tokenizer, read_text};
use crate::element::Element;
use crate::refusal::no_config;

/// An opened folder: `config.json` is understood, and every weight is there with the shape that the model needs. The
/// weights stay on disk: what is asked for is read.
#[derive(Debug)]
pub struct HfFolder {
    folder: PathBuf,
    config: FamilyConfig,
    generation: GenerationConfig,
    companions: Companions,
    tensors: Tensors,
    /// What of the folder is no part of the model, in words.
    left_out: Option<String>,
    /// By our name: which elements of a tensor of Hugging Face's it is, and how that tensor is stored in this folder.
    sources: HashMap<String, (Foreign, Storage)>,
}

impl HfFolder {
    /// Opens a folder with `config.json` and `model.safetensors`, or `model.safetensors.index.json` and its shards, or a
    /// PyTorch DCP checkpoint (`.metadata` and its files), and checks every tensor.
    ///
    /// # Errors
    /// If the architecture or a key of the configuration is not supported; if a tensor is missing, unexpected, or has
    /// another shape or an unknown type; if a file is missing or cut off. The message names file and tensor.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, HfFolderError> {
        Self::with_weights(folder.as_ref(), folder.as_ref())
    }

    /// Opens a folder whose weights are in another one.
    pub fn with_weights(folder: &Path, weights: &Path) -> Result<Self, HfFolderError> {
        let folder = folder.to_path_buf();
        let raw = read_config(&folder)?;
        let config =
            FamilyConfig::from_hf(&raw).map_err(|source| HfFolderError::Config { folder: folder.clone(), source })?;
        let generation = GenerationConfig::read(&folder, &raw)?;
        let companions = Companions::read(&folder)?;
        let mut tensors = Tensors::open(weights, &config)?;
        let left_out = if has_images(&raw) { Some(language_model(&folder, &mut tensors)?) } else { None };
        let config = tensors.present(config);
        let sources = sources(weights, &config, &tensors)?;
        unexpected(&config, &tensors, &sources)?;
        Ok(Self { folder, config, generation, companions, tensors, left_out, sources })
    }

    /// What of the folder is no part of the model, in words: a Gemma 3 with images is read without them.
    pub fn left_out(&self) -> Option<&str> {
        self.left_out.as_deref()
    }

    /// The model.
    pub fn config(&self) -> &FamilyConfig {
        &self.config
    }

    /// How to sample from the model.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The small text files that come with the weights.
    pub fn companions(&self) -> &Companions {
        &self.companions
    }

    /// `tokenizer.json`, or the tokenizer in another file, if there is one.
    pub fn tokenizer_path(&self) -> Option<PathBuf> {
        find_tokenizer(&self.folder)
    }

    /// The states of an optimizer that are called `state` in a DCP folder, as a model of such weights, and the names of
    /// weights without one. Those with none of them have no names. Fails if one has another shape than its weight, or
    /// elements that are no floats.
    pub(super) fn states(&self, weights: &Path, state: &str) -> Result<(Self, Vec<String>), HfFolderError> {
        let megatron = self.is_megatron();
        let tensors =
            Tensors::Distributed(distributed::open_states(weights, &self.config, (megatron, state))?, megatron);
        let prefix = self.config.hf_optional_prefix();
        let (mut sources, mut without) = (HashMap::new(), Vec::new());
        for (ours, foreign) in tensors.names_of(&self.config).iter() {
            let short = prefix.and_then(|prefix| foreign.name.strip_prefix(prefix));
            let names = [Some(foreign.name.as_str()), short];
            let Some((name, found)) = names.into_iter().flatten().find_map(|name| Some((name, tensors.get(name)?)))
            else {
                without.push(foreign.name.clone());
                continue;
            };
            if found.shape != foreign.shape || Element::of(found.dtype).is_none() {
                let what = format!(
                    "has a state `{state}` of shape {:?} in {:?}; its weight has {:?}, and states are floats",
                    found.shape, found.dtype, foreign.shape
                );
                return Err(HfFolderError::tensor(found.path, name, what));
            }
            sources.insert(ours.to_string(), (foreign.clone(), Storage::Plain(name.to_string())));
        }
        without.dedup();
        let (folder, config) = (self.folder.clone(), self.config.clone());
        let (generation, companions) = (self.generation.clone(), self.companions.clone());
        let left_out = None;
        Ok((Self { folder, config, generation, companions, tensors, left_out, sources }, without))
    }

    /// The optimizer's own weights, if there are any and they are more precise than the model's. Fails as
    /// [`HfFolder::states`].
    pub(super) fn more_precise(&self, weights: &Path, state: &str) -> Result<Option<Self>, HfFolderError> {
        let (masters, _) = self.states(weights, state)?;
        let size = |folder: &Self, name: &str| {
            let (_, storage) = folder.sources.get(name)?;
            Some(storage.stored(&folder.tensors)?[0].dtype.bitsize())
        };
        let better = masters.sources.keys().any(|name| size(&masters, name) > size(self, name));
        Ok(better.then_some(masters))
    }

    /// Whether the folder has a tensor of ours.
    pub(super) fn has(&self, name: &str) -> bool {
        self.sources.contains_key(name)
    }

    /// Whether the weights are under Megatron-Core's names.
    pub(super) fn is_megatron(&self) -> bool {
        matches!(self.tensors, Tensors::Distributed(_, true))
    }

    /// Where a tensor is, and in which type it is read.
    fn find(&self, name: &str, shape: &[usize]) -> Result<Found<'_>, BoxError> {
        let (foreign, storage) = self.sources.get(name).ok_or("the model of this folder has no tensor of this name")?;
        if foreign.our_shape() != shape {
            return Err(format!("its shape is {:?}, the model needs {shape:?}", foreign.our_shape()).into());
        }
        let element = |found: &[Stored; 2]| match storage {
            Storage::Plain(_) => Element::of(found[0].dtype),
            Storage::Mxfp4(_) | Storage::Fp8(_) => Some(Element::Bf16),
            Storage::Compressed(..) => Element::of(found[1].dtype),
        };
        let found = storage.stored(&self.tensors).and_then(|found| Some((found, element(&found)?)));
        let (stored, element) = found.ok_or("the folder was changed while it was open")?;
        Ok(Found { stored, foreign, storage, element })
    }
}

/// A stored tensor, which of its elements are ours, how they are stored, and the type in which they are read.
struct Found<'a> {
    stored: [Stored<'a>; 2],
    foreign: &'a Foreign,
    storage: &'a Storage,
    element: Element,
}

impl Found<'_> {
    /// Fills `to` with the elements of a box of our tensor.
    fn read(self, ranges: &[Range<usize>], to: &mut [u8]) -> Result<(), BoxError> {
        let Self { stored, foreign, storage, element } = self;
        let path = stored[0].path;
        let read = match storage {
            Storage::Plain(_) => read_plain(&stored[0], &foreign.runs(ranges), element.size(), to),
            Storage::Mxfp4(_) => read_mxfp4(stored, foreign, ranges, to),
            Storage::Fp8(_) => read_fp8(stored, foreign, ranges, to),
            Storage::Compressed(_, numbers) => read_compressed(stored, *numbers, element, (foreign, ranges), to),
        };
        read.map_err(|error| format!("{}: {error}", path.display()).into())
    }
}

/// The `config.json` of a folder.
pub(crate) fn read_config(folder: &Path) -> Result<Value, HfFolderError> {
    let path = folder.join("config.json");
    if !path.exists() {
        return Err(HfFolderError::NoConfig(no_config(folder)));
    }
    let text = read_text(&path).map_err(HfFolderError::io("read", &path))?;
    parse_config(text.as_bytes()).map_err(|source| HfFolderError::Json { path, source })
}

/// Elements of a box.
fn elements(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).product()
}

impl TensorReader for HfFolder {
    fn element(&self, name: &str, shape: &[usize]) -> Result<Element, BoxError> {
        Ok(self.find(name, shape)?.element)
    }

    fn read_bytes(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError> {
        let found = self.find(name, shape)?;
        let mut bytes = vec![0; elements(ranges) * found.element.size()];
        found.read(ranges, &mut bytes)?;
        Ok(bytes)
    }
}

impl WeightSource for HfFolder {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        Ok(self.read_stored(name, shape, ranges)?.into_f64())
    }

    fn read_stored(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<HostFloats, BoxError> {
        let found = self.find(name, shape)?;
        let mut values = found.element.zeros(elements(ranges));
        found.read(ranges, values.bytes_mut())?;
        Ok(values)
    }
}

/// Where each of our tensors is stored; all of them must be there.
fn sources(
    folder: &Path,
    config: &FamilyConfig,
    tensors: &Tensors,
) -> Result<HashMap<String, (Foreign, Storage)>, HfFolderError> {
    let prefix = config.hf_optional_prefix();
    let source = |(ours, foreign): (&str, &Foreign)| {
        let quantised = Storage::find(&foreign.name, foreign, tensors);
        let wrong = |what| HfFolderError::tensor(&tensors.any_path(folder), &foreign.name, what);
        if let Some(storage) = quantised.map_err(wrong)? {
            return Ok((ours.to_string(), (foreign.clone(), storage)));
        }
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
        Ok((ours.to_string(), (foreign.clone(), Storage::Plain(name.to_string()))))
    };
    tensors.names_of(config).iter().map(source).collect()
}

/// Every other tensor must be known to be no weight of its own.
fn unexpected(
    config: &FamilyConfig,
    tensors: &Tensors,
    sources: &HashMap<String, (Foreign, Storage)>,
) -> Result<(), HfFolderError> {
    let used: HashSet<String> = sources.values().flat_map(|(_, storage)| storage.names()).collect();
    let prefix = config.hf_optional_prefix().unwrap_or_default();
    for name in tensors.names().into_iter().filter(|name| !used.contains(*name)) {
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
        let equal = of.map(|of| of.equals(&found)).transpose().map_err(HfFolderError::io("read", found.path))?;
        if equal != Some(true) {
            let what = format!("differs from `{}`, but config.json says that they are tied", original[0]);
            return Err(HfFolderError::tensor(found.path, name, what));
        }
    }
    Ok(())
}
