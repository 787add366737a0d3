//! What the decorator needs of the backend below it.

use crate::collective_ops::CollectiveOps;
use burn::backend::Flex;
use burn_ir::BackendIr;

/// A backend that runs a rank's share of every operation.
pub(super) trait Inner: BackendIr + CollectiveOps {}

impl Inner for Flex {}

#[cfg(feature = "cuda")]
impl Inner for burn::backend::Cube {}
