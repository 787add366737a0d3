//! What the decorator needs of the backend below it.

use crate::collective_ops::CollectiveOps;
use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn_ir::{BackendIr, HandleKind};

/// A backend that runs a rank's share of every operation.
pub(super) trait Inner: BackendIr + CollectiveOps {
    /// The tensor in memory of its own: a slice may be a view that keeps all of what it is a slice of.
    fn owned(x: HandleKind<Self>) -> HandleKind<Self> {
        x
    }
}

impl Inner for Flex {
    fn owned(x: HandleKind<Self>) -> HandleKind<Self> {
        let owned = |x: FlexTensor| FlexTensor::from_data(x.into_data());
        match x {
            HandleKind::Float(x) => HandleKind::Float(owned(x)),
            HandleKind::Int(x) => HandleKind::Int(owned(x)),
            HandleKind::Bool(x) => HandleKind::Bool(owned(x)),
            quantized @ HandleKind::Quantized(_) => quantized,
        }
    }
}

#[cfg(feature = "cuda")]
impl Inner for burn::backend::Cube {}
