//! Hugging Face folders of plain Burn modules, read and written.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use backend_dist::launch::BoxError;
use backend_dist::shard::HostTensor;
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, FloatDType, Gradients, Tensor, TensorData};
use models::hf::{ForeignParam, HfModule, ModuleNames, module_classes};
use models::names::{Foreign, NameMap};
use serde_json::{Value, json};

use super::error::HfFolderError;
use super::folder::read_config;
use super::outputs::{TensorReader, outputs};
use super::tensors::{INDEX, Stored, Tensors};
use super::writer::{in_new_folder, pretty, write_safetensors, write_text};
use crate::element::Element;

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
        Ok(Self { folder, original, tensors })
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

    /// The sizes of the model.
    ///
    /// # Errors
    /// Names the key of `config.json` that this model does not have.
    pub fn config<M: HfModule>(&self) -> Result<M::Config, HfFolderError> {
        let wrong = |source| HfFolderError::Config { folder: self.folder.clone(), source };
        let config = M::from_hf(&self.original).map_err(wrong)?;
        Ok(M::present(config, &|name| self.tensors.get(name).is_some()))
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
        let names = M::names();
        let (older_names, at) = (M::older_names, At::default());
        let mut fill = Fill { folder: self, names, older_names, dtype, at, used: HashSet::new(), error: None };
        let module = M::init(config, device).map(&mut fill);
        if let Some(error) = fill.error {
            return Err(error);
        }
        self.refuse_others(&names, &fill.used)?;
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

/// Where a walk through a module is.
#[derive(Default)]
struct At {
    /// Names of fields, and the types that have them.
    fields: Vec<(String, String)>,
}

impl At {
    fn enter(&mut self, name: &str, container: &str) {
        self.fields.push((name.into(), container.rsplit(':').next().unwrap_or(container).into()));
    }

    fn path(&self) -> String {
        self.fields.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".")
    }

    /// The place of the parameter.
    ///
    /// # Panics
    /// If the module's table of names lacks it, which its tests find.
    fn foreign(&self, names: &ModuleNames) -> ForeignParam {
        let (path, layer) = (self.path(), self.fields.last().map_or("", |(_, container)| container));
        names.foreign(&path, layer).unwrap_or_else(|| panic!("{path} has no name in Hugging Face's model"))
    }
}

/// Gives every parameter its stored values.
struct Fill<'a> {
    folder: &'a ModuleFolder,
    names: ModuleNames,
    older_names: fn(&str) -> Vec<String>,
    dtype: FloatDType,
    at: At,
    used: HashSet<String>,
    /// The first one.
    error: Option<HfFolderError>,
}

impl Fill<'_> {
    fn values<const D: usize>(&mut self, shape: [usize; D]) -> Result<TensorData, HfFolderError> {
        let foreign = self.at.foreign(&self.names);
        let (name, stored) = self.folder.find(&foreign, (self.older_names)(&foreign.name))?;
        let theirs = turned(&shape, foreign.transposed);
        if stored.shape != theirs {
            let what = format!("has shape {:?}, config.json needs {theirs:?}", stored.shape);
            return Err(HfFolderError::tensor(stored.path, &name, what));
        }
        let Some(element) = Element::of(stored.dtype) else {
            let what = format!("has elements of type {:?}, weights can be F64, F32, BF16 or F16", stored.dtype);
            return Err(HfFolderError::tensor(stored.path, &name, what));
        };
        let bytes = stored.read(0..theirs.iter().product::<usize>() * element.size());
        let values = element.decode(&bytes.map_err(HfFolderError::io("read", stored.path))?);
        self.used.insert(name);
        let values = if foreign.transposed { transposed(&values, shape[0]) } else { values };
        Ok(TensorData::new(values, shape))
    }
}

impl ModuleMapper for Fill<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.at.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.fields.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        match self.values(param.lazy_shape().dims::<D>()) {
            Ok(values) => {
                let (id, device) = (param.id, param.lazy_device());
                param.transform_for_load(Tensor::from_data(values, (&device, DType::from(self.dtype))), id)
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}

/// Which numbers of a parameter are wanted.
#[derive(Clone, Copy)]
pub(crate) enum Wanted<'a> {
    Weights,
    /// Zeros for a parameter that has none.
    Gradients(&'a Gradients),
}

/// Numbers of every parameter of `module` under Hugging Face's names, as it stores them.
pub(crate) fn named_tensors<M: HfModule>(module: &M, wanted: Wanted) -> BTreeMap<String, HostTensor> {
    let mut collect = Collect { names: M::names(), wanted, at: At::default(), found: BTreeMap::new() };
    module.visit(&mut collect);
    collect.found
}

struct Collect<'a> {
    names: ModuleNames,
    wanted: Wanted<'a>,
    at: At,
    found: BTreeMap<String, HostTensor>,
}

impl ModuleVisitor for Collect<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.at.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.fields.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let foreign = self.at.foreign(&self.names);
        let (tensor, shape) = (param.val(), param.lazy_shape().dims::<D>());
        let tensor = match self.wanted {
            Wanted::Weights => Some(tensor),
            Wanted::Gradients(gradients) => tensor.grad(gradients),
        };
        let zeros = || vec![0.0; shape.iter().product()];
        let data = tensor.map_or_else(zeros, |tensor| tensor.into_data().iter::<f64>().collect());
        let data = if foreign.transposed { transposed(&data, shape[1]) } else { data };
        self.found.insert(foreign.name, HostTensor { shape: turned(&shape, foreign.transposed), data });
    }
}

/// The shape, or that of the transposed matrix.
fn turned(shape: &[usize], transposed: bool) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if transposed {
        shape.reverse();
    }
    shape
}

/// A matrix transposed, which then has `rows` rows.
fn transposed(values: &[f64], rows: usize) -> Vec<f64> {
    let columns = values.len() / rows;
    (0..rows).flat_map(|row| (0..columns).map(move |column| values[column * rows + row])).collect()
}

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
    /// Writes `folder`, which must not exist or be empty. Gives the number of files of weights.
    ///
    /// # Errors
    /// If the disk says no.
    pub fn write<M: HfModule>(
        &self,
        folder: impl AsRef<Path>,
        module: &M,
        config: &M::Config,
    ) -> Result<usize, HfFolderError> {
        let same = |original: &&Value| M::from_hf(original).is_ok_and(|read| M::to_hf(&read) == M::to_hf(config));
        let mut json = self.original.filter(same).cloned().unwrap_or_else(|| M::to_hf(config));
        let key = if json.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
        json[key] = json!(self.element.torch_name());

        let source = Weights(named_tensors(module, Wanted::Weights));
        let mut names = NameMap::default();
        for (name, tensor) in &source.0 {
            let (name, shape) = (name.clone(), tensor.shape.clone());
            names.add(name.clone(), Foreign { name, transposed: false, rows: None, stack: None, shape });
        }
        let outputs = outputs(names.iter(), Some(self.element), &source)?;
        in_new_folder(folder.as_ref(), |folder| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_turned() {
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert_eq!((turned(&[2, 3], true), turned(&[2, 3], false)), (vec![3, 2], vec![2, 3]));
    }
}
