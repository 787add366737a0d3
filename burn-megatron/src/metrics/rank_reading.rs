//! What is read of a rank's device.

use serde::{Deserialize, Serialize};

/// A reading of a rank's device. What is not known is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReading {
    /// The most bytes in use: of a CPU rank what it has allocated, of a GPU what all programs have taken of its memory.
    pub memory: Option<u64>,
    /// Bytes that the allocator has taken from the GPU.
    pub reserved: Option<u64>,
    /// Bytes of those that tensors are in.
    pub in_use: Option<u64>,
    /// Share of the time in which the GPU had done all that it was given.
    pub idle: Option<f64>,
    /// Percent of the time in which a kernel ran, as NVML samples it.
    pub utilisation: Option<f64>,
    /// Clock of the GPU's SMs, MHz.
    pub clock: Option<f64>,
    /// Watts that the GPU draws.
    pub power: Option<f64>,
    /// The GPU's temperature, degrees Celsius.
    pub temperature: Option<f64>,
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
