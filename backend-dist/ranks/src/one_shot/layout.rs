//! Sizes and places in the memory that a member's peers write to.

#[cfg(test)]
use std::ops::Range;

/// Bytes of all members' tensors of a call: 256 KiB each of two members, 64 KiB of eight. A member sends its tensor to
/// every other one, a ring sends at most twice the tensor, so with more members NCCL is ahead from smaller tensors on.
const BYTES: usize = 512 << 10;

/// Bytes before the first region: the number of the next call and the number of blocks that have ended, 32 bits each,
/// and at [`MARK`] what tells members' memory apart.
pub(crate) const HEADER: usize = 256;

/// Where a member writes its rank, so that those who open its memory see that it is the right one.
pub(crate) const MARK: usize = 128;

/// Bytes of a tensor that a thread handles at once, and what they take in a region: 32 of 64 bits are data.
const UNIT: usize = 8;
const STAGED_UNIT: usize = 16;

/// Most members, which are arguments of the kernel.
pub(crate) const MEMBERS: usize = 8;

/// Threads of a block, one for each unit if the tensor is small.
pub(crate) const THREADS: usize = 256;

/// Most blocks. They wait for other GPUs and so should fit next to whatever else runs.
pub(crate) const BLOCKS: usize = 64;

/// Blocks that prefetch, bytes that each of their threads asks for, and most bytes of all: while GPUs wait for each other,
/// HBM could read about as many, and caches have six times as much.
pub(crate) const PREFETCHERS: usize = 64;
pub(crate) const CHUNK: usize = 4096;
const PREFETCHED: usize = 8 << 20;

/// How many of so many bytes are prefetched.
pub(crate) fn prefetched(bytes: usize) -> usize {
    bytes.min(PREFETCHED) / CHUNK * CHUNK
}

/// Units of a region, where one member's tensor of one call arrives.
pub(crate) fn region(size: usize) -> usize {
    BYTES / size / UNIT
}

/// Most bytes of a tensor.
pub(crate) fn limit(size: usize) -> usize {
    region(size) * UNIT
}

/// Bytes of a member's memory: two slots, for even and odd calls, with a region for each member.
pub(crate) fn memory(size: usize) -> usize {
    HEADER + 2 * size * region(size) * STAGED_UNIT
}

/// Blocks for a tensor of `bytes`.
pub(crate) fn blocks(bytes: usize) -> usize {
    bytes.div_ceil(UNIT * THREADS).clamp(1, BLOCKS)
}

/// Where the words of member `from` of call `call` are in the memory of each other member.
#[cfg(test)]
pub(crate) fn staged(size: usize, call: u32, from: usize, bytes: usize) -> Range<usize> {
    let start = HEADER + ((call as usize % 2) * size + from) * region(size) * STAGED_UNIT;
    start..start + bytes.div_ceil(UNIT) * STAGED_UNIT
}
