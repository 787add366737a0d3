//! What is fixed when an attention kernel is compiled besides its tiles, and what it is told when it runs.
use super::problem::{AttentionShape, Extras};
use crate::hopper::mma::{Half, PANEL};
use crate::tiling::Sight;
use cubecl::prelude::*;

/// Which attention a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Length of a query and key.
    pub head_dim: usize,
    /// Length of a value.
    pub value_dim: usize,
    /// A query sees no key after its place.
    pub causal: bool,
    /// A query sees only keys near its place.
    pub window: bool,
    /// Sequences lie one after the other.
    pub packed: bool,
    /// Some probabilities are dropped.
    pub dropout: bool,
    /// Type of the tensors.
    pub element: Half,
}

impl Variant {
    /// One batch of bf16 without window and dropout.
    pub fn dense(head_dim: usize, value_dim: usize, causal: bool) -> Self {
        let element = Half::Bf16;
        Self { head_dim, value_dim, causal, window: false, packed: false, dropout: false, element }
    }

    /// What a call asks for.
    pub fn of(shape: &AttentionShape, extras: &Extras) -> Self {
        Self {
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            causal: shape.causal,
            window: shape.window.is_some_and(|window| (window as i64) <= shape.reach(extras)),
            packed: extras.packed.is_some(),
            dropout: extras.dropout.is_some(),
            element: extras.element,
        }
    }

    /// Elements that a row of a query or key tile takes in shared memory.
    pub fn key_width(&self) -> usize {
        self.head_dim.next_multiple_of(PANEL)
    }

    /// Elements that a row of a value or output tile takes in shared memory.
    pub fn value_width(&self) -> usize {
        self.value_dim.next_multiple_of(PANEL)
    }
}

/// The numbers of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    /// Queries, of all sequences together when they are packed.
    pub queries: u32,
    /// Keys, of all sequences together when they are packed.
    pub keys: u32,
    /// Key position of query 0; unused when packed.
    pub offset: i32,
    /// Reach of the window.
    pub window: i32,
    /// Row length of the statistics.
    pub stride: u32,
    /// Numbers in one kind of statistics.
    pub statistics: u32,
    /// Query heads that share a key head.
    pub group: u32,
    /// Draws below this are dropped.
    pub limit: u32,
    /// What dropout multiplies the others with.
    pub keep: f32,
    /// Number of key 0 for dropout.
    pub first_key: u32,
}

/// The sequence a cube works on.
#[derive(CubeType)]
pub struct Part {
    /// Index of the batch.
    pub batch: i32,
    /// Its first row in the queries.
    pub first_query: u32,
    /// Its first row in the keys.
    pub first_key: u32,
    /// How long it is and who sees whom.
    pub sight: Sight,
}

/// The sequence of cube `(_, CUBE_POS_Y, _)`.
#[cube]
pub fn part(query_starts: &[i32], key_starts: &[i32], sizes: &Sizes, #[comptime] packed: bool) -> Part {
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
    Part { batch, first_query, first_key, sight: Sight { queries, keys, offset, window: sizes.window } }
}

/// A start that is no further than the end of its tensor, whatever the buffer says.
#[cube]
pub fn bounded(start: i32, total: u32) -> u32 {
    u32::min(i32::max(start, 0) as u32, total)
}
