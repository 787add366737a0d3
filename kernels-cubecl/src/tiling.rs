//! Which tiles see which: plain arithmetic, the same on the host and in the kernels.
#[cfg(feature = "cuda")]
use cubecl::prelude::*;

/// Query rows a cube of the forward and of the query gradient kernel owns.
pub const QUERY_ROWS: usize = 128;

/// Keys a cube of the key gradient kernel owns.
pub const KEY_ROWS: usize = 128;

/// The queries and keys of one sequence. Query `i` stands at key `p = i + offset`: if causal it sees the keys up to
/// `p`, with a window only keys `j` with `|p - j| < window`.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// Number of queries.
    pub queries: u32,
    /// Number of keys.
    pub keys: u32,
    /// Key position of query 0.
    pub offset: i32,
    /// Reach of the window, the own position included.
    pub window: i32,
}

/// The key blocks that a block of [`QUERY_ROWS`] query rows attends to: `first..end`, at least one. What the rows do
/// not see of them lies in the outer ones only.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyBlocks {
    /// The first block with a key that a row sees.
    pub first: u32,
    /// One past the last block.
    pub end: u32,
    /// How many of the last of them hold a key past what some row sees, or past the last key.
    pub edge: u32,
    /// How many of the first of them hold a key before what some row sees.
    pub low_edge: u32,
}

#[cfg_attr(feature = "cuda", cube)]
impl KeyBlocks {
    /// The blocks of `block` keys for the rows from `first_row`.
    pub fn new(first_row: u32, sight: &Sight, block: u32, causal: bool, window: bool) -> KeyBlocks {
        let place = first_row as i32 + sight.offset;
        let last = place + QUERY_ROWS as i32 - 1;
        let keys = sight.keys as i32;
        // Where the keys end that some row sees, and those that all rows see.
        let mut some = keys;
        let mut all = keys;
        if causal {
            some = i32::min(keys, i32::max(0, last + 1));
            all = i32::min(keys, i32::max(0, place + 1));
        } else if window {
            some = i32::min(keys, i32::max(0, last + sight.window));
            all = i32::min(keys, i32::max(0, place + sight.window));
        }
        let mut first = 0u32;
        // Where the keys begin that all rows see.
        let mut begin = 0u32;
        if window {
            first = i32::min(keys, i32::max(0, place + 1 - sight.window)) as u32 / block;
            begin = i32::min(keys, i32::max(0, last + 1 - sight.window)) as u32;
        }
        let end = u32::max(first + 1, (some as u32 + block - 1) / block);
        let inner_end = u32::max(first, all as u32 / block);
        let inner_first = u32::min(end, (begin + block - 1) / block);
        KeyBlocks {
            first,
            end,
            edge: end - u32::min(end, inner_end),
            low_edge: inner_first - u32::min(first, inner_first),
        }
    }
}

/// The query blocks that attend to a block of [`KEY_ROWS`] keys: `first..end`, at least one. Queries which do not see
/// all of the keys lie in the outer ones only.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryBlocks {
    /// The first block with a query that sees one of the keys.
    pub first: u32,
    /// One past the last block.
    pub end: u32,
    /// How many blocks, from `first` on, hold a query before those that see all of the keys.
    pub edge: u32,
    /// How many of the last of them hold a query past those that see all of the keys, or past the last query. Counted
    /// only with a window or if `bounded`; otherwise queries past the last must be zeros.
    pub high_edge: u32,
}

#[cfg_attr(feature = "cuda", cube)]
impl QueryBlocks {
    /// The blocks of `block` queries for the keys from `first_key`. `bounded` if what follows the last query is not
    /// zeros.
    pub fn new(first_key: u32, sight: &Sight, block: u32, causal: bool, window: bool, bounded: bool) -> QueryBlocks {
        let place = first_key as i32 - sight.offset;
        let last = place + KEY_ROWS as i32 - 1;
        let queries = sight.queries as i32;
        // First query that sees the first of the keys, and first that sees them all.
        let mut some = 0i32;
        let mut all = 0i32;
        if causal {
            some = place;
            all = last;
        } else if window {
            some = place + 1 - sight.window;
            all = last + 1 - sight.window;
        }
        let some = i32::min(queries, i32::max(0, some)) as u32;
        let all = i32::min(queries, i32::max(0, all)) as u32;
        // Where the queries end that see some, and those that see all of the keys.
        let mut some_end = queries;
        let mut all_end = queries;
        if window {
            some_end = i32::min(queries, i32::max(0, last + sight.window));
            all_end = i32::min(queries, i32::max(0, place + sight.window));
        }
        let first = some / block;
        let end = u32::max(first + 1, (some_end as u32 + block - 1) / block);
        let mut high_edge = 0u32;
        if window || bounded {
            high_edge = end - u32::min(end, u32::max(first, all_end as u32 / block));
        }
        let inner_first = u32::min(end, (all + block - 1) / block);
        QueryBlocks { first, end, edge: inner_first - u32::min(first, inner_first), high_edge }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sees(query: u32, key: u32, sight: &Sight, causal: bool, window: bool) -> bool {
        let ahead = key as i32 - (query as i32 + sight.offset);
        query < sight.queries && key < sight.keys && (!causal || ahead <= 0) && (!window || ahead.abs() < sight.window)
    }

    /// Every shape up to a few blocks, lengths that divide and lengths that do not, all masks; queries before, among
    /// and after the keys.
    fn shapes() -> impl Iterator<Item = (Sight, u32, bool, bool)> {
        let lengths = [1u32, 64, 65, 128, 200, 300];
        let windows = [1, 2, 64, 100, 128, 250, 1000];
        let mut all = Vec::new();
        for (queries, keys) in lengths.into_iter().flat_map(|q| lengths.map(|k| (q, k))) {
            let last = keys as i32 - queries as i32;
            for offset in [last, 0, last - 70, last + 70, -400, 400] {
                let sight = |window| Sight { queries, keys, offset, window };
                for (block, causal) in [32, 64, 80, 128, 176].into_iter().flat_map(|b| [(b, false), (b, true)]) {
                    all.push((sight(0), block, causal, false));
                    all.extend(windows.map(|w| (sight(w), block, causal, true)));
                }
            }
        }
        all.into_iter()
    }

    #[test]
    fn rows_meet_every_key_they_see_and_are_masked_where_they_do_not() {
        for (sight, block, causal, window) in shapes() {
            for first_row in (0..sight.queries).step_by(QUERY_ROWS) {
                let blocks = KeyBlocks::new(first_row, &sight, block, causal, window);
                let count = blocks.end - blocks.first;
                assert!(count >= 1 && blocks.edge <= count && blocks.low_edge <= count, "{sight:?} {blocks:?}");
                for row in first_row..(first_row + QUERY_ROWS as u32).min(sight.queries) {
                    for key in 0..sight.keys.max(blocks.end * block) {
                        let seen = sees(row, key, &sight, causal, window);
                        let visited = (blocks.first * block..blocks.end * block).contains(&key);
                        let inner = (blocks.first + blocks.low_edge) * block..(blocks.end - blocks.edge) * block;
                        assert!(!seen || visited, "row {row} misses key {key}: {sight:?} {blocks:?}");
                        assert!(
                            seen || !inner.contains(&key),
                            "row {row} gets key {key} unmasked: {sight:?} {blocks:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn keys_meet_every_query_that_sees_them_and_are_masked_for_the_others() {
        for (sight, block, causal, window) in shapes() {
            for (first_key, bounded) in (0..sight.keys).step_by(KEY_ROWS).flat_map(|key| [(key, false), (key, true)]) {
                let blocks = QueryBlocks::new(first_key, &sight, block, causal, window, bounded);
                let count = blocks.end - blocks.first;
                assert!(count >= 1 && blocks.edge <= count && blocks.high_edge <= count, "{sight:?} {blocks:?}");
                for key in first_key..(first_key + KEY_ROWS as u32).min(sight.keys) {
                    for query in 0..sight.queries.max(blocks.end * block) {
                        let seen = sees(query, key, &sight, causal, window);
                        let visited = (blocks.first * block..blocks.end * block).contains(&query);
                        let inner = (blocks.first + blocks.edge) * block..(blocks.end - blocks.high_edge) * block;
                        let masked = !inner.contains(&query) || (!bounded && query >= sight.queries);
                        assert!(!seen || visited, "key {key} misses query {query}: {sight:?} {blocks:?}");
                        assert!(seen || masked, "key {key} gets query {query} unmasked: {sight:?} {blocks:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_window_visits_no_block_that_nobody_sees() {
        for (sight, block, causal, window) in shapes().filter(|shape| shape.3) {
            for first_row in (0..sight.queries).step_by(QUERY_ROWS) {
                let rows = first_row..first_row + QUERY_ROWS as u32;
                let all_rows = Sight { queries: rows.end, ..sight };
                let blocks = KeyBlocks::new(first_row, &sight, block, causal, window);
                for visited in (blocks.first..blocks.end).filter(|_| blocks.end - blocks.first > 1) {
                    let mut keys = visited * block..(visited + 1) * block;
                    let seen = keys.any(|key| rows.clone().any(|row| sees(row, key, &all_rows, causal, window)));
                    assert!(seen, "rows from {first_row} visit block {visited}: {sight:?} {blocks:?}");
                }
            }
        }
    }
}
