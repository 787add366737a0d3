//! Why an attention call is refused.

/// Why a call was refused. Nothing has been launched then.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum AttentionError {
    /// The device has no warpgroup MMA or no tensor maps, or CubeCL was built without its LLVM compiler.
    #[error(
        "this device (or this build of CubeCL) has no warpgroup MMA on 16-bit numbers; these kernels need a Hopper GPU"
    )]
    Device,
    /// Head dimensions without a kernel.
    #[error(
        "head dimension {head_dim} with values of {value_dim}: the kernels exist for 64, 96, 128, 256, and 192 with 128"
    )]
    HeadDim { head_dim: usize, value_dim: usize },
    /// Query heads that do not divide among the key heads.
    #[error("{heads} query heads do not divide among {kv_heads} key heads: heads must be a multiple of kv_heads")]
    Heads { heads: usize, kv_heads: usize },
    /// A dimension of length zero.
    #[error("{0} is zero: it must be at least 1")]
    Empty(&'static str),
    /// A dimension longer than a grid of cubes.
    #[error("{name} is {size}, the kernels take at most {most}")]
    TooLong { name: &'static str, size: usize, most: usize },
    /// A first query too far from the first key.
    #[error("first_query is {0}: it must be between -8388480 and 8388480")]
    TooFar(i64),
    /// Packed sequences in more than one batch.
    #[error("packed sequences in a batch of {batch}: concatenate them in a batch of 1")]
    PackedBatch { batch: usize },
    /// A longest sequence that is empty, or longer than all sequences together.
    #[error(
        "the longest of the packed sequences has {longest} {name}: it must be between 1 and {total}, the number of all"
    )]
    PackedLength { name: &'static str, longest: usize, total: usize },
    /// Packed sequences together with `first_query`: each sequence has its own.
    #[error("first_query is {0}, but packed sequences have their own; leave it out")]
    PackedFirstQuery(i64),
    /// A dropout probability outside `[0, 1)`.
    #[error("the dropout probability is {0}; it must be in [0, 1)")]
    Probability(f32),
    /// Masks of single scores without a kernel.
    #[error(
        "masks of single scores with head dimension {head_dim}: the kernels exist for 64 and 128, without packed \
         sequences, other dropout and a fixed order of sums"
    )]
    Masks { head_dim: usize },
    /// A mask of other scores.
    #[error(
        "a mask has shape {found:?}: scores of {expected:?} [batch, heads, queries, keys] need that, or 1 in place \
             of one of the first three"
    )]
    MaskShape { found: [usize; 4], expected: [usize; 4] },
    /// A tensor of another shape than the call's sizes say.
    #[error("{name} has shape {found:?}: the sizes of the call need {expected:?} [seq, batch, heads, head_dim]")]
    Shape { name: &'static str, found: [usize; 4], expected: [usize; 4] },
    /// Strides that TMA does not support.
    #[error("{name} has strides {strides:?}: each must be a multiple of 8 elements (16 bytes)")]
    Strides { name: &'static str, strides: [usize; 3] },
    /// A buffer that is too small.
    #[error("the buffer of {name} has {found} bytes, {expected} are needed")]
    Buffer { name: &'static str, found: u64, expected: u64 },
}
