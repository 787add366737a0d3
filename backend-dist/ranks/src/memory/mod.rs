//! Memory of each CPU rank: the bytes that it holds and the peak.
//!
//! Ranks of one process share a heap, so the operating system only knows their sum. A program with [`RankAllocator`] as
//! its global allocator gets the counts per rank instead:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: ranks::memory::RankAllocator = ranks::memory::RankAllocator(std::alloc::System);
//!
//! # fn main() {
//! use ranks::memory;
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
//! A block belongs to the rank whose thread allocated it, whoever frees it. [`launch`](crate::launch::launch) sets the
//! rank of each rank's thread. While memory is counted, collectives give every rank its own copy of a result, as with
//! separate memories. Allocations of the shared compute threads (packed panels of a GEMM, for example) belong to no
//! rank.
//!
//! Blocks under [`SMALLEST`] bytes are not counted. The counts are those of the process: two simultaneous launches with
//! the same rank numbers are counted together.

mod allocator;
mod counters;
#[cfg(test)]
mod tests;

pub use allocator::{RankAllocator, SMALLEST};
pub use counters::{MAX_RANKS, is_counting, live, peak, reset_peak, set_rank, without_rank};
pub use layouts::sizes::gemm_workspace;
