//! What is fixed when an attention kernel is compiled besides its tiles, and its arguments at run time.
use super::problem::{AttentionShape, CallOptions};
use crate::hopper::mma::{Half, PANEL};
use crate::tiling::AttentionMask;
use cubecl::prelude::*;

/// The attention that a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Length of a query and key.
    pub head_dim: usize,
    /// Length of a value.
    pub value_dim: usize,
    /// A query sees no key after its position.
    pub causal: bool,
    /// A query sees only keys less than a window away.
    pub window: bool,
    /// Sequences lie one after the other in a batch of 1.
    pub packed: bool,
    /// Dropout of probabilities.
    pub dropout: bool,
    /// Bits hide scores.
    pub hidden: bool,
    /// Bits keep probabilities.
    pub kept: bool,
    /// Type of the tensors.
    pub element: Half,
}

impl Variant {
    /// One batch of bf16 without window, dropout and bits.
    pub fn dense(head_dim: usize, value_dim: usize, causal: bool) -> Self {
        let element = Half::Bf16;
        let (window, packed, dropout, hidden, kept) = (false, false, false, false, false);
        Self { head_dim, value_dim, causal, window, packed, dropout, hidden, kept, element }
    }

    /// The variant of a call.
    pub fn of(shape: &AttentionShape, options: &CallOptions) -> Self {
        Self {
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            causal: shape.causal,
            window: shape.window.is_some_and(|window| (window as i64) <= shape.max_distance(options)),
            packed: options.packed.is_some(),
            dropout: options.dropout.is_some(),
            hidden: options.masks.hidden.is_some(),
            kept: options.masks.kept.is_some(),
            element: options.element,
        }
    }

    /// Elements of a row of a Q or K tile in shared memory: padded to whole panels.
    pub fn key_width(&self) -> usize {
        self.head_dim.next_multiple_of(PANEL)
    }

    /// Elements of a row of a V or O tile in shared memory: padded to whole panels.
    pub fn value_width(&self) -> usize {
        self.value_dim.next_multiple_of(PANEL)
    }
}

/// Scalar arguments of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    /// Queries, of all sequences together if they are packed.
    pub queries: u32,
    /// Keys, of all sequences together if they are packed.
    pub keys: u32,
    /// Key position of query 0; unused if packed.
    pub offset: i32,
    /// Reach of the window.
    pub window: i32,
    /// Row length of the statistics.
    pub stats_stride: u32,
    /// Numbers of one kind of statistics.
    pub stats_len: u32,
    /// Query heads that share a key head.
    pub group: u32,
    /// Elements whose dropout hash is below this are dropped.
    pub drop_threshold: u32,
    /// Factor of the elements that dropout keeps, `1 / (1 - p)`.
    pub keep_scale: f32,
    /// Index of key 0 in the whole tensor, for dropout.
    pub first_key: u32,
}

/// The sequence of a cube.
#[derive(CubeType)]
pub struct CubeSequence {
    /// Batch index.
    pub batch: i32,
    /// Its first row in Q.
    pub first_query: u32,
    /// Its first row in K and V.
    pub first_key: u32,
    /// Its lengths and mask.
    pub mask: AttentionMask,
}

/// The sequence of cube `(_, CUBE_POS_Y, _)`.
#[cube]
pub fn cube_sequence(
    query_starts: &[i32],
    key_starts: &[i32],
    sizes: &Sizes,
    #[comptime] packed: bool,
) -> CubeSequence {
    let mut batch = CUBE_POS_Y as i32;
    let mut first_query = 0u32;
    let mut first_key = 0u32;
    let mut queries = sizes.queries;
    let mut keys = sizes.keys;
    let mut offset = sizes.offset;
    if comptime![packed] {
        let at = CUBE_POS_Y as usize;
        batch = 0i32;
        first_query = bounded(query_starts[at], sizes.queries);
        first_key = bounded(key_starts[at], sizes.keys);
        queries = u32::max(bounded(query_starts[at + 1], sizes.queries), first_query) - first_query;
        keys = u32::max(bounded(key_starts[at + 1], sizes.keys), first_key) - first_key;
        offset = keys as i32 - queries as i32;
    }
    CubeSequence { batch, first_query, first_key, mask: AttentionMask { queries, keys, offset, window: sizes.window } }
}

/// A start offset that is not past the end of its tensor, whatever the buffer says.
#[cube]
pub fn bounded(start: i32, total: u32) -> u32 {
    u32::min(i32::max(start, 0) as u32, total)
}
