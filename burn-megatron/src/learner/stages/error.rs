//! Why a model cannot be a pipeline in a layout.

use backend_dist::mesh::Nearest;
use thiserror::Error;

use super::Part;
use crate::schedule::{ScheduleError, ScheduleKind};

/// Why a model that is a chain of blocks cannot train in a layout. Nothing has started then.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are the values in the messages")]
pub enum StagesError {
    /// A stage would have no block.
    #[error(
        "pipeline-parallel {ranks} with virtual-pipeline {chunks} makes {} stages of a model with {blocks} blocks; nearest \
         legal: pipeline-parallel {nearest}",
        ranks * chunks
    )]
    Blocks { ranks: usize, chunks: usize, blocks: usize, nearest: Nearest },
    /// No part uses a parameter.
    #[error(
        "parameter `{path}` has no owner: `Stages::owner` returns None for its path; nearest legal: {nearest}, as for the \
         parameter before it"
    )]
    NoOwner { path: String, nearest: Part },
    /// A block that is not there.
    #[error("parameter `{path}` is owned by {part} of a model with {blocks} blocks; nearest legal: {}", nearest_block(*blocks))]
    NoBlock { path: String, part: Part, blocks: usize },
    /// Two fields with one parameter, in different parts, or both trained and in several.
    #[error(
        "parameter `{path}` ({part}) is `{other}` ({other_part}) under another name; nearest legal: one field that both \
         parts use, owned by Part::Tied or Part::Shared"
    )]
    TwoOwners { path: String, part: Part, other: String, other_part: Part },
    /// Burn's autodiff computes gradients of inputs and weights together.
    #[error(
        "schedule {kind} computes gradients of inputs before those of weights, which the backward pass of any module does \
         not; nearest legal: {nearest}"
    )]
    SplitBackward { kind: ScheduleKind, nearest: ScheduleKind },
    /// There is no such schedule.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Recomputation of parts of a block.
    #[error(
        "recompute-granularity selective names modules of this crate's own layers; nearest legal: full, Recompute::full()"
    )]
    Selective,
    /// Inputs of blocks in host memory.
    #[error("recompute: cpu_offload is for models of this crate's own layers; nearest legal: cpu_offload: false")]
    CpuOffload,
    /// A repeated forward pass would update them twice.
    #[error(
        "recompute: `{path}` is a running state, which a second forward pass would update again; nearest legal: none"
    )]
    RunningState { path: String },
}

fn nearest_block(blocks: usize) -> Part {
    Part::Block(blocks.saturating_sub(1))
}
