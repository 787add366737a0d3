//! Global tensors from local values.

use std::collections::BTreeMap;

use thiserror::Error;

use super::{HostTensor, Section};

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
