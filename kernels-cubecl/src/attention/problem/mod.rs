//! The sizes and options of a call, and whether there are kernels for them.
use super::error::AttentionError;
use super::masks::ScoreMasks;
use crate::hopper::mma::Half;
use crate::tiling::CUBE_QUERIES;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most batches, heads or packed sequences of a call: cubes in the second dimension of a grid.
const MAX_CUBES: usize = u16::MAX as usize;
/// Longest sequence, and largest position of the first query: blocks of 128 of them are cubes in the third dimension of
/// a grid.
pub(super) const MAX_POSITION: usize = u16::MAX as usize * CUBE_QUERIES;

/// The sizes of an attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences; 1 if they are packed.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Length of the query sequence; of all of them together if they are packed.
    pub queries: usize,
    /// Length of the key and value sequence; of all of them together if they are packed.
    pub keys: usize,
    /// Length of a query and key: 64, 96, 128, 192 or 256.
    pub head_dim: usize,
    /// Length of a value and of an output row: `head_dim`, or 128 when that is 192.
    pub value_dim: usize,
    /// A query sees no key after its own position. Query `i` is at key position `i + keys - queries`: the last query at
    /// the last key ([`CallOptions::first_query`] shifts them).
    pub causal: bool,
    /// A query at position `p` sees key `j` only if `|p - j| < window`.
    pub window: Option<usize>,
}

/// Sequences that lie one after the other in a batch of 1 and do not see each other. Positions count from the start of
/// each sequence.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// Start offset of each sequence's queries: `i32 [sequences + 1]` on the device, ascending, the first 0, the last
    /// [`AttentionShape::queries`].
    pub query_starts: &'a Handle,
    /// The same for keys. May be the same buffer.
    pub key_starts: &'a Handle,
    /// Sequences; empty ones are allowed.
    pub sequences: usize,
    /// Queries of the longest sequence, or more: the size of the grid. Queries past it get no result.
    pub longest_query: usize,
    /// Keys of the longest sequence, or more. The gradients of keys past it are not written.
    pub longest_key: usize,
}

/// Dropout of attention probabilities: the probability of query `i` of head `h` and key `j` of batch `b` is multiplied
/// by 0 or `1 / (1 - p)`. Which one is a function of `seed` and the element's position `[b, h, i, j]` in the whole
/// tensor `[batches, heads, queries, keys]`, of which this call computes a part: with `row = (b heads + h) queries + i`
/// and `key = splitmix64(seed ^ splitmix64(row))`, the element is dropped if `mix(mix(j 0x9e3779b9 + (key >> 32)) ^ key
/// as u32) < p 2³²` (`mix` as in [`crate::pointwise::dropout`]). Packed sequences count queries and keys from the start
/// of the packed tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability of being dropped.
    pub p: f32,
    /// Seed; another one for each layer, step and micro-batch.
    pub seed: u64,
    /// Position `[b, h, i, j]` of this call's first element in the whole tensor.
    pub first: [usize; 4],
    /// Heads of the whole tensor.
    pub heads: usize,
    /// Queries of the whole tensor.
    pub queries: usize,
}

impl Dropout {
    /// Elements whose hash is below this are dropped.
    pub(super) fn threshold(&self) -> u32 {
        (f64::from(self.p) * 4_294_967_296.0).min(f64::from(u32::MAX)) as u32
    }

    /// For a call that computes the whole tensor.
    pub fn whole(p: f32, seed: u64, shape: &AttentionShape) -> Self {
        Self { p, seed, first: [0; 4], heads: shape.heads, queries: shape.queries }
    }
}

/// The options of a call; the defaults suit most.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallOptions<'a> {
    /// Type of all tensors of the call.
    pub element: Half,
    /// Several sequences in one batch.
    pub packed: Option<Packed<'a>>,
    /// Dropout of attention probabilities.
    pub dropout: Option<Dropout>,
    /// Masks of single scores and weights, for head_dim 64 and 128.
    pub masks: ScoreMasks<'a>,
    /// The key position of query 0, if it is not `keys - queries`. For a step of a ring with a window: the first
    /// query's position in the whole sequence less that of the first key. May be negative. A query without a visible
    /// key gets an output of 0, a log-sum-exp of minus infinity and no gradients.
    pub first_query: Option<i64>,
    /// The backward pass gives the same bits every time. Costs a fifth of its speed at head_dim 64, a tenth at 128.
    pub deterministic: bool,
}

impl AttentionShape {
    /// `queries` rounded up to whole blocks: the row length of the statistics.
    pub fn padded_queries(&self) -> usize {
        self.queries.next_multiple_of(CUBE_QUERIES)
    }

    /// Numbers in a statistics buffer, fp32 `[batch, heads, padded_queries]`.
    pub fn statistics_len(&self) -> usize {
        self.batch * self.heads * self.padded_queries()
    }

    /// Shape of `q` and its gradient.
    pub fn query_shape(&self) -> [usize; 4] {
        [self.queries, self.batch, self.heads, self.head_dim]
    }

    /// Shape of `k` and its gradient.
    pub fn key_shape(&self) -> [usize; 4] {
        [self.keys, self.batch, self.kv_heads, self.head_dim]
    }

    /// Shape of `v` and its gradient.
    pub fn value_shape(&self) -> [usize; 4] {
        [self.keys, self.batch, self.kv_heads, self.value_dim]
    }

    /// Shape of the output and its gradient.
    pub fn out_shape(&self) -> [usize; 4] {
        [self.queries, self.batch, self.heads, self.value_dim]
    }

    /// Floating-point operations of the forward pass: two GEMMs over the scores that the mask leaves (half if causal),
    /// for a batch of whole sequences. By convention the backward pass counts 2.5 times as many, whatever it
    /// recomputes.
    pub fn forward_flops(&self) -> f64 {
        let (queries, keys) = (self.queries as f64, self.keys as f64);
        let causal = if self.causal { queries * (keys - queries / 2.0) } else { queries * keys };
        let pairs = match self.window {
            // The band is as wide as the window; its corner at the start is missing.
            Some(window) if window < self.keys => {
                let window = window as f64;
                let band = queries * window - window * window / 2.0 * f64::from(self.queries == self.keys);
                causal.min(if self.causal { band } else { 2.0 * band })
            }
            _ => causal,
        };
        2.0 * (self.batch * self.heads * (self.head_dim + self.value_dim)) as f64 * pairs
    }

    /// The largest distance between a query and a key that it sees without a window.
    pub(super) fn max_distance(&self, options: &CallOptions) -> i64 {
        let (queries, keys) = match options.packed {
            Some(packed) => (packed.longest_query as i64, packed.longest_key as i64),
            None => (self.queries as i64, self.keys as i64),
        };
        let first = options.first_query.unwrap_or(keys - queries);
        let (before, after) = match options.packed {
            Some(_) => (keys - 1, queries - 1),
            None => (first + queries - 1, keys - 1 - first),
        };
        if self.causal { before } else { before.max(after) }
    }

    /// Whether the device of `client` has kernels for this call.
    ///
    /// # Errors
    /// Why not. A caller then takes other kernels.
    pub fn check(&self, client: &Client, options: &CallOptions) -> Result<(), AttentionError> {
        if client.features().matmul.wgmma.is_empty() {
            return Err(AttentionError::Device);
        }
        self.check_sizes()?;
        self.check_options(options)
    }

    fn check_sizes(&self) -> Result<(), AttentionError> {
        let sizes = [
            ("batch", self.batch),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("queries", self.queries),
            ("keys", self.keys),
            ("window", self.window.unwrap_or(1)),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(AttentionError::Empty(name));
        }
        // Grid dimensions, and positions that fit into 32 bits.
        let most = [MAX_CUBES, MAX_CUBES, MAX_CUBES, MAX_POSITION, MAX_POSITION];
        if let Some(((name, size), most)) = sizes.into_iter().zip(most).find(|((_, size), most)| size > most) {
            return Err(AttentionError::TooLong { name, size, most });
        }
        let kernels = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];
        if !kernels.contains(&(self.head_dim, self.value_dim)) {
            return Err(AttentionError::HeadDim { head_dim: self.head_dim, value_dim: self.value_dim });
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(AttentionError::Heads { heads: self.heads, kv_heads: self.kv_heads });
        }
        Ok(())
    }

    fn check_options(&self, options: &CallOptions) -> Result<(), AttentionError> {
        if let Some(packed) = options.packed {
            if self.batch != 1 {
                return Err(AttentionError::PackedBatch { batch: self.batch });
            }
            if packed.sequences == 0 {
                return Err(AttentionError::Empty("sequences"));
            }
            if packed.sequences > MAX_CUBES {
                let (name, size, most) = ("sequences", packed.sequences, MAX_CUBES);
                return Err(AttentionError::TooLong { name, size, most });
            }
            let lengths = [("queries", packed.longest_query, self.queries), ("keys", packed.longest_key, self.keys)];
            for (name, longest, total) in lengths {
                if longest == 0 || longest > total {
                    return Err(AttentionError::PackedLength { name, longest, total });
                }
            }
            let expected = 4 * (packed.sequences as u64 + 1);
            for (name, starts) in [("query_starts", packed.query_starts), ("key_starts", packed.key_starts)] {
                let found = starts.size_in_used();
                if found < expected {
                    return Err(AttentionError::Buffer { name, found, expected });
                }
            }
            if let Some(first) = options.first_query {
                return Err(AttentionError::PackedFirstQuery(first));
            }
        }
        self.check_masks(options)?;
        if let Some(dropout) = options.dropout.filter(|dropout| !(0.0..1.0).contains(&dropout.p)) {
            return Err(AttentionError::Probability(dropout.p));
        }
        if let Some(first) = options.first_query.filter(|first| first.unsigned_abs() > MAX_POSITION as u64) {
            return Err(AttentionError::TooFar(first));
        }
        Ok(())
    }

    fn check_masks(&self, options: &CallOptions) -> Result<(), AttentionError> {
        let ScoreMasks { hidden, kept } = options.masks;
        let has_kernel = matches!((self.head_dim, self.value_dim), (64, 64) | (128, 128));
        if !options.masks.is_empty()
            && (!has_kernel || options.packed.is_some() || options.dropout.is_some() || options.deterministic)
        {
            return Err(AttentionError::Masks { head_dim: self.head_dim });
        }
        let expected = [self.batch, self.heads, self.queries, self.keys];
        match hidden.into_iter().chain(kept.map(|(kept, _)| kept)).find(|mask| !mask.fits(expected)) {
            Some(mask) => Err(AttentionError::MaskShape { found: mask.shape, expected }),
            None => Ok(()),
        }
    }

    pub(super) fn check_statistics(&self, name: &'static str, handle: &Handle) -> Result<(), AttentionError> {
        let (found, expected) = (handle.size_in_used(), 4 * self.statistics_len() as u64);
        if found < expected { Err(AttentionError::Buffer { name, found, expected }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
