//! What a rank's device says of itself: memory, idle time, clocks.

use backend_dist::launch::Rank;
use backend_dist::memory;
use serde::{Deserialize, Serialize};

/// A look at a rank's device. What it does not tell is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReading {
    /// The most bytes in use: of a CPU rank what it has allocated, of a GPU what is taken of its memory by all programs.
    pub memory: Option<u64>,
    /// Bytes of the GPU.
    pub capacity: Option<u64>,
    /// Bytes that the allocator has taken from the GPU.
    pub reserved: Option<u64>,
    /// Bytes of those that tensors are in.
    pub in_use: Option<u64>,
    /// Share of the time in which the GPU had done all that it was given.
    pub idle: Option<f64>,
}

impl RankReading {
    /// This reading, with the larger sizes of the two.
    pub fn with_most(self, other: Self) -> Self {
        Self {
            memory: self.memory.max(other.memory),
            reserved: self.reserved.max(other.reserved),
            in_use: self.in_use.max(other.in_use),
            ..self
        }
    }
}

/// Looks at a rank's device; belongs to the rank's thread.
pub struct Gauge {
    rank: Rank,
    #[cfg(feature = "cuda")]
    idle: Option<backend_dist::idle::IdleWatch>,
}

impl Gauge {
    /// A gauge of the rank that the calling thread is.
    pub fn new(rank: &Rank) -> Self {
        Self {
            rank: rank.clone(),
            #[cfg(feature = "cuda")]
            idle: backend_dist::idle::IdleWatch::start(&rank.device),
        }
    }

    /// Forgets what was seen before.
    pub fn begin(&mut self) {
        memory::reset_peak(self.rank.rank);
        #[cfg(feature = "cuda")]
        if let Some(idle) = &self.idle {
            idle.reset();
        }
    }

    /// What was seen since [`begin`](Self::begin).
    pub fn read(&mut self) -> RankReading {
        let mut reading = RankReading::default();
        match self.rank.device.memory_pool_usage() {
            Some(pools) => {
                reading.reserved = Some(pools.bytes_reserved);
                reading.in_use = Some(pools.bytes_in_use);
                reading.memory = reading.reserved;
            }
            None if memory::is_counting() => reading.memory = Some(memory::peak(self.rank.rank)),
            None => {}
        }
        #[cfg(feature = "cuda")]
        if let Some(idle) = &self.idle {
            reading.idle = idle.share();
        }
        reading
    }
}
