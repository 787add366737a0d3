//! The trained weights on the host, whole.

use std::collections::BTreeMap;
use std::path::Path;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use backend_dist::shard::HostTensor;
use models::CausalLm;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

use crate::engine::RankEngine;
use crate::verify::{assemble, parameters};

/// Every weight of the model under its global name, on rank 0; `None` on the others. All ranks call it together.
///
/// # Errors
/// If the slices of the ranks do not make up whole tensors.
pub fn global_weights<M: CausalLm>(
    rank: &Rank,
    engine: &RankEngine<M>,
) -> Result<Option<BTreeMap<String, HostTensor>>, BoxError> {
    // The other replicas hold the same slices.
    if rank.coords.dp != 0 {
        return Ok(None);
    }
    let slices = rank.group(Axis::TpPp).all_gather_host(parameters(engine.model(), engine.registry()));
    match rank.rank {
        0 => Ok(Some(assemble(slices.iter().flatten())?)),
        _ => Ok(None),
    }
}

/// Writes weights in single precision to a `.safetensors` file.
///
/// # Errors
/// If the file cannot be written.
pub fn save_weights(weights: &BTreeMap<String, HostTensor>, path: &Path) -> Result<(), BoxError> {
    let bytes = |tensor: &HostTensor| tensor.data.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect();
    let data: Vec<(&String, &HostTensor, Vec<u8>)> =
        weights.iter().map(|(name, tensor)| (name, tensor, bytes(tensor))).collect();
    let views = data
        .iter()
        .map(|(name, tensor, bytes)| Ok((*name, TensorView::new(Dtype::F32, tensor.shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    serialize_to_file(views, None, path).map_err(|error| format!("{}: {error}", path.display()).into())
}
