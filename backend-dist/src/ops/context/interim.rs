//! interim
use super::{ContextParallel, Documents, zigzag};
use crate::ops::conjugate::gather_from_sequence_parallel;
use crate::ops::{AttentionOptions, PackedHeads, attention_packed};
use burn::tensor::Tensor;

pub fn attention_in_context(
    qkv: Tensor<4>,
    heads: PackedHeads,
    options: AttentionOptions,
    context: Option<&ContextParallel>,
    documents: Option<&Documents>,
) -> Tensor<4> {
    let rows = qkv.dims()[0];
    let (whole, mine) = match context {
        None => (qkv, Vec::from([0..rows])),
        Some(context) => {
            let size = context.group.size();
            let all = gather_from_sequence_parallel(qkv, &context.group);
            let mut chunks: Vec<(usize, Tensor<4>)> = Vec::new();
            for rank in 0..size {
                for (i, place) in zigzag(rank, size, rows).into_iter().enumerate() {
                    chunks.push((place.start, all.clone().narrow(0, rank * rows + i * rows / 2, rows / 2)));
                }
            }
            chunks.sort_by_key(|(start, _)| *start);
            (Tensor::cat(chunks.into_iter().map(|(_, c)| c).collect(), 0), context.positions(rows).to_vec())
        }
    };
    let [seq, samples, _, _] = whole.dims();
    let out = match documents {
        None => attention_packed(whole, heads, options),
        Some(documents) => {
            let of = |sample: usize| {
                let starts = documents.starts(sample);
                let parts = (0..starts.len()).map(|i| {
                    let end = starts.get(i + 1).copied().unwrap_or(seq);
                    let part = whole.clone().narrow(1, sample, 1).narrow(0, starts[i], end - starts[i]);
                    attention_packed(part, heads, options)
                });
                Tensor::cat(parts.collect(), 0)
            };
            Tensor::cat((0..samples).map(of).collect(), 1)
        }
    };
    Tensor::cat(mine.into_iter().map(|p| out.clone().narrow(0, p.start, p.len())).collect(), 0)
}
