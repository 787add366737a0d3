//! Where the boxes of weights are in the buffers of ranks.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::dcp::DcpTensor;
use crate::hf::torch_dist::expert;

/// Elements to a multiple of which a parameter's start is rounded up.
const ALIGNMENT: usize = 64;

/// The buffers of a rank, one for each of its interleaved stages, and their buckets in order.
pub(super) type Buffers<'a> = Vec<Vec<&'a DcpTensor>>;

/// How ranks share parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ranks {
    /// Pipeline stages. The ranks of one are after each other.
    pub stages: usize,
    /// Expert-parallel ranks of a stage. Those of the same experts are after each other.
    pub experts: usize,
    /// Layers of the whole model.
    pub layers: usize,
}

/// A box of a tensor, and the array in which it begins at an element.
type Placed<'a> = (Vec<Range<usize>>, &'a DcpTensor, usize);

/// Each tensor of a state in the buffers; `None` if their sizes are not those of the parameters of such ranks. `names` are
/// those of the weights in the order of a buffer.
pub(super) fn place(
    weights: &BTreeMap<String, DcpTensor>,
    names: &[&str],
    buffers: &[Buffers],
    of: Ranks,
) -> Option<BTreeMap<String, DcpTensor>> {
    let (first, in_stage) = (buffers.first()?, buffers.len() / of.stages);
    let (dtype, parts) = (first.first()?.first()?.dtype, of.stages * first.len());
    let experts = names.iter().filter_map(|name| expert(name)).map(|(expert, _)| expert + 1).max().unwrap_or(0);
    let divides = |all: usize, by: usize| by > 0 && all.is_multiple_of(by);
    if !(divides(buffers.len(), of.stages)
        && divides(of.layers, parts)
        && divides(in_stage, of.experts)
        && divides(experts, of.experts))
    {
        return None;
    }
    // Ranks that share each expert, and experts that each of them has.
    let (sharing, local) = (in_stage / of.experts, experts / of.experts);
    let part = |name: &str| match layer(name) {
        Some(layer) => layer / (of.layers / parts),
        None if name.starts_with("embedding.") => 0,
        None => parts - 1,
    };
    let mut boxes = BTreeMap::<&str, Vec<Placed>>::new();
    for (index, of_rank) in buffers.iter().enumerate() {
        let (stage, rank) = (index / in_stage, index % in_stage);
        for (chunk, buckets) in of_rank.iter().enumerate() {
            let mut rest = buckets.iter();
            let (mut bucket, mut end) = (*rest.next()?, 0);
            for name in names.iter().filter(|name| part(name) == chunk * of.stages + stage) {
                let (rank, ranks) = match expert(name) {
                    Some((expert, _)) if expert / local != rank / sharing => continue,
                    Some(_) => (rank % sharing, sharing),
                    None => (rank, in_stage),
                };
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
    }
    let tensor = |(name, boxes): (&str, Vec<_>)| {
        (name.to_string(), DcpTensor::in_arrays(dtype, weights[name].shape.clone(), boxes))
    };
    Some(boxes.into_iter().map(tensor).collect())
}

/// The layer of a weight.
pub(super) fn layer(name: &str) -> Option<usize> {
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

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;
    use crate::dcp::Chunk;
    use crate::hf::dp_reshardable::order::{Order, ordered};
    use crate::hf::torch_dist::EMBEDDING;

    fn tensor(shape: &[usize], boxes: &[Vec<Range<usize>>]) -> DcpTensor {
        let whole = [shape.iter().map(|size| 0..*size).collect()];
        let boxes = if boxes.is_empty() { &whole } else { boxes };
        let chunk = |ranges: &Vec<Range<usize>>| Chunk { ranges: ranges.clone(), file: 0, start: 0 };
        DcpTensor { dtype: Dtype::F32, shape: shape.to_vec(), chunks: boxes.iter().map(chunk).collect() }
    }

    /// Embedding and last norm, and in these layers a norm and a projection of two tensor-parallel ranks.
    fn weights(layers: &[usize]) -> BTreeMap<String, DcpTensor> {
        let mut all = vec![
            (EMBEDDING.to_string(), tensor(&[8, 10], &[vec![0..4, 0..10], vec![4..8, 0..10]])),
            ("decoder.final_layernorm.weight".into(), tensor(&[10], &[])),
        ];
        for layer in layers {
            let name = |rest: &str| format!("decoder.layers.{layer}.{rest}.weight");
            all.push((name("input_layernorm"), tensor(&[10], &[])));
            all.push((name("self_attention.linear_proj"), tensor(&[6, 4], &[vec![0..6, 0..2], vec![0..6, 2..4]])));
        }
        all.into_iter().collect()
    }

    /// What is found in buffers of buckets of these sizes.
    fn placed(
        weights: &BTreeMap<String, DcpTensor>,
        buffers: &[&[&[usize]]],
        [stages, experts]: [usize; 2],
    ) -> Option<BTreeMap<String, DcpTensor>> {
        let layers = weights.keys().filter_map(|name| layer(name)).max().unwrap() + 1;
        let names = ordered(weights.keys().map(String::as_str), Order { engine: false, grouped: false }).unwrap();
        let buffer = |sizes: &&[usize]| sizes.iter().map(|size| tensor(&[*size], &[])).collect::<Vec<_>>();
        let stored: Vec<Vec<Vec<DcpTensor>>> =
            buffers.iter().map(|of_rank| of_rank.iter().map(buffer).collect()).collect();
        let mut buffers = Vec::<Buffers>::new();
        for of_rank in &stored {
            buffers.push(of_rank.iter().map(|buckets| buckets.iter().collect()).collect());
        }
        place(weights, &names, &buffers, Ranks { stages, experts, layers })
    }

    #[test]
    fn buckets_of_other_sizes_are_refused() {
        let weights = weights(&[0, 2, 10]);
        // 10 elements at 0, then 12 and 10 of three layers, each at a multiple of 64, then 40.
        let whole = 7 * 64 + 40;
        let fits = |sizes: &[usize]| placed(&weights, &[&[sizes] as &[&[usize]]; 2], [1, 1]).is_some();
        assert!(fits(&[whole]));
        // The second bucket begins with layer 2's projection.
        assert!(fits(&[2 * 64 + 10, 4 * 64 + 40]));
        for wrong in [&[whole - 1][..], &[whole + 64], &[2 * 64 + 11, 4 * 64 + 40], &[whole, 64], &[]] {
            assert!(!fits(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn stages_have_as_many_layers_and_the_ends_of_the_model() {
        let weights = weights(&[0, 1]);
        // Layer 0's projection and norm with the embedding, then the last norm with layer 1's.
        let [first, second] = [2 * 64 + 40, 2 * 64 + 10];
        let ranks: [&[&[usize]]; 4] = [&[&[first]], &[&[first]], &[&[second]], &[&[second]]];
        let found = placed(&weights, &ranks, [2, 1]).unwrap();
        assert_eq!((found.len(), found[EMBEDDING].chunks.len()), (weights.len(), 2));
        for stages in [1, 3, 4] {
            assert!(placed(&weights, &ranks, [stages, 1]).is_none(), "{stages}");
        }
    }

    /// Layers 0 and 2 are the first rank's of each tensor-parallel pair, 1 and 3 those of the second stage.
    #[test]
    fn interleaved_stages_have_a_buffer_each() {
        let weights = weights(&[0, 1, 2, 3]);
        let [first, middle, last] = [2 * 64 + 40, 64 + 10, 2 * 64 + 10];
        let [one, two]: [&[&[usize]]; 2] = [&[&[first], &[middle]], &[&[middle], &[last]]];
        let found = placed(&weights, &[one, one, two, two], [2, 1]).unwrap();
        assert_eq!(found.len(), weights.len());
    }

    /// Each of two ranks has two of four experts.
    #[test]
    fn expert_parallel_ranks_have_neighbouring_experts() {
        let name = |expert: usize| format!("decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight");
        let weights: BTreeMap<_, _> = (0..4).map(|expert| (name(expert), tensor(&[8, 8], &[]))).collect();
        let ranks: [&[&[usize]]; 2] = [&[&[128]]; 2];
        let found = placed(&weights, &ranks, [1, 2]).unwrap();
        // From the last to the first.
        assert_eq!([0, 1, 2, 3].map(|expert| found[&name(expert)].chunks[0].start), [256, 0, 256, 0]);
        assert!(placed(&weights, &ranks, [1, 1]).is_none() && placed(&weights, &ranks, [2, 1]).is_none());
    }
}
