//! Folders of plain Burn modules, written.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use backend_dist::launch::BoxError;
use backend_dist::shard::HostTensor;
use models::hf::HfModule;
use models::names::{Foreign, NameMap};
use serde_json::{Value, json};

use super::tensors::{Wanted, named_tensors};
use crate::element::Element;
use crate::hf::HfFolderError;
use crate::hf::outputs::{TensorReader, outputs};
use crate::hf::writer::{new_folder, pretty, refuse_full, write_safetensors, write_text};

/// How a plain Burn module is written as a Hugging Face folder.
#[derive(Clone, Copy, Debug)]
pub struct ModuleExport<'a> {
    /// The `config.json` that the model was read with: it is written again if the sizes are still the same.
    pub original: Option<&'a Value>,
    /// Type of the weights.
    pub element: Element,
    /// Most bytes of tensors in a file.
    pub shard_bytes: u64,
}

impl Default for ModuleExport<'_> {
    fn default() -> Self {
        Self { original: None, element: Element::F32, shard_bytes: 5_000_000_000 }
    }
}

impl ModuleExport<'_> {
    /// Writes `folder`, which must not exist or be empty. Gives the number of files of weights. Adapters are merged into them.
    ///
    /// # Errors
    /// If the disk says no.
    pub fn write<M: HfModule>(
        &self,
        folder: impl AsRef<Path>,
        module: &M,
        config: &M::Config,
    ) -> Result<usize, HfFolderError> {
        refuse_full(folder.as_ref())?;
        // What adapters add is a part of the weights.
        let source = Weights(named_tensors(&module.clone().materialize(), Wanted::Weights));
        let same = |original: &&Value| {
            let read = M::from_hf(original).map(|read| M::present(read, &|name| source.0.contains_key(name)));
            read.is_ok_and(|read| M::to_hf(&read) == M::to_hf(config))
        };
        let mut json = self.original.filter(same).cloned().unwrap_or_else(|| M::to_hf(config));
        let key = if json.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
        json[key] = json!(self.element.torch_name());

        let mut names = NameMap::default();
        for (name, tensor) in &source.0 {
            let (name, shape) = (name.clone(), tensor.shape.clone());
            names.add(name.clone(), Foreign { name, transposed: false, rows: None, stack: None, shape });
        }
        let outputs = outputs(names.iter(), Some(self.element), &source)?;
        new_folder(folder.as_ref(), |folder| {
            write_text(&folder.join("config.json"), &pretty(&json))?;
            write_safetensors(folder, self.shard_bytes, &outputs, &source)
        })
    }
}

/// Weights on the host, as the files have them.
struct Weights(BTreeMap<String, HostTensor>);

impl TensorReader for Weights {
    fn element(&self, _: &str, _: &[usize]) -> Result<Element, BoxError> {
        Ok(Element::F64)
    }

    /// Whole rows.
    fn read_bytes(&self, name: &str, _: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError> {
        let tensor = self.0.get(name).ok_or("the module has no tensor of this name")?;
        let row = tensor.shape[1..].iter().product::<usize>();
        let mut bytes = Vec::new();
        Element::F64.encode(&tensor.data[ranges[0].start * row..ranges[0].end * row], &mut bytes);
        Ok(bytes)
    }
}
