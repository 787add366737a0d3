//! The communication volume of collectives, for profiles.

use crate::comm::{DeviceOp, DeviceOpKind};
use gpu::profile::Operation;

/// A collective over `size` members with `bytes` each: the bytes that a member sends in a ring algorithm (NVIDIA's
/// nccl-tests, doc/PERFORMANCE.md). `suffix` ends its name.
pub(crate) fn collective_operation(op: &DeviceOp, bytes: usize, size: usize, suffix: &str) -> Operation {
    let (name, sent) = match op.kind() {
        DeviceOpKind::AllReduce(_) => ("all-reduce", 2 * bytes * (size - 1) / size),
        DeviceOpKind::AllGather(_) => ("all-gather", bytes * (size - 1)),
        DeviceOpKind::ReduceScatter(_) => ("reduce-scatter", bytes * (size - 1) / size),
        DeviceOpKind::AllToAll { .. } => ("all-to-all", bytes * (size - 1) / size),
        DeviceOpKind::Broadcast(_) => ("broadcast", bytes),
        DeviceOpKind::Reduce(_) => ("reduce", bytes),
        DeviceOpKind::Message => ("message", bytes),
    };
    Operation::collective(format!("{name} over {size}{suffix}"), sent)
}
