//! What exchanges send, for profiles.

use crate::comm::{DeviceOp, DeviceOpKind};
use crate::profile::Operation;

/// An exchange over `size` members of which each brings `bytes`: what a member sends by rings (NVIDIA's nccl-tests,
/// doc/PERFORMANCE.md). `how` ends its name.
pub(crate) fn exchanged(op: &DeviceOp, bytes: usize, size: usize, how: &str) -> Operation {
    let (name, sent) = match op.kind() {
        DeviceOpKind::AllReduce(_) => ("all-reduce", 2 * bytes * (size - 1) / size),
        DeviceOpKind::AllGather(_) => ("all-gather", bytes * (size - 1)),
        DeviceOpKind::ReduceScatter(_) => ("reduce-scatter", bytes * (size - 1) / size),
        DeviceOpKind::AllToAll { .. } => ("all-to-all", bytes * (size - 1) / size),
        DeviceOpKind::Broadcast(_) => ("broadcast", bytes),
        DeviceOpKind::Message => ("message", bytes),
    };
    Operation::exchange(format!("{name} over {size}{how}"), sent)
}
