//! The collectives of a step, and what they send.

/// A collective over a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every member gets the sum.
    AllReduce,
    /// Every member gets all shards.
    AllGather,
    /// Every member gets its shard of the sum.
    ReduceScatter,
    /// Every member sends a different chunk to each other.
    AllToAll,
}

impl Collective {
    /// Bytes that each of `ranks` members sends for a tensor of `bytes`: the minimum, which rings reach (NCCL's
    /// "bus bandwidth" counts the same bytes, nccl-tests doc/PERFORMANCE.md).
    pub fn sent(self, bytes: u64, ranks: usize) -> u64 {
        let ranks = ranks as u64;
        let part = bytes * (ranks - 1) / ranks;
        match self {
            Collective::AllReduce => 2 * part,
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => part,
        }
    }
}
