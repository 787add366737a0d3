//! The weight of a linear layer: a parameter, or frozen in few bits.

use backend_dist::ops::blockwise::QuantizedWeight;
use backend_dist::ops::moe::GroupWeights;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

/// `[out, in]` of a rank.
#[derive(Module, Debug)]
pub(crate) struct LinearWeight {
    param: Option<Param<Tensor<2>>>,
    #[module(skip)]
    stored: Option<QuantizedWeight>,
}

impl From<Param<Tensor<2>>> for LinearWeight {
    fn from(param: Param<Tensor<2>>) -> Self {
        Self { param: Some(param), stored: None }
    }
}

impl From<QuantizedWeight> for LinearWeight {
    fn from(stored: QuantizedWeight) -> Self {
        Self { param: None, stored: Some(stored) }
    }
}

impl LinearWeight {
    /// For a GEMM, on a device with autodiff if `tracked`; what is in few bits is computed by every call.
    pub fn value(&self, tracked: bool) -> Tensor<2> {
        match &self.param {
            Some(param) => param.val(),
            None if tracked => Tensor::from_inner(self.plain()),
            None => self.plain(),
        }
    }

    /// What a GEMM reads from memory.
    pub fn in_memory(&self) -> Option<Tensor<2>> {
        self.param.as_ref().map(Param::val)
    }

    /// Without autodiff.
    pub fn plain(&self) -> Tensor<2> {
        match (&self.param, &self.stored) {
            (Some(param), _) => param.val().inner(),
            (None, Some(stored)) => stored.value(),
            (None, None) => unreachable!("a weight is a parameter or stored in few bits"),
        }
    }

    /// Of groups, for a grouped GEMM.
    pub fn of_groups(&self, tracked: bool) -> GroupWeights {
        GroupWeights { value: self.value(tracked), stored: self.stored() }
    }

    /// `[out, in]`.
    pub fn dims(&self) -> [usize; 2] {
        match (&self.param, &self.stored) {
            (Some(param), _) => param.dims(),
            (None, Some(stored)) => stored.dims(),
            (None, None) => unreachable!("a weight is a parameter or stored in few bits"),
        }
    }

    /// What is in few bits.
    pub fn stored(&self) -> Option<QuantizedWeight> {
        self.stored.clone()
    }
}
