//! ZeRO for any module and any of Burn's optimizers.
//!
//! Burn's optimizers keep the states of a parameter together, so whole parameters are assigned to ranks: [`Owners`] says which
//! rank steps which. Gradients are reduced to the owners ([`reduce_to_owners`]), the owners step, the new values go to
//! all ranks ([`share_parameters`]). With stage 3 the ranks keep only the values that they own ([`FullyShard`]).
//! [`records`] splits and joins optimizer states for checkpoints.
//!
//! [`FullyShard`]: backend_dist::fully_shard::FullyShard

pub(super) mod records;
mod reduce;
mod share;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::ParamId;

pub(super) use backend_dist::fully_shard::{Owners, Units, running_states};
pub(super) use reduce::{reduce_some_to_owners, reduce_to_owners};
pub(super) use share::{Replace, share_parameters, with_stepped};

/// How a rank steps a model of its own, apart from its learner's.
#[derive(Clone)]
pub(super) struct Zero {
    /// 0: every rank steps every parameter; 1: gradients are reduced once per step; 2: after every micro-step, and only the owner keeps them; 3: also the
    /// values are on their owner only.
    pub stage: u8,
    pub owners: Arc<Owners>,
    /// Bytes of the buckets in which gradients are reduced during the backward pass, if they are; stage 3 always reduces
    /// them then, one by one.
    pub overlap: Option<usize>,
    /// What stage 3 gathers together.
    pub units: Units,
    /// The running states of the module, which the ranks average.
    pub states: Arc<HashSet<ParamId>>,
}
