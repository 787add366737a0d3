//! Which ranks shard a bucket, and which hold the same shard.

use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::GridKind;

/// What ZeRO does with the ranks that hold the same parameters. With hybrid sharding (PyTorch's HSDP) each group of them
/// shards the parameters for itself, and a rank of each of the other groups holds the same shard.
///
/// | | `shards` | `same_shard` |
/// |---|---|---|
/// | ZeRO 0 | this rank alone | all of them |
/// | ZeRO 1, 2, 3 | all of them | this rank alone |
/// | with `zero-group` n | n neighbours | one rank of each n |
#[derive(Clone, Debug)]
pub struct Sharding {
    /// The ZeRO stage, 0 where one rank has nothing to shard with others.
    pub zero: u8,
    /// The ranks over which the states are sharded: gradients are reduce-scattered, and parameters gathered, over them.
    pub shards: Group,
    /// The ranks that hold the same shard: its gradients are all-reduced over them once per step.
    pub same_shard: Group,
}

impl Sharding {
    /// Of a rank that holds parameters alone.
    pub fn single() -> Self {
        Self { zero: 0, shards: Group::single(), same_shard: Group::single() }
    }

    /// By the rank's layout, for the parameters of a grid.
    pub fn of(rank: &Rank, grid: GridKind) -> Self {
        let (layout, axis) = (rank.mesh.layout(), grid.dp_ranks());
        let (zero, shards) = (layout.zero_stage(grid), layout.zero_shards(grid));
        let all = rank.group(axis);
        let (shards, same_shard) = match shards {
            1 => (Group::single(), all),
            size if size == all.size() => (all, Group::single()),
            size => (rank.subgroup(axis, size), rank.across_subgroups(axis, size)),
        };
        Self { zero, shards, same_shard }
    }

    /// Ranks that hold the same parameters.
    pub fn ranks(&self) -> usize {
        self.shards.size() * self.same_shard.size()
    }
}
