//! Memory of each CPU rank: how many bytes it holds and the most it has held.
//!
//! Ranks of one process share a heap, so the operating system knows only their sum. A program that makes
//! [`RankAllocator`] its global allocator gets the counts per rank instead:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: backend_dist::memory::RankAllocator = backend_dist::memory::RankAllocator;
//!
//! # fn main() {
//! use backend_dist::memory;
//!
//! memory::set_rank(Some(3));
//! let before = memory::live(3);
//! let block = vec![0u8; 1 << 20];
//! assert_eq!(memory::live(3) - before, 1 << 20);
//! drop(block);
//! assert_eq!(memory::live(3), before);
//! assert!(memory::peak(3) >= before + (1 << 20));
//! # }
//! ```
//!
//! A block belongs to the rank whose thread allocated it, whoever frees it. [`launch`](crate::launch::launch) tells
//! each rank's thread which rank it is. Exchanges give every rank its own copy of a result while memory is counted, as
//! ranks with memories of their own would have. What the shared compute threads allocate (packed panels of a matrix
//! product, for example) belongs to no rank.
//!
//! Blocks under [`SMALLEST`] bytes are not counted. The counts are of the process: two launches at the same time that
//! have the same rank numbers are counted together.

mod allocator;
mod counters;
#[cfg(test)]
mod tests;

/// Bytes into which matrix products of a CPU rank pack their operands, whatever their sizes: a panel as large as the
/// second level cache of this machine (`L2_SLAB` in gemm-common), and a little besides, as measured.
pub fn product_workspace() -> u64 {
    const BESIDES: u64 = 1 << 17;
    gemm_common::cache::CACHE_INFO[1].cache_bytes as u64 + BESIDES
}

pub use allocator::{RankAllocator, SMALLEST};
pub use counters::{MAX_RANKS, is_counting, live, peak, reset_peak, set_rank, without_rank};
