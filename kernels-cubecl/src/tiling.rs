//! Which tiles see which: plain arithmetic, the same on the host and in the kernels.
#[cfg(feature = "cuda")]
use cubecl::prelude::*;

/// Query rows a cube of the forward and of the query gradient kernel owns.
pub const QUERY_ROWS: usize = 128;

/// The key blocks a block of [`QUERY_ROWS`] query rows attends to, from key 0.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyBlocks {
    /// Blocks any of the rows sees a key of.
    pub count: u32,
    /// How many of the last of them hold a key that some row does not see, or that does not exist.
    pub edge: u32,
}

#[cfg_attr(feature = "cuda", cube)]
impl KeyBlocks {
    /// The blocks of `block` keys for the rows from `first_row`. With `causal`, query `i` sees the keys up to
    /// `i + keys - queries`.
    pub fn new(first_row: u32, queries: u32, keys: u32, block: u32, causal: bool) -> KeyBlocks {
        let mut some = keys;
        let mut all = keys;
        if causal {
            some = u32::min(keys, first_row + QUERY_ROWS as u32 + keys - queries);
            all = u32::min(keys, first_row + 1 + keys - queries);
        }
        let count = (some + block - 1) / block;
        KeyBlocks { count, edge: count - all / block }
    }
}

/// Keys a cube of the key gradient kernel owns.
pub const KEY_ROWS: usize = 128;

/// The query blocks that attend to a block of [`KEY_ROWS`] keys: `first..count`.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryBlocks {
    /// The first block with a query that sees one of the keys.
    pub first: u32,
    /// One past the last block.
    pub count: u32,
    /// How many blocks, from `first` on, hold a query that does not see all of the keys.
    pub edge: u32,
}

#[cfg_attr(feature = "cuda", cube)]
impl QueryBlocks {
    /// The blocks of `block` queries for the keys from `first_key`. With `causal`, query `i` sees the keys up to
    /// `i + keys - queries`.
    pub fn new(first_key: u32, queries: u32, keys: u32, block: u32, causal: bool) -> QueryBlocks {
        let count = (queries + block - 1) / block;
        let mut first = 0u32;
        let mut all = 0u32;
        if causal {
            // First query that sees the first of the keys, and first that sees them all.
            let some = u32::max(first_key + queries, keys) - keys;
            let every = u32::max(first_key + KEY_ROWS as u32 - 1 + queries, keys) - keys;
            first = some / block;
            all = u32::min(count, (every + block - 1) / block);
        }
        QueryBlocks { first, count, edge: all - u32::min(all, first) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sees(query: u32, key: u32, queries: u32, keys: u32, causal: bool) -> bool {
        query < queries && key < keys && (!causal || key + queries <= query + keys)
    }

    /// Every shape up to a few blocks, lengths that divide and lengths that do not.
    fn shapes() -> impl Iterator<Item = (u32, u32, u32, bool)> {
        let lengths = [1u32, 63, 64, 65, 128, 200, 256, 300, 333];
        let pairs = lengths.into_iter().flat_map(move |q| lengths.into_iter().map(move |k| (q, k)));
        pairs
            .flat_map(|(q, k)| [64, 96, 128, 176].map(|block| (q, k, block)))
            .flat_map(|(q, k, block)| [false, true].map(|causal| (q, k, block, causal)))
            .filter(|(q, k, _, causal)| !causal || q <= k)
    }

    #[test]
    fn rows_meet_every_key_they_see_and_are_masked_where_they_do_not() {
        for (queries, keys, block, causal) in shapes() {
            for first_row in (0..queries).step_by(QUERY_ROWS) {
                let blocks = KeyBlocks::new(first_row, queries, keys, block, causal);
                assert!(blocks.count >= 1 && blocks.edge <= blocks.count);
                for row in first_row..(first_row + QUERY_ROWS as u32).min(queries) {
                    for key in 0..keys.next_multiple_of(block) + block {
                        let seen = sees(row, key, queries, keys, causal);
                        let visited = key < blocks.count * block;
                        let masked = key >= (blocks.count - blocks.edge) * block;
                        assert!(!seen || visited, "row {row} misses key {key} of {keys}");
                        assert!(seen || !visited || masked, "row {row} gets key {key} of {keys} unmasked");
                    }
                }
            }
        }
    }

    #[test]
    fn keys_meet_every_query_that_sees_them_and_are_masked_for_the_others() {
        for (queries, keys, block, causal) in shapes() {
            for first_key in (0..keys).step_by(KEY_ROWS) {
                let blocks = QueryBlocks::new(first_key, queries, keys, block, causal);
                assert!(blocks.first < blocks.count && blocks.first + blocks.edge <= blocks.count);
                for key in first_key..(first_key + KEY_ROWS as u32).min(keys) {
                    for query in 0..queries {
                        let seen = sees(query, key, queries, keys, causal);
                        let visited = query >= blocks.first * block;
                        let masked = query < (blocks.first + blocks.edge) * block;
                        assert!(!seen || visited, "key {key} misses query {query} of {queries}");
                        assert!(seen || !visited || masked, "key {key} gets query {query} of {queries} unmasked");
                    }
                }
            }
        }
    }
}
