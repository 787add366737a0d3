//! Tensors of a safetensors file on the host.

use backend_dist::shard::HostTensor;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::refusal::{Access, advice};

/// A recorded run that cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum FileError {
    /// The file system refuses.
    #[error("cannot read {}: {source}{}", path.display(), advice(Access::Read, source))]
    Read { path: PathBuf, source: std::io::Error },
    /// Not the JSON that it should be.
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// Not a safetensors file.
    #[error("{}: {source}", path.display())]
    Safetensors { path: PathBuf, source: safetensors::SafeTensorError },
    /// A tensor has another element type.
    #[error("{}: tensor `{name}` has type {found:?}, expected {expected}", path.display())]
    Type { path: PathBuf, name: String, found: Dtype, expected: &'static str },
    /// A tensor is missing or has another shape.
    #[error("{}: tensor `{name}` should have shape {expected:?}, it {}", path.display(), shape_in_words(found))]
    Tensor { path: PathBuf, name: String, expected: Vec<usize>, found: Option<Vec<usize>> },
}

fn shape_in_words(found: &Option<Vec<usize>>) -> String {
    found.as_ref().map_or("is not in the file".into(), |shape| format!("has {shape:?}"))
}

/// All tensors of a file of `F32` and `F64` tensors, by name.
pub(super) fn floats(path: &Path) -> Result<BTreeMap<String, HostTensor>, FileError> {
    read(path, |name, dtype, bytes| match dtype {
        Dtype::F32 => Ok(bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()),
        Dtype::F64 => Ok(bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()),
        found => Err(FileError::Type { path: path.into(), name: name.into(), found, expected: "F32 or F64" }),
    })
    .map(|tensors| tensors.into_iter().map(|(name, (shape, data))| (name, HostTensor { shape, data })).collect())
}

/// All tensors of a file of `I64` tensors, by name: shape and values.
pub(super) fn integers(path: &Path) -> Result<Tensors<i64>, FileError> {
    read(path, |name, dtype, bytes| match dtype {
        Dtype::I64 => Ok(bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
        found => Err(FileError::Type { path: path.into(), name: name.into(), found, expected: "I64" }),
    })
}

type Tensors<T> = BTreeMap<String, (Vec<usize>, Vec<T>)>;

fn read<T>(
    path: &Path,
    decode: impl Fn(&str, Dtype, &[u8]) -> Result<Vec<T>, FileError>,
) -> Result<Tensors<T>, FileError> {
    let bytes = std::fs::read(path).map_err(|source| FileError::Read { path: path.into(), source })?;
    let file =
        SafeTensors::deserialize(&bytes).map_err(|source| FileError::Safetensors { path: path.into(), source })?;
    let decode = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
        Ok((name.to_string(), (view.shape().to_vec(), decode(name, view.dtype(), view.data())?)))
    };
    file.iter().map(decode).collect()
}
