//! FLOPs and bytes of operations, recorded for profiles; nothing unless a profile is being recorded.

use burn_cubecl::tensor::CubeTensor;

use crate::context::plan::ScoreBlock;
use crate::options::{AttentionOptions, PackedHeads};
use gpu::profile::{Operation, Precision, operation};

type Noted = Option<gpu::profile::Open>;

/// Bytes of all elements.
pub fn size(x: &CubeTensor) -> usize {
    x.meta.shape().num_elements() * x.dtype.size()
}

/// An operation that reads and writes `bytes(elements' bytes of x)`.
pub fn memory(name: &'static str, x: &CubeTensor, bytes: impl FnOnce(usize) -> usize) -> Noted {
    operation(x, || Operation::memory(name, bytes(size(x))))
}

/// Matrix rows of `hidden` elements for ids: `bytes` for each element.
pub fn rows(name: &'static str, x: &CubeTensor, ids: &CubeTensor, bytes: usize) -> Noted {
    operation(x, || {
        let hidden = x.meta.shape().last().copied().unwrap_or(1);
        Operation::memory(name, ids.meta.shape().num_elements() * hidden * bytes)
    })
}

/// Attention of queries `q [s, b, h, d]` over `keys` keys: two GEMMs forward, five backward, without counting
/// recomputation (Dao, FlashAttention-2, 4.1). Masked keys are not counted.
pub fn attention(q: &CubeTensor, keys: usize, options: &AttentionOptions, backward: bool) -> Noted {
    let shape = q.meta.shape();
    noted(q, [shape[0], keys], shape[1] * shape[2], shape[3], options, backward)
}

/// The same on `qkv [s, b, heads, d]`.
pub fn packed_attention(qkv: &CubeTensor, heads: PackedHeads, options: &AttentionOptions, backward: bool) -> Noted {
    let shape = qkv.meta.shape();
    noted(qkv, [shape[0], shape[0]], shape[1] * heads.heads, shape[3], options, backward)
}

/// Attention of a block of scores.
pub fn score_block(q: &CubeTensor, block: &ScoreBlock, options: &AttentionOptions, backward: bool) -> Noted {
    let shape = q.meta.shape();
    let (samples, rows) = (block.samples.len(), block.queries.len());
    pairs(q, rows, samples * shape[2], shape[3], backward, || {
        let visible = |block: ScoreBlock| -> usize {
            let options = block.options(*options);
            let keys = |i| options.visible(block.first_query + i, block.keys.len());
            (0..block.queries.len() as i64).map(keys).map(|(low, high)| high - low).sum()
        };
        block.by_document().into_iter().map(visible).sum()
    })
}

fn noted(
    near: &CubeTensor,
    [queries, keys]: [usize; 2],
    heads: usize,
    head_dim: usize,
    options: &AttentionOptions,
    backward: bool,
) -> Noted {
    pairs(near, queries, heads, head_dim, backward, || {
        (0..queries as i64).map(|i| options.visible(i, keys)).map(|(low, high)| high - low).sum()
    })
}

/// `visible` is the number of pairs of queries and keys of a head that are not masked.
fn pairs(
    near: &CubeTensor,
    queries: usize,
    heads: usize,
    head_dim: usize,
    backward: bool,
    visible: impl FnOnce() -> usize,
) -> Noted {
    let (name, gemms, tensors) = if backward { ("attention gradient", 5, 8) } else { ("attention", 2, 4) };
    operation(near, || {
        let bytes = tensors * queries * heads * head_dim * near.dtype.size();
        let precision = if near.dtype.size() == 2 { Precision::Half } else { Precision::Single };
        Operation::attention(name, precision, [visible() * heads, head_dim, gemms], bytes)
    })
}
