//! All parameters of a rank, and global tensors from local values.

use std::collections::{BTreeMap, HashMap};

use layouts::shard::assemble;
use ops::fp8::Fp8Layers;

use super::{HostTensor, ParamSpec, RegistryError, Section};

/// The parameters of one rank, in the order in which the model created them; the same order on all ranks of a stage.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    specs: Vec<ParamSpec>,
    by_id: HashMap<u64, usize>,
    fp8: Fp8Layers,
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
        assemble(slices)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GroupPosition, stable_hash};
    use super::*;

    #[test]
    fn names_are_unique() {
        let spec = || ParamSpec::new(vec![Section::replicated("w", &[3], GroupPosition { rank: 0, size: 1 })], false);
        let mut registry = Registry::default();
        registry.register(spec()).unwrap();
        assert_eq!(registry.register(spec()), Err(RegistryError::Duplicate { name: "w".into() }));
        assert_eq!(registry.get(stable_hash("w")), Some(&spec()));
        assert_eq!(registry.len(), 1);
    }
}
