//! The groups of a stage's rank.

use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;

/// The ranks that a stage's rank communicates with.
pub(in crate::learner) struct Groups {
    /// The pipeline.
    pub pp: Group,
    /// Ranks with the same stages.
    pub dp: Group,
    /// Ranks that hold shards of the same parameters.
    pub tp: Group,
}

impl Groups {
    pub fn of(rank: &Rank) -> Self {
        Self { pp: rank.group(Axis::Pp), dp: rank.group(Axis::Dp), tp: rank.group(Axis::Tp) }
    }
}
