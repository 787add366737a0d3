//! The range of keys that a query sees, and of queries that see a key.
use cubecl::prelude::*;

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Length of a query and key.
    pub head_dim: usize,
    /// Length of a value.
    pub value_dim: usize,
    /// A query sees no later key.
    pub causal: bool,
    /// A query sees only keys less than a window away.
    pub windowed: bool,
    /// Several sequences lie one after the other in a batch of 1.
    pub packed: bool,
    /// Dropout of probabilities.
    pub dropout: bool,
}

/// Scalar arguments of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    pub queries: u32,
    pub keys: u32,
    /// Query heads of a key head.
    pub group: u32,
    /// Query `i` sees key `j` only if `|i - j| < window`.
    pub window: u32,
    /// Packed sequences.
    pub sequences: u32,
    /// Position of the first query among the keys.
    pub first_query: i32,
    /// Row length of the statistics.
    pub statistics: u32,
}

/// Rows `first..end` of a tensor.
#[derive(CubeType, Clone, Copy)]
pub struct VisibleRange {
    pub first: u32,
    pub end: u32,
}

/// The sequence that row `row` of a packed tensor belongs to: the last that starts at or before it.
#[cube]
fn sequence_of(row: u32, starts: &[i32], sequences: u32) -> usize {
    let mut low = 0u32;
    let mut high = sequences;
    while high - low > 1 {
        let middle = (low + high) / 2;
        if starts[middle as usize] as u32 <= row {
            low = middle;
        } else {
            high = middle;
        }
    }
    low as usize
}

/// The keys that query `query` sees. The last query of a sequence is at the position of its last key.
#[cube]
pub fn visible_keys(
    query: u32,
    query_starts: &[i32],
    key_starts: &[i32],
    sizes: &Sizes,
    #[comptime] plan: Plan,
) -> VisibleRange {
    let mut from = 0i32;
    let mut length = sizes.keys as i32;
    let mut at = query as i32 + sizes.first_query;
    if comptime![plan.packed] {
        let sequence = sequence_of(query, query_starts, sizes.sequences);
        from = key_starts[sequence];
        length = key_starts[sequence + 1] - from;
        at = query as i32 + length - query_starts[sequence + 1];
    }
    let mut first = 0i32;
    let mut end = length;
    if comptime![plan.windowed] {
        let window = sizes.window as i32;
        first = clamp(at + 1 - window, 0, length);
        end = clamp(at + window, 0, length);
    }
    if comptime![plan.causal] {
        end = clamp(at + 1, 0, length);
    }
    VisibleRange { first: (from + first) as u32, end: (from + end) as u32 }
}

/// The queries that see key `key`.
#[cube]
pub fn visible_queries(
    key: u32,
    query_starts: &[i32],
    key_starts: &[i32],
    sizes: &Sizes,
    #[comptime] plan: Plan,
) -> VisibleRange {
    let mut from = 0i32;
    let mut length = sizes.queries as i32;
    // The query at the position of the key.
    let mut at = key as i32 - sizes.first_query;
    if comptime![plan.packed] {
        let sequence = sequence_of(key, key_starts, sizes.sequences);
        from = query_starts[sequence];
        length = query_starts[sequence + 1] - from;
        at = key as i32 + length - key_starts[sequence + 1];
    }
    let mut first = 0i32;
    let mut end = length;
    if comptime![plan.windowed] {
        let window = sizes.window as i32;
        first = clamp(at + 1 - window, 0, length);
        end = clamp(at + window, 0, length);
    }
    if comptime![plan.causal] {
        first = clamp(at, 0, length);
    }
    VisibleRange { first: (from + first) as u32, end: (from + end) as u32 }
}
