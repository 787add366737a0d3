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
    pub fn new(
        first_row: u32,
        queries: u32,
        keys: u32,
        block: u32,
        causal: bool,
    ) -> KeyBlocks {
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
