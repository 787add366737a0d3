//! The trained weights on the host, whole.

use std::collections::BTreeMap;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use backend_dist::shard::HostTensor;
use models::CausalLm;

use crate::engine::RankEngine;
use crate::verify::{assemble, parameters};

/// Every weight of the model under its global name, on rank 0; `None` on the others. All ranks call it together.
///
/// # Errors
/// If the slices of the ranks do not make up whole tensors.
pub fn global_weights<M: CausalLm>(
    rank: &Rank,
    engine: &mut RankEngine<M>,
) -> Result<Option<BTreeMap<String, HostTensor>>, BoxError> {
    let own = parameters(engine);
    // The other replicas hold the same slices.
    if (rank.coords.dp, rank.coords.cp) != (0, 0) {
        return Ok(None);
    }
    let slices = rank.group(Axis::TpPp).all_gather_host(own);
    match rank.rank {
        0 => Ok(Some(assemble(slices.iter().flatten())?)),
        _ => Ok(None),
    }
}
