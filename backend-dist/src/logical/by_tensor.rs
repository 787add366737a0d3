//! What belongs to each tensor of one operation.

use burn_ir::TensorId;
use std::ops::Index;

/// A map from the tensors of an operation. They are few, so that looking through them is faster than a hash.
#[derive(Clone, Debug, PartialEq)]
pub struct ByTensor<T>(Vec<(TensorId, T)>);

impl<T> ByTensor<T> {
    /// What belongs to a tensor.
    pub fn get(&self, id: TensorId) -> Option<&T> {
        self.0.iter().find(|(other, _)| *other == id).map(|(_, value)| value)
    }

    /// Adds what belongs to a tensor, unless there is something already, which is returned.
    pub fn add(&mut self, id: TensorId, value: T) -> Option<&T> {
        match self.0.iter().position(|(other, _)| *other == id) {
            Some(at) => Some(&self.0[at].1),
            None => {
                self.0.push((id, value));
                None
            }
        }
    }

    /// What belongs to any of the tensors.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, value)| value)
    }

    /// All of them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (TensorId, &mut T)> {
        self.0.iter_mut().map(|(id, value)| (*id, value))
    }
}

impl<T> Default for ByTensor<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Index<TensorId> for ByTensor<T> {
    type Output = T;

    fn index(&self, id: TensorId) -> &T {
        self.get(id).unwrap_or_else(|| panic!("{id} is no tensor of the operation"))
    }
}

/// The first of each tensor.
impl<T> FromIterator<(TensorId, T)> for ByTensor<T> {
    fn from_iter<I: IntoIterator<Item = (TensorId, T)>>(all: I) -> Self {
        let mut map = Self::default();
        for (id, value) in all {
            map.add(id, value);
        }
        map
    }
}

impl<T> IntoIterator for ByTensor<T> {
    type Item = (TensorId, T);
    type IntoIter = std::vec::IntoIter<(TensorId, T)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
