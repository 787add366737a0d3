//! Stored values to the parameters of a module.

use std::collections::HashSet;

use burn::module::{ModuleMapper, Param};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use models::hf::{HfModule, ModuleNames};

use super::ModuleFolder;
use super::tensors::{At, transposed, turned};
use crate::element::Element;
use crate::hf::HfFolderError;

/// Gives every parameter its stored values.
pub(super) struct Fill<'a> {
    folder: &'a ModuleFolder,
    names: ModuleNames,
    older_names: fn(&str) -> Vec<String>,
    dtype: FloatDType,
    at: At,
    used: HashSet<String>,
    /// The first one.
    error: Option<HfFolderError>,
}

impl<'a> Fill<'a> {
    pub fn new<M: HfModule>(folder: &'a ModuleFolder, dtype: FloatDType) -> Self {
        let (names, older_names) = (M::NAMES, M::older_names);
        Self { folder, names, older_names, dtype, at: At::default(), used: HashSet::new(), error: None }
    }

    /// The names of the tensors that were read. The error says why one could not be.
    pub fn used(self) -> Result<HashSet<String>, HfFolderError> {
        self.error.map_or(Ok(self.used), Err)
    }

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
