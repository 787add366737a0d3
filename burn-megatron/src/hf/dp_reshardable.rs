//! States of Megatron-Core's distributed optimizer as it holds them (`dp_reshardable`, Megatron-LM's default): in the buffers
//! of each tensor-parallel rank, without names (`megatron/core/optimizer/distrib_optimizer.py`).
//!
//! A buffer has the rank's parameters from the last to the first, each at a multiple of 64 elements
//! (`megatron/core/distributed/param_and_grad_buffer.py`), in buckets that are tensors of the file. Which parameters there are,
//! and which boxes of them are a rank's, is taken from the weights. As the order is not in the file, the optimizer's own
//! weights must be those of the model wherever they are looked for.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use super::torch_dist::EMBEDDING;
use crate::dcp::{DcpFolder, DcpTensor};
use crate::element::Element;
use crate::positioned::Run;

/// Begins the names of all of them.
pub(super) const BUFFERS: &str = "optimizer.distributed.";
/// Elements to a multiple of which a parameter's start is rounded up.
const ALIGNMENT: usize = 64;
/// Elements at each end of a weight that are compared.
const COMPARED: usize = 1024;

/// The bucket of a name: its rank, then the buffer and the bucket in it, and what it has of the parameters.
pub(super) fn bucket(name: &str) -> Option<(usize, [usize; 2], &str)> {
    let (rank, rest) = name.strip_prefix(BUFFERS)?.strip_prefix("dp_group_idx_")?.split_once(".gbuf_idx_")?;
    let (buffer, rest) = rest.split_once(".dtype_")?;
    let (bucket, state) = rest.rsplit_once(".bucket_idx_")?.1.split_once('.')?;
    Some((rank.parse().ok()?, [buffer.parse().ok()?, bucket.parse().ok()?], state))
}

/// The tensors of a state, by the names of `weights`, if there are any; `folder` has the buckets of it and of the
/// optimizer's own weights. Fails if they are not those of such weights.
pub(super) fn states(
    folder: &DcpFolder,
    weights: &BTreeMap<String, DcpTensor>,
    state: &str,
) -> io::Result<Result<BTreeMap<String, DcpTensor>, String>> {
    let [masters, wanted] = ["param", state].map(|state| buckets(&folder.tensors, state));
    if wanted.is_empty() {
        return Ok(Ok(BTreeMap::new()));
    }
    for (engine, stages) in [false, true].into_iter().flat_map(|engine| (1..=masters.len()).map(move |pp| (engine, pp)))
    {
        let names = ordered(weights, engine);
        let placed = |of: &[Vec<&DcpTensor>]| names.as_ref().and_then(|names| place(weights, names, of, stages));
        let (Some(masters), Some(found)) = (placed(&masters), placed(&wanted)) else { continue };
        if weights_are(folder, weights, &masters)? {
            return Ok(Ok(found));
        }
    }
    Ok(Err(format!(
        "the buffers of {} ranks (dp_reshardable) are not those of these weights in tensor-parallel ranks and stages of as many \
         layers, without routed experts; load and save the checkpoint once with --dist-ckpt-optim-fully-reshardable",
        masters.len()
    )))
}

/// Per rank the buckets of a state, in order.
fn buckets<'a>(tensors: &'a BTreeMap<String, DcpTensor>, state: &str) -> Vec<Vec<&'a DcpTensor>> {
    let mut ranks = BTreeMap::<usize, BTreeMap<[usize; 2], &DcpTensor>>::new();
    for (name, tensor) in tensors {
        if let Some((rank, at, _)) = bucket(name).filter(|(.., of)| *of == state) {
            ranks.entry(rank).or_default().insert(at, tensor);
        }
    }
    ranks.into_values().map(|of_rank| of_rank.into_values().collect()).collect()
}

/// The names of weights from the last to the first parameter of Megatron-Core's model, with the layers of TransformerEngine,
/// whose linear layers have the norms before them, or its own; `None` if one has no known place.
fn ordered(weights: &BTreeMap<String, DcpTensor>, engine: bool) -> Option<Vec<&str>> {
    const OWN: &str = "\
        input_layernorm self_attention.linear_proj self_attention.linear_qkv self_attention.q_layernorm \
        self_attention.k_layernorm pre_mlp_layernorm mlp.linear_fc1 mlp.linear_fc2";
    let place = |name: &str| {
        let (module, kind) = name.rsplit_once('.')?;
        let kind = ["weight", "bias"].iter().position(|it| *it == kind)?;
        let (part, layer, module) = match module.strip_prefix("decoder.layers.").and_then(|rest| rest.split_once('.')) {
            Some((layer, module)) => {
                let own = OWN.split(' ').position(|it| it == module)?;
                // The norm goes behind the projection of the output.
                let at = if engine && own < 2 { 1 - own } else { own };
                (2, layer.parse::<usize>().ok()?, at)
            }
            None if name == EMBEDDING => (0, 0, 0),
            None => {
                let parts = ["", "embedding.position_embeddings", "", "decoder.final_layernorm", "output_layer"];
                (parts.iter().position(|it| *it == module)?, 0, 0)
            }
        };
        Some((part, layer, module, kind))
    };
    let placed = weights.keys().map(|name| Some((place(name)?, name.as_str())));
    let mut places = placed.collect::<Option<Vec<_>>>()?;
    places.sort_unstable_by(|a, b| b.cmp(a));
    Some(places.into_iter().map(|(_, name)| name).collect())
}

/// A box of a tensor, and the array in which it begins at an element.
type Placed<'a> = (Vec<Range<usize>>, &'a DcpTensor, usize);

/// Each tensor of a state in the buckets; `None` if their sizes are not those of the parameters of as many ranks in so many
/// pipeline stages, the tensor-parallel ranks of a stage after each other.
fn place(
    weights: &BTreeMap<String, DcpTensor>,
    names: &[&str],
    buckets: &[Vec<&DcpTensor>],
    stages: usize,
) -> Option<BTreeMap<String, DcpTensor>> {
    let (dtype, ranks) = (buckets.first()?.first()?.dtype, buckets.len() / stages);
    let layers = names.iter().filter_map(|name| layer(name)).max().map_or(0, |last| last + 1);
    if !(buckets.len().is_multiple_of(stages) && layers.is_multiple_of(stages)) {
        return None;
    }
    let stage = |name: &str| match layer(name) {
        Some(layer) => layer / (layers / stages),
        None if name.starts_with("embedding.") => 0,
        None => stages - 1,
    };
    let mut boxes = BTreeMap::<&str, Vec<Placed>>::new();
    for (index, of_rank) in buckets.iter().enumerate() {
        let (rank, mut rest) = (index % ranks, of_rank.iter());
        let (mut bucket, mut end) = (*rest.next()?, 0);
        for name in names.iter().filter(|name| stage(name) == index / ranks) {
            let (of_rank, is_replicated) = boxes_of(&weights[*name], rank, ranks)?;
            let elements: usize = of_rank.iter().map(|ranges| host::boxes::len(ranges)).sum();
            if end == *bucket.shape.first()? {
                (bucket, end) = (*rest.next()?, 0);
            }
            let mut at = end.next_multiple_of(ALIGNMENT);
            end = at + elements;
            if end > bucket.shape[0] || bucket.shape.len() != 1 || bucket.dtype != dtype {
                return None;
            }
            for ranges in of_rank.into_iter().filter(|_| rank == 0 || !is_replicated) {
                let elements = host::boxes::len(&ranges);
                boxes.entry(*name).or_default().push((ranges, bucket, at));
                at += elements;
            }
        }
        if end != bucket.shape[0] || rest.next().is_some() {
            return None;
        }
    }
    let tensor = |(name, boxes): (&str, Vec<_>)| {
        (name.to_string(), DcpTensor::in_arrays(dtype, weights[name].shape.clone(), boxes))
    };
    Some(boxes.into_iter().map(tensor).collect())
}

/// The layer of a weight.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("decoder.layers.")?.split_once('.')?.0.parse().ok()
}

/// The boxes of a weight that a tensor-parallel rank has, in the order of its own tensor, and whether all ranks have them. A
/// fused weight of two has a box of each.
fn boxes_of(weight: &DcpTensor, rank: usize, ranks: usize) -> Option<(Vec<Vec<Range<usize>>>, bool)> {
    let mut boxes: Vec<Vec<Range<usize>>> = weight.chunks.iter().map(|chunk| chunk.ranges.clone()).collect();
    boxes.sort_by_key(|ranges| ranges.iter().map(|range| range.start).collect::<Vec<_>>());
    match boxes.len() {
        1 => Some((boxes, true)),
        count if count % ranks == 0 => Some((boxes.into_iter().skip(rank).step_by(ranks).collect(), false)),
        _ => None,
    }
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
    use crate::dcp::Chunk;
    use safetensors::Dtype;

    #[test]
    fn names_of_buckets_are_taken_apart() {
        let name = "optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_12.exp_avg";
        assert_eq!(bucket(name), Some((3, [0, 12], "exp_avg")));
        assert_eq!(bucket("optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1"), None);
    }

    fn tensor(shape: &[usize], boxes: &[Vec<Range<usize>>]) -> DcpTensor {
        let whole = [shape.iter().map(|size| 0..*size).collect()];
        let boxes = if boxes.is_empty() { &whole } else { boxes };
        let chunk = |ranges: &Vec<Range<usize>>| Chunk { ranges: ranges.clone(), file: 0, start: 0 };
        DcpTensor { dtype: Dtype::F32, shape: shape.to_vec(), chunks: boxes.iter().map(chunk).collect() }
    }

    fn weights() -> BTreeMap<String, DcpTensor> {
        let mut all = vec![
            (EMBEDDING.to_string(), tensor(&[8, 10], &[vec![0..4, 0..10], vec![4..8, 0..10]])),
            ("decoder.final_layernorm.weight".into(), tensor(&[10], &[])),
        ];
        for layer in [0, 2, 10] {
            let name = |rest: &str| format!("decoder.layers.{layer}.{rest}.weight");
            all.push((name("input_layernorm"), tensor(&[10], &[])));
            all.push((name("self_attention.linear_proj"), tensor(&[6, 4], &[vec![0..6, 0..2], vec![0..6, 2..4]])));
        }
        all.into_iter().collect()
    }

    #[test]
    fn parameters_go_from_the_last_to_the_first() {
        let weights = weights();
        let order = |engine| {
            let names = ordered(&weights, engine).unwrap().into_iter();
            names.map(|name| name.replace("decoder.layers.", "").replace(".weight", "")).collect::<Vec<_>>()
        };
        let own = [
            "decoder.final_layernorm",
            "10.self_attention.linear_proj",
            "10.input_layernorm",
            "2.self_attention.linear_proj",
        ];
        assert_eq!(order(false)[..4], own);
        assert_eq!(order(true)[1..3], ["10.input_layernorm", "10.self_attention.linear_proj"]);
        assert_eq!(order(true)[7], "embedding.word_embeddings");
        let mut other = weights.clone();
        other.insert("decoder.layers.0.mlp.router.weight".into(), tensor(&[2], &[]));
        assert_eq!(ordered(&other, true), None);
    }

    #[test]
    fn buckets_of_other_sizes_are_refused() {
        let weights = weights();
        let names = ordered(&weights, false).unwrap();
        // 10 elements at 0, then 12 and 10 of three layers, each at a multiple of 64, then 40.
        let whole = 7 * 64 + 40;
        let placed = |sizes: &[usize]| {
            let buckets: Vec<DcpTensor> = sizes.iter().map(|size| tensor(&[*size], &[])).collect();
            place(&weights, &names, &vec![buckets.iter().collect(); 2], 1).is_some()
        };
        assert!(placed(&[whole]));
        // The second bucket begins with layer 2's projection.
        assert!(placed(&[2 * 64 + 10, 4 * 64 + 40]));
        for wrong in [&[whole - 1][..], &[whole + 64], &[2 * 64 + 11, 4 * 64 + 40], &[whole, 64], &[]] {
            assert!(!placed(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn stages_have_as_many_layers_and_the_ends_of_the_model() {
        let mut weights = weights();
        weights.retain(|name, _| layer(name) != Some(10));
        weights.retain(|name, _| layer(name) != Some(2));
        weights.insert("decoder.layers.1.input_layernorm.weight".into(), tensor(&[10], &[]));
        let names = ordered(&weights, false).unwrap();
        // Layer 0's projection and norm with the embedding, then the last norm with layer 1's.
        let sizes = [2 * 64 + 40, 2 * 64 + 40, 64 + 10, 64 + 10];
        let buckets: Vec<DcpTensor> = sizes.iter().map(|size| tensor(&[*size], &[])).collect();
        let of_ranks: Vec<Vec<&DcpTensor>> = buckets.iter().map(|bucket| vec![bucket]).collect();
        let placed = place(&weights, &names, &of_ranks, 2).unwrap();
        assert_eq!(placed.len(), weights.len());
        assert_eq!(placed[EMBEDDING].chunks.len(), 2);
        for stages in [1, 3, 4] {
            assert!(place(&weights, &names, &of_ranks, stages).is_none(), "{stages}");
        }
    }
}
