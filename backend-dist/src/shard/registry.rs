//! All parameters of a rank, and global tensors from local values.

use std::collections::{BTreeMap, HashMap};

use thiserror::Error;

use ops::fp8::Fp8Layers;

use super::{HostTensor, ParamSpec, Section};

/// The parameters of one rank, in the order in which the model created them; the same order on all ranks of a stage.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    specs: Vec<ParamSpec>,
    by_id: HashMap<u64, usize>,
    fp8: Fp8Layers,
}

/// Why parameters cannot be registered or put together.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum RegistryError {
    /// Two parameters begin with the same global tensor.
    #[error("parameter `{name}` is registered twice; a shared parameter is created once and cloned")]
    Duplicate { name: String },
    /// A slice of a global tensor is on none of the ranks that were given.
    #[error("global tensor `{name}`: {have} of {expected} elements are on the given ranks")]
    Incomplete { name: String, have: usize, expected: usize },
}

impl Registry {
    /// Adds a parameter.
    ///
    /// # Errors
    /// If its name is taken.
    pub fn register(&mut self, spec: ParamSpec) -> Result<(), RegistryError> {
        if self.by_id.contains_key(&spec.id) {
            return Err(RegistryError::Duplicate { name: spec.name().to_string() });
        }
        self.by_id.insert(spec.id, self.specs.len());
        self.specs.push(spec);
        Ok(())
    }

    /// With the layers that multiply in FP8.
    pub fn with_fp8(self, fp8: Fp8Layers) -> Self {
        Self { fp8, ..self }
    }

    /// The layers that multiply in FP8.
    pub fn fp8(&self) -> &Fp8Layers {
        &self.fp8
    }

    /// The parameter with this id.
    pub fn get(&self, id: u64) -> Option<&ParamSpec> {
        self.by_id.get(&id).map(|&index| &self.specs[index])
    }

    /// All parameters, in order of creation.
    pub fn iter(&self) -> impl Iterator<Item = &ParamSpec> {
        self.specs.iter()
    }

    /// All sections of all parameters, in order.
    pub fn sections(&self) -> impl Iterator<Item = &Section> {
        self.specs.iter().flat_map(|spec| &spec.sections)
    }

    /// Number of parameters (local arrays).
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Whether nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Puts global tensors together from the slices of all ranks; of several copies, copy 0 is taken.
    ///
    /// # Errors
    /// If a slice of a tensor is missing.
    ///
    /// # Panics
    /// If values do not have their section's shape.
    pub fn assemble<'a>(
        slices: impl IntoIterator<Item = (&'a Section, &'a [f64])>,
    ) -> Result<BTreeMap<String, HostTensor>, RegistryError> {
        let mut tensors: BTreeMap<String, (HostTensor, usize)> = BTreeMap::new();
        for (section, local) in slices.into_iter().filter(|(section, _)| section.is_owned()) {
            let (tensor, have) = tensors.entry(section.name.clone()).or_insert_with(|| {
                let shape = section.global_shape.clone();
                let data = vec![0.0; shape.iter().product()];
                (HostTensor { shape, data }, 0)
            });
            section.write_to(local, &mut tensor.data);
            *have += section.ranges().iter().map(ExactSizeIterator::len).product::<usize>();
        }
        let complete = |(name, (tensor, have)): (String, (HostTensor, usize))| match tensor.data.len() {
            expected if expected == have => Ok((name, tensor)),
            expected => Err(RegistryError::Incomplete { name, have, expected }),
        };
        tensors.into_iter().map(complete).collect()
    }
}
