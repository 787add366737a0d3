//! Tensors that a plain Burn module computes from, by Hugging Face's names.

use std::collections::BTreeMap;
use std::ops::Range;

use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};

use super::input_error::InputError;

/// Label that does not count, as in PyTorch.
pub const IGNORED: i64 = -100;

/// A tensor on the host.
#[derive(Clone, Debug, PartialEq)]
pub enum HostInput {
    /// Of whole numbers.
    Ints {
        /// Sizes.
        shape: Vec<usize>,
        /// Row-major.
        data: Vec<i64>,
    },
    /// Of floats.
    Floats(HostTensor),
}

impl HostInput {
    fn shape(&self) -> &[usize] {
        match self {
            Self::Ints { shape, .. } => shape,
            Self::Floats(tensor) => &tensor.shape,
        }
    }
}

/// Tensors by name, and the device and type in which a module computes.
#[derive(Clone, Debug)]
pub struct ModuleInputs {
    /// By Hugging Face's names.
    pub tensors: BTreeMap<String, HostInput>,
    /// Where the module is.
    pub device: Device,
    /// Type of the module's parameters.
    pub dtype: FloatDType,
}

impl ModuleInputs {
    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Refuses a tensor of another name: it would change nothing.
    ///
    /// # Errors
    /// Names it and those that are legal.
    pub fn expect_only(&self, legal: &[&str]) -> Result<(), InputError> {
        match self.tensors.keys().find(|name| !legal.contains(&name.as_str())) {
            Some(name) => Err(InputError::Unknown { name: name.clone(), legal: legal.join(", ") }),
            None => Ok(()),
        }
    }

    fn get<const D: usize>(&self, name: &str) -> Result<(&HostInput, [usize; D]), InputError> {
        let present = || self.tensors.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let missing = || InputError::Missing { name: name.into(), present: present() };
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        let found = tensor.shape();
        let shape = <[usize; D]>::try_from(found).ok().filter(|shape| !shape.contains(&0));
        let legal =
            || InputError::Shape { name: name.into(), found: found.into(), legal: format!("{D} sizes above 0") };
        Ok((tensor, shape.ok_or_else(legal)?))
    }

    /// The shape of a tensor with `D` dimensions.
    ///
    /// # Errors
    /// If it is missing or has others.
    pub fn shape<const D: usize>(&self, name: &str) -> Result<[usize; D], InputError> {
        Ok(self.get(name)?.1)
    }

    /// Whole numbers below `limit`, from 0.
    ///
    /// # Errors
    /// Names the tensor, and the first number that is none of these and its place.
    pub fn ids<const D: usize>(&self, name: &str, limit: usize) -> Result<Tensor<D, Int>, InputError> {
        self.ints(name, 0..limit, None)
    }

    /// How often whole numbers have a value.
    ///
    /// # Errors
    /// If the tensor is missing or has others than two dimensions, or has floats.
    pub fn count(&self, name: &str, value: usize) -> Result<usize, InputError> {
        match self.get::<2>(name)?.0 {
            HostInput::Ints { data, .. } => Ok(data.iter().filter(|found| **found == value as i64).count()),
            HostInput::Floats(_) => {
                Err(InputError::Kind { name: name.into(), found: "floats", legal: "whole numbers (I64, I32)" })
            }
        }
    }

    /// [`ids`](Self::ids), or [`IGNORED`]; at least one counts.
    pub fn labels<const D: usize>(&self, name: &str, limit: usize) -> Result<Tensor<D, Int>, InputError> {
        self.ints(name, 0..limit, Some(IGNORED))
    }

    /// [`labels`](Self::labels) `[batch, sequence]` that are predicted from the tokens before them: at least one counts
    /// that is not the first of its sequence.
    pub fn next_labels(&self, name: &str, limit: usize) -> Result<Tensor<2, Int>, InputError> {
        let labels = self.labels(name, limit)?;
        let (tensor, [_, length]) = self.get::<2>(name)?;
        match tensor {
            HostInput::Ints { data, .. }
                if data.iter().enumerate().all(|(at, label)| at % length == 0 || *label == IGNORED) =>
            {
                Err(InputError::NothingToPredict { name: name.into(), but: " but the first of a sequence" })
            }
            _ => Ok(labels),
        }
    }

    /// Refuses `name` if it has another number than `legal`. It may be missing.
    pub fn expect_all<const D: usize>(&self, name: &str, legal: usize) -> Result<(), InputError> {
        if self.has(name) { self.ints::<D>(name, legal..legal + 1, None).map(drop) } else { Ok(()) }
    }

    fn ints<const D: usize>(
        &self,
        name: &str,
        range: Range<usize>,
        ignored: Option<i64>,
    ) -> Result<Tensor<D, Int>, InputError> {
        let (HostInput::Ints { data, .. }, shape) = self.get::<D>(name)? else {
            return Err(InputError::Kind { name: name.into(), found: "floats", legal: "whole numbers (I64, I32)" });
        };
        let inside = |value: &i64| usize::try_from(*value).is_ok_and(|value| range.contains(&value));
        if let Some(at) = data.iter().position(|value| !inside(value) && Some(*value) != ignored) {
            let last = range.end.saturating_sub(1);
            let legal = if range.start == last { format!("{last}") } else { format!("{} to {last}", range.start) };
            let legal = ignored.map_or(legal.clone(), |ignored| format!("{legal}, or {ignored}"));
            return Err(InputError::Value { name: name.into(), value: data[at], index: place(at, &shape), legal });
        }
        if ignored.is_some() && data.iter().all(|value| Some(*value) == ignored) {
            return Err(InputError::NothingToPredict { name: name.into(), but: "" });
        }
        Ok(Tensor::from_data(TensorData::new(data.clone(), shape), &self.device))
    }

    /// Floats, in the module's type.
    ///
    /// # Errors
    /// Names the tensor if it is missing or another one.
    pub fn floats<const D: usize>(&self, name: &str) -> Result<Tensor<D>, InputError> {
        let (HostInput::Floats(tensor), shape) = self.get::<D>(name)? else {
            return Err(InputError::Kind {
                name: name.into(),
                found: "whole numbers",
                legal: "floats (F64, F32, BF16, F16)",
            });
        };
        Ok(Tensor::from_data(TensorData::new(tensor.data.clone(), shape), (&self.device, self.dtype.into())))
    }

    /// Refuses a tensor of another shape than this.
    ///
    /// # Errors
    /// Names both.
    pub fn expect_shape(&self, name: &str, legal: &[usize]) -> Result<(), InputError> {
        match self.tensors.get(name).map(HostInput::shape) {
            Some(found) if found != legal => {
                Err(InputError::Shape { name: name.into(), found: found.into(), legal: format!("{legal:?}") })
            }
            _ => Ok(()),
        }
    }
}

/// The indices of a flat position.
fn place(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = shape.iter().rev().map(|size| (flat % size, flat /= size).0).collect();
    index.reverse();
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs() -> ModuleInputs {
        let ids = HostInput::Ints { shape: vec![2, 3], data: vec![0, 1, 2, 3, 4, 9] };
        let labels = HostInput::Ints { shape: vec![1, 2], data: vec![-100, -100] };
        let tensors = BTreeMap::from([("input_ids".to_string(), ids), ("labels".to_string(), labels)]);
        ModuleInputs { tensors, device: Device::flex(), dtype: FloatDType::F32 }
    }

    #[test]
    fn tensors_are_refused_by_name_and_place() {
        let inputs = inputs();
        assert_eq!(inputs.ids::<2>("input_ids", 10).unwrap().dims(), [2, 3]);
        for (error, text) in [
            (inputs.ids::<2>("input_ids", 9).unwrap_err(), "tensor `input_ids` has 9 at [1, 2]; legal: 0 to 8"),
            (
                inputs.ids::<3>("input_ids", 9).unwrap_err(),
                "tensor `input_ids` has shape [2, 3]; legal: 3 sizes above 0",
            ),
            (inputs.ids::<2>("pixels", 9).unwrap_err(), "tensor `pixels` is missing; there are: input_ids, labels"),
            (
                inputs.labels::<2>("labels", 9).unwrap_err(),
                "every label of `labels` is -100: there is nothing to predict",
            ),
            (
                inputs.expect_only(&["input_ids"]).unwrap_err(),
                "tensor `labels` is none that this model takes; legal: input_ids",
            ),
            (inputs.expect_all::<2>("input_ids", 0).unwrap_err(), "tensor `input_ids` has 1 at [0, 1]; legal: 0"),
            (inputs.expect_shape("labels", &[2, 3]).unwrap_err(), "tensor `labels` has shape [1, 2]; legal: [2, 3]"),
        ] {
            assert_eq!(error.to_string(), text);
        }
        let error = inputs.floats::<2>("input_ids").unwrap_err().to_string();
        assert!(error.contains("whole numbers; legal: floats"), "{error}");
    }
}
