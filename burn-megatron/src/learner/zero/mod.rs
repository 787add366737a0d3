//! ZeRO 1 and 2 for any module and any of Burn's optimizers.
//!
//! Burn's optimizers keep the states of a parameter together, so whole parameters are assigned to ranks: [`Owners`] says which
//! rank steps which. Gradients are reduced to the owners ([`reduce_to_owners`]), the owners step, the new values go to
//! all ranks ([`share_parameters`]). [`records`] splits and joins optimizer states for checkpoints.

mod owners;
pub(super) mod records;
mod reduce;
mod share;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub(super) use owners::Owners;
pub(super) use reduce::reduce_to_owners;
pub(super) use share::share_parameters;

/// How a rank shards its optimizer.
#[derive(Clone)]
pub(super) struct Zero {
    /// 1: gradients are reduced once per step; 2: after every micro-step, and only the owner keeps them.
    pub stage: u8,
    pub owners: Arc<Owners>,
}
