//! The kv blocks that a block of queries sees, and the q blocks that see a block of keys: plain arithmetic, the same on
//! the host and in the kernels.
#[cfg(feature = "cuda")]
use cubecl::prelude::*;

/// Queries of a cube of the forward kernel and of the dQ kernel.
pub const CUBE_QUERIES: usize = 128;

/// Keys of a cube of the dK/dV kernel and of the fused kernel.
pub const CUBE_KEYS: usize = 128;

/// Lengths and mask of one sequence. Query `i` is at key position `p = i + offset`. If causal, it sees the keys up to
/// `p`; with a window, only keys `j` with `|p - j| < window`.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionMask {
    /// Number of queries.
    pub queries: u32,
    /// Number of keys.
    pub keys: u32,
    /// Key position of query 0.
    pub offset: i32,
    /// Reach of the window, the own position included.
    pub window: i32,
}

/// The kv blocks that a block of [`CUBE_QUERIES`] queries attends to: `first..end`, at least one. Only the outer
/// blocks, `masked_start` and `masked_end` of them, hold keys that some of the queries do not see.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBlocks {
    /// The first block with a visible key.
    pub first: u32,
    /// One past the last block.
    pub end: u32,
    /// How many blocks, up to `end`, hold a key past what some query sees, or past the last key.
    pub masked_end: u32,
    /// How many blocks, from `first` on, hold a key before what some query sees.
    pub masked_start: u32,
}

#[cfg_attr(feature = "cuda", cube)]
impl KvBlocks {
    /// The blocks of `block` keys for the queries from `first_row` on.
    pub fn new(first_row: u32, mask: &AttentionMask, block: u32, causal: bool, window: bool) -> KvBlocks {
        let position = first_row as i32 + mask.offset;
        let last = position + CUBE_QUERIES as i32 - 1;
        let keys = mask.keys as i32;
        // End of the keys that some query sees, and of those that all queries see.
        let mut some = keys;
        let mut all = keys;
        if causal {
            some = i32::min(keys, i32::max(0, last + 1));
            all = i32::min(keys, i32::max(0, position + 1));
        } else if window {
            some = i32::min(keys, i32::max(0, last + mask.window));
            all = i32::min(keys, i32::max(0, position + mask.window));
        }
        let mut first = 0u32;
        // Start of the keys that all queries see.
        let mut begin = 0u32;
        if window {
            first = i32::min(keys, i32::max(0, position + 1 - mask.window)) as u32 / block;
            begin = i32::min(keys, i32::max(0, last + 1 - mask.window)) as u32;
        }
        let end = u32::max(first + 1, (some as u32 + block - 1) / block);
        let inner_end = u32::max(first, all as u32 / block);
        let inner_first = u32::min(end, (begin + block - 1) / block);
        KvBlocks {
            first,
            end,
            masked_end: end - u32::min(end, inner_end),
            masked_start: inner_first - u32::min(first, inner_first),
        }
    }
}

/// The q blocks that attend to a block of [`CUBE_KEYS`] keys: `first..end`, at least one. Only the outer blocks,
/// `masked_start` and `masked_end` of them, hold queries that do not see all of the keys.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QBlocks {
    /// The first block with a query that sees one of the keys.
    pub first: u32,
    /// One past the last block.
    pub end: u32,
    /// How many blocks, from `first` on, hold a query before those that see all of the keys.
    pub masked_start: u32,
    /// How many blocks, up to `end`, hold a query past those that see all of the keys, or past the last query. Counted
    /// only with a window or if `bounded`; otherwise the rows past the last query must be zeros.
    pub masked_end: u32,
}

#[cfg_attr(feature = "cuda", cube)]
impl QBlocks {
    /// The blocks of `block` queries for the keys from `first_key` on. `bounded` if the rows past the last query are
    /// not zeros.
    pub fn new(first_key: u32, mask: &AttentionMask, block: u32, causal: bool, window: bool, bounded: bool) -> QBlocks {
        let position = first_key as i32 - mask.offset;
        let last = position + CUBE_KEYS as i32 - 1;
        let queries = mask.queries as i32;
        // First query that sees the first of the keys, and first that sees them all.
        let mut some = 0i32;
        let mut all = 0i32;
        if causal {
            some = position;
            all = last;
        } else if window {
            some = position + 1 - mask.window;
            all = last + 1 - mask.window;
        }
        let some = i32::min(queries, i32::max(0, some)) as u32;
        let all = i32::min(queries, i32::max(0, all)) as u32;
        // End of the queries that see some of the keys, and of those that see all.
        let mut some_end = queries;
        let mut all_end = queries;
        if window {
            some_end = i32::min(queries, i32::max(0, last + mask.window));
            all_end = i32::min(queries, i32::max(0, position + mask.window));
        }
        let first = some / block;
        let end = u32::max(first + 1, (some_end as u32 + block - 1) / block);
        let mut masked_end = 0u32;
        if window || bounded {
            masked_end = end - u32::min(end, u32::max(first, all_end as u32 / block));
        }
        let inner_first = u32::min(end, (all + block - 1) / block);
        QBlocks { first, end, masked_start: inner_first - u32::min(first, inner_first), masked_end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sees(query: u32, key: u32, mask: &AttentionMask, causal: bool, window: bool) -> bool {
        let ahead = key as i32 - (query as i32 + mask.offset);
        query < mask.queries && key < mask.keys && (!causal || ahead <= 0) && (!window || ahead.abs() < mask.window)
    }

    /// Every shape up to a few blocks, lengths that are multiples of a block and lengths that are not, all masks;
    /// queries before, among and after the keys.
    fn shapes() -> impl Iterator<Item = (AttentionMask, u32, bool, bool)> {
        let lengths = [1u32, 64, 65, 128, 200, 300];
        let windows = [1, 2, 64, 100, 128, 250, 1000];
        let mut all = Vec::new();
        for (queries, keys) in lengths.into_iter().flat_map(|q| lengths.map(|k| (q, k))) {
            let last = keys as i32 - queries as i32;
            for offset in [last, 0, last - 70, last + 70, -400, 400] {
                let mask = |window| AttentionMask { queries, keys, offset, window };
                for (block, causal) in [32, 64, 80, 128, 176].into_iter().flat_map(|b| [(b, false), (b, true)]) {
                    all.push((mask(0), block, causal, false));
                    all.extend(windows.map(|w| (mask(w), block, causal, true)));
                }
            }
        }
        all.into_iter()
    }

    #[test]
    fn queries_visit_every_key_they_see_and_mask_the_others() {
        for (mask, block, causal, window) in shapes() {
            for first_row in (0..mask.queries).step_by(CUBE_QUERIES) {
                let blocks = KvBlocks::new(first_row, &mask, block, causal, window);
                let count = blocks.end - blocks.first;
                assert!(
                    count >= 1 && blocks.masked_end <= count && blocks.masked_start <= count,
                    "{mask:?} {blocks:?}"
                );
                for row in first_row..(first_row + CUBE_QUERIES as u32).min(mask.queries) {
                    for key in 0..mask.keys.max(blocks.end * block) {
                        let seen = sees(row, key, &mask, causal, window);
                        let visited = (blocks.first * block..blocks.end * block).contains(&key);
                        let inner =
                            (blocks.first + blocks.masked_start) * block..(blocks.end - blocks.masked_end) * block;
                        assert!(!seen || visited, "row {row} misses key {key}: {mask:?} {blocks:?}");
                        assert!(
                            seen || !inner.contains(&key),
                            "row {row} gets key {key} unmasked: {mask:?} {blocks:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn keys_visit_every_query_that_sees_them_and_mask_the_others() {
        for (mask, block, causal, window) in shapes() {
            for (first_key, bounded) in (0..mask.keys).step_by(CUBE_KEYS).flat_map(|key| [(key, false), (key, true)]) {
                let blocks = QBlocks::new(first_key, &mask, block, causal, window, bounded);
                let count = blocks.end - blocks.first;
                assert!(
                    count >= 1 && blocks.masked_start <= count && blocks.masked_end <= count,
                    "{mask:?} {blocks:?}"
                );
                for key in first_key..(first_key + CUBE_KEYS as u32).min(mask.keys) {
                    for query in 0..mask.queries.max(blocks.end * block) {
                        let seen = sees(query, key, &mask, causal, window);
                        let visited = (blocks.first * block..blocks.end * block).contains(&query);
                        let inner =
                            (blocks.first + blocks.masked_start) * block..(blocks.end - blocks.masked_end) * block;
                        let masked = !inner.contains(&query) || (!bounded && query >= mask.queries);
                        assert!(!seen || visited, "key {key} misses query {query}: {mask:?} {blocks:?}");
                        assert!(seen || masked, "key {key} gets query {query} unmasked: {mask:?} {blocks:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_window_visits_no_block_that_nobody_sees() {
        for (mask, block, causal, window) in shapes().filter(|shape| shape.3) {
            for first_row in (0..mask.queries).step_by(CUBE_QUERIES) {
                let rows = first_row..first_row + CUBE_QUERIES as u32;
                let all_rows = AttentionMask { queries: rows.end, ..mask };
                let blocks = KvBlocks::new(first_row, &mask, block, causal, window);
                for visited in (blocks.first..blocks.end).filter(|_| blocks.end - blocks.first > 1) {
                    let mut keys = visited * block..(visited + 1) * block;
                    let seen = keys.any(|key| rows.clone().any(|row| sees(row, key, &all_rows, causal, window)));
                    assert!(seen, "rows from {first_row} visit block {visited}: {mask:?} {blocks:?}");
                }
            }
        }
    }
}
