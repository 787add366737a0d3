//! States of Megatron-Core's distributed optimizer as it holds them (`dp_reshardable`, Megatron-LM's default): in the buffers
//! of each tensor-parallel rank, without names (`megatron/core/optimizer/distrib_optimizer.py`). Experts on several
//! expert-parallel ranks have buffers of their own, those of a second optimizer.
//!
//! A buffer has the rank's parameters from the last to the first, each at a multiple of 64 elements
//! (`megatron/core/distributed/param_and_grad_buffer.py`), in buckets that are tensors of the file. Which parameters there are,
//! and which boxes of them are a rank's, is taken from the weights. As the order is not in the file, the optimizer's own
//! weights must be those of the model wherever they are looked for.

mod order;
mod place;

use std::collections::BTreeMap;
use std::io;

use self::order::{Order, ordered};
use self::place::{Buffers, Ranks, layer, place};
use super::torch_dist::{EXPERT_BIAS, is_of_expert};
use crate::dcp::{DcpFolder, DcpTensor};
use crate::element::Element;
use crate::positioned::Run;

/// Begins the names of all of them, but for what says which optimizer it is where there are two.
pub(super) const BUFFERS: &str = "optimizer.distributed.";
/// Elements at each end of a weight that are compared.
const COMPARED: usize = 1024;

/// The optimizer that has something in buffers, and its name there: the first one is that of dense weights, or of all.
pub(super) fn of_optimizer(name: &str) -> Option<(usize, &str)> {
    let (optimizer, rest) = match name.strip_prefix("chained_") {
        Some(rest) => rest.split_once('.').and_then(|(optimizer, rest)| Some((optimizer.parse().ok()?, rest)))?,
        None => (0, name),
    };
    Some((optimizer, rest.strip_prefix(BUFFERS)?))
}

/// The bucket of a name: its optimizer and rank, then the buffer and the bucket in it, and what it has of the parameters.
pub(super) fn bucket(name: &str) -> Option<([usize; 2], [usize; 2], &str)> {
    let (optimizer, rest) = of_optimizer(name)?;
    let (rank, rest) = rest.strip_prefix("dp_group_idx_")?.split_once(".gbuf_idx_")?;
    let (buffer, rest) = rest.split_once(".dtype_")?;
    let (bucket, state) = rest.rsplit_once(".bucket_idx_")?.1.split_once('.')?;
    Some(([optimizer, rank.parse().ok()?], [buffer.parse().ok()?, bucket.parse().ok()?], state))
}

/// The tensors of a state, by the names of `weights`, if there are any; `folder` has the buckets of it and of the
/// optimizer's own weights. Fails if they are not those of such weights.
pub(super) fn states(
    folder: &DcpFolder,
    weights: &BTreeMap<String, DcpTensor>,
    state: &str,
) -> io::Result<Result<BTreeMap<String, DcpTensor>, String>> {
    let [masters, wanted] = ["param", state].map(|state| buffers(&folder.tensors, state));
    let layers = weights.keys().filter_map(|name| layer(name)).max().map_or(0, |last| last + 1);
    let mut all = BTreeMap::new();
    let optimizers = masters.len();
    for (optimizer, wanted) in &wanted {
        let is_its = |name: &str| wanted_by(*optimizer, optimizers, name);
        let own = weights.iter().filter(|(name, _)| is_its(name));
        let own: BTreeMap<_, _> = own.map(|(name, weight)| (name.clone(), weight.clone())).collect();
        let masters = masters.get(optimizer).map_or(&[][..], Vec::as_slice);
        match found(folder, &own, [masters, wanted], layers)? {
            Some(found) => all.extend(found),
            None => {
                let ranks = masters.len();
                let of = match (optimizers, optimizer) {
                    (..2, _) => "optimizer",
                    (_, 1) => "optimizer of the experts",
                    _ => "optimizer of dense weights",
                };
                return Ok(Err(format!(
                    "the {of}: the buffers of {ranks} ranks (dp_reshardable) are not those of these weights in any number of \
                     tensor-parallel and expert-parallel ranks and of stages, interleaved or not, of as many layers each and with \
                     one embedding; load and save the checkpoint once with --dist-ckpt-optim-fully-reshardable"
                )));
            }
        }
    }
    Ok(Ok(all))
}

/// Whether one of so many optimizers updates a tensor of the model. None updates the bias that balances experts.
fn wanted_by(optimizer: usize, optimizers: usize, name: &str) -> bool {
    !name.ends_with(EXPERT_BIAS) && (optimizers < 2 || (optimizer == 1) == is_of_expert(name))
}

/// The tensors of a state of an optimizer's `weights`, if there are ranks whose buffers have them.
fn found(
    folder: &DcpFolder,
    weights: &BTreeMap<String, DcpTensor>,
    [masters, wanted]: [&[Buffers]; 2],
    layers: usize,
) -> io::Result<Option<BTreeMap<String, DcpTensor>>> {
    let count = masters.len();
    for order in Order::ALL {
        let Some(names) = ordered(weights.keys().map(String::as_str), order) else { continue };
        let has_experts = names.iter().any(|name| is_of_expert(name));
        let of_stages =
            |stages| (1..=if has_experts { count / stages } else { 1 }).map(move |experts| (stages, experts));
        for (stages, experts) in (1..=count).flat_map(of_stages) {
            let placed = |of: &[Buffers]| place(weights, &names, of, Ranks { stages, experts, layers });
            let (Some(masters), Some(found)) = (placed(masters), placed(wanted)) else { continue };
            if weights_are(folder, weights, &masters)? {
                return Ok(Some(found));
            }
        }
    }
    Ok(None)
}

/// Of each optimizer and rank the buckets of a state, buffer by buffer.
fn buffers<'a>(tensors: &'a BTreeMap<String, DcpTensor>, state: &str) -> BTreeMap<usize, Vec<Buffers<'a>>> {
    let mut ranks = BTreeMap::<[usize; 2], BTreeMap<usize, BTreeMap<usize, &DcpTensor>>>::new();
    for (name, tensor) in tensors {
        if let Some((rank, [buffer, bucket], _)) = bucket(name).filter(|(.., of)| *of == state) {
            ranks.entry(rank).or_default().entry(buffer).or_default().insert(bucket, tensor);
        }
    }
    let mut optimizers = BTreeMap::<usize, Vec<Buffers>>::new();
    for ([optimizer, _], of_rank) in ranks {
        let buffers = of_rank.into_values().map(|buckets| buckets.into_values().collect()).collect();
        optimizers.entry(optimizer).or_default().push(buffers);
    }
    optimizers
}

/// Whether the first and the last elements of the optimizer's own weights are those of the model.
fn weights_are(
    folder: &DcpFolder,
    weights: &BTreeMap<String, DcpTensor>,
    masters: &BTreeMap<String, DcpTensor>,
) -> io::Result<bool> {
    for (name, weight) in weights {
        let [Some((own, master)), Some((element, weight))] =
            [masters.get(name), Some(weight)].map(|tensor| Some((Element::of(tensor?.dtype)?, tensor?)))
        else {
            return Ok(false);
        };
        let all = weight.shape.iter().product::<usize>();
        let count = all.min(COMPARED);
        for first in [0, all - count] {
            let read = |tensor: &DcpTensor, element: Element| {
                let mut bytes = vec![0; count * element.size()];
                let run = Run { from: first * element.size(), to: 0, bytes: bytes.len() };
                folder.read_runs(tensor, [run].into_iter(), &mut bytes).map(|()| bytes)
            };
            let (mut rounded, expected) = (Vec::new(), read(weight, element)?);
            element.encode(&own.decode(&read(master, own)?), &mut rounded);
            if rounded != expected {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_buckets_are_taken_apart() {
        let name = "optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_12.exp_avg";
        assert_eq!(bucket(name), Some(([0, 3], [0, 12], "exp_avg")));
        assert_eq!(bucket(&format!("chained_1.{name}")), Some(([1, 3], [0, 12], "exp_avg")));
        assert_eq!(bucket("optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1"), None);
    }

    #[test]
    fn the_second_optimizer_has_the_experts() {
        let names = ["decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight", "output_layer.weight"];
        assert_eq!(names.map(|name| wanted_by(0, 1, name)), [true; 2]);
        assert_eq!(names.map(|name| wanted_by(0, 2, name)), [false, true]);
        assert_eq!(names.map(|name| wanted_by(1, 2, name)), [true, false]);
        assert!(!wanted_by(0, 1, "decoder.layers.0.mlp.router.expert_bias"));
    }
}
