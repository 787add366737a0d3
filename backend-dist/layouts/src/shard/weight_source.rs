//! Initial weights that are read: from a file, or from tensors in memory.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{HostFloats, HostTensor};

/// Whatever kept a source from reading.
type ReadError = Box<dyn std::error::Error + Send + Sync>;

/// The source of initial weights that are not random.
pub trait WeightSource: Send + Sync {
    /// The values of the box `ranges` (one range per dimension) of the global tensor `name`, row-major. An empty box
    /// has no values but its tensor must exist.
    ///
    /// # Errors
    /// If the tensor does not exist, has another shape than `shape`, or cannot be read.
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, ReadError>;

    /// The same in the type in which the values are stored: what a model is built from.
    fn read_stored(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<HostFloats, ReadError> {
        Ok(self.read(name, shape, ranges)?.into())
    }
}

/// Global tensors in memory, by name.
impl WeightSource for BTreeMap<String, HostTensor> {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, ReadError> {
        let tensor = self.get(name).ok_or("there is no tensor of this name")?;
        if tensor.shape != shape {
            return Err(format!("its shape is {:?}, the model needs {shape:?}", tensor.shape).into());
        }
        Ok(tensor.read_box(ranges))
    }
}
