//! The trained weights on the host, whole.

use std::collections::BTreeMap;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use backend_dist::shard::HostTensor;
use models::CausalLm;

use crate::engine::RankEngine;
use crate::verify::{assemble, first_copies, parameters};

/// Every weight of the model under its global name, on rank 0; `None` on the others. All ranks call it together.
///
/// ```no_run
/// # use models::CausalLm;
/// # fn trained<M: CausalLm + 'static>(run: burn_megatron::prelude::Pretraining<M>) {
/// use burn_megatron::prelude::*;
///
/// let run = run.finish(|rank, engine| global_weights(rank, engine));
/// let (training, learner) = run.supervised();
/// training.launch(learner);
/// for (name, tensor) in run.finished().flatten().into_iter().flatten() {
///     println!("{name}: {:?}", tensor.shape);
/// }
/// # }
/// ```
///
/// # Errors
/// If the slices of the ranks do not make up whole tensors.
pub fn global_weights<M: CausalLm>(
    rank: &Rank,
    engine: &mut RankEngine<M>,
) -> Result<Option<BTreeMap<String, HostTensor>>, BoxError> {
    let own = parameters(engine);
    // The other data-parallel ranks hold the same slices. Without experts only one of them contributes.
    let group = match engine.has_experts() {
        true => rank.group(Axis::World),
        false if (rank.coords.dp, rank.coords.cp) == (0, 0) => rank.group(Axis::TpPp),
        false => return Ok(None),
    };
    let slices = group.all_gather_host(first_copies(&rank.mesh, rank.rank, own));
    match rank.rank {
        0 => Ok(Some(assemble(slices.iter().flatten())?)),
        _ => Ok(None),
    }
}
