//! A folder of a plain Burn module with the weights of an adapter added: by rows, never a whole model in memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use backend_dist::launch::BoxError;
use backend_dist::shard::HostTensor;
use burn::tensor::Device;
use models::hf::HfModule;
use models::images::{Llava, Siglip, Vit};
use models::lora::Adapter;
use models::names::NameMap;
use models::{Bert, T5};
use serde_json::json;

use super::ModuleFolder;
use super::small_files::copy_small_files;
use crate::element::Element;
use crate::hf::HfFolderError;
use crate::hf::outputs::{Output, TensorReader, outputs};
use crate::hf::tensors::Stored;
use crate::hf::writer::{new_folder, pretty, refuse_full, write_safetensors, write_text};

/// The adapter of a folder, and our names of its layers by the names of their weights in the files.
type Adapted = (Adapter, BTreeMap<String, String>);

type Read = fn(&ModuleFolder) -> Result<Adapted, HfFolderError>;

/// Families by the `model_type` of their `config.json`.
const FAMILIES: [(&str, Read); 6] = [
    ("bert", adapted::<Bert>),
    ("llava", adapted::<Llava>),
    ("siglip", adapted::<Siglip>),
    ("siglip_vision_model", adapted::<Siglip>),
    ("t5", adapted::<T5>),
    ("vit", adapted::<Vit>),
];

impl ModuleFolder {
    /// Writes the folder `to`, which must not exist or be empty: the model with its [adapter](Self::with_adapter) added to
    /// the weights, `W + s B A`, DoRA's `m / ‖W + s B A‖ (W + s B A)`, as peft's `merge_and_unload`. Everything else is as it
    /// is in this folder. Weights have the type `element`, by default their own; files have at most `shard_bytes` of them.
    /// Gives the numbers of layers and of files, and the bytes of all weights.
    ///
    /// # Errors
    /// If the folder has no adapter or one of another model, or a file cannot be read or written.
    pub fn write_merged(
        &self,
        to: &Path,
        element: Option<Element>,
        shard_bytes: u64,
    ) -> Result<(usize, usize, u64), HfFolderError> {
        refuse_full(to)?;
        let (_, adapted) = FAMILIES.iter().find(|(kind, _)| *kind == self.model_type()).ok_or_else(|| {
            let legal = FAMILIES.map(|(kind, _)| kind).join(", ");
            HfFolderError::file(
                &self.folder,
                format!("model_type {} has no adapters; legal: {legal}", self.model_type()),
            )
        })?;
        let (adapter, layers) = adapted(self)?;
        let mut config = self.original.clone();
        if let Some(element) = element {
            let key = if config.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
            config[key] = json!(element.torch_name());
        }
        let mut names = NameMap::default();
        for name in self.tensors.names() {
            // Integers are tables of positions, which follow from the sizes.
            if let Some(stored) = self.tensors.get(name).filter(|stored| Element::of(stored.dtype).is_some()) {
                names.same(name, name, stored.shape);
            }
        }
        let source = Merged { base: self, adapter: &adapter, layers: &layers, element };
        let outputs = outputs(names.iter(), element, &source)?;
        let files = new_folder(to, |folder| {
            copy_small_files(&self.folder, folder)?;
            write_text(&folder.join("config.json"), &pretty(&config))?;
            write_safetensors(folder, shard_bytes, &outputs, &source)
        })?;
        Ok((layers.len(), files, outputs.iter().map(Output::bytes).sum()))
    }
}

fn adapted<M: HfModule>(folder: &ModuleFolder) -> Result<Adapted, HfFolderError> {
    // No parameter is made before it is read.
    let module = M::init(&folder.config::<M>()?, &Device::flex());
    let adapter =
        folder.adapter(&module)?.ok_or_else(|| HfFolderError::file(&folder.folder, "no adapter was named"))?;
    let mut layers = BTreeMap::new();
    for (ours, _, shape) in adapter.plan.targets() {
        let foreign = M::NAMES.foreign(&format!("{ours}.weight"), "Linear").expect("every layer has a name");
        let older = M::older_names(&foreign.name);
        let (name, stored) = folder.find(&foreign, older)?;
        if stored.shape != shape {
            let what = format!("has the shape {:?} where config.json says {shape:?}", stored.shape);
            return Err(HfFolderError::tensor(stored.path, &name, what));
        }
        layers.insert(name, ours.to_string());
    }
    Ok((adapter, layers))
}

/// Weights by the names that they have in files.
struct Merged<'a> {
    base: &'a ModuleFolder,
    adapter: &'a Adapter,
    layers: &'a BTreeMap<String, String>,
    element: Option<Element>,
}

impl Merged<'_> {
    fn stored(&self, name: &str) -> Result<(Stored<'_>, Element), BoxError> {
        let stored = self.base.tensors.get(name).ok_or("the folder has no tensor of this name")?;
        let element = Element::of(stored.dtype).ok_or("it has no floats")?;
        Ok((stored, element))
    }
}

impl TensorReader for Merged<'_> {
    /// Sums are rounded once.
    fn element(&self, name: &str, _: &[usize]) -> Result<Element, BoxError> {
        let (_, own) = self.stored(name)?;
        Ok(self.element.filter(|_| self.layers.contains_key(name)).unwrap_or(own))
    }

    /// Whole rows.
    fn read_bytes(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError> {
        let (stored, own) = self.stored(name)?;
        let (rows, row) = (ranges[0].clone(), shape[1..].iter().product::<usize>() * own.size());
        let base = stored.read(rows.start * row..rows.end * row)?;
        let Some(layer) = self.layers.get(name) else { return Ok(base) };
        let tensor = |name: &str| -> Result<HostTensor, BoxError> {
            Ok(self.adapter.tensors.get(name).ok_or_else(|| format!("the adapter has no {name}"))?.clone())
        };
        let sum = self.adapter.plan.merge(layer, rows, own.decode(&base), tensor)?;
        let mut bytes = Vec::new();
        self.element(name, shape)?.encode_finite(&sum, &mut bytes)?;
        Ok(bytes)
    }
}
