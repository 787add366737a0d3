//! A rank's coordinates among those that share layers, and among those that share experts.

use std::ops::Range;

use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use backend_dist::shard::GroupPosition;

/// A rank's coordinate in its tensor parallel group, as every parallel layer needs it.
#[derive(Clone, Debug)]
pub struct TensorParallel {
    /// The ranks that share each layer.
    pub group: Group,
    /// Activations between tensor parallel regions are sharded along the sequence.
    pub sequence: bool,
    /// Where the group has a device link its collectives are overlapped with GEMMs.
    pub overlap: bool,
    /// Logits that a rank holds at a time, see [`positions_at_once`](backend_dist::ops::positions_at_once).
    pub logits_at_once: usize,
}

impl TensorParallel {
    /// Position and size, for sections.
    pub fn place(&self) -> GroupPosition {
        GroupPosition { rank: self.group.rank(), size: self.group.size() }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// The smallest number of positions, at least `needed`, that the ranks can shard.
    pub fn positions(&self, needed: usize) -> usize {
        if self.sequence { needed.next_multiple_of(self.size()) } else { needed }
    }

    /// Length of the sequence of which this rank has `positions`.
    pub fn sequence_length(&self, positions: usize) -> usize {
        if self.sequence { positions * self.size() } else { positions }
    }

    /// Which of the positions of a tensor parallel region this rank has, if it has `count` of them.
    pub fn own_positions(&self, count: usize) -> Range<usize> {
        let first = if self.sequence { count * self.group.rank() } else { 0 };
        first..first + count
    }
}

/// A rank's coordinates among the ranks that together hold the routed experts of a layer.
#[derive(Clone, Debug)]
pub struct ExpertParallel {
    /// The ranks that hold all experts of a layer once, and the tokens that go to them: rank `ep.rank * etp.size +
    /// etp.rank`.
    pub group: Group,
    /// Coordinate among the ranks that shard an expert.
    pub etp: GroupPosition,
    /// Coordinate among the ranks that divide the experts among themselves.
    pub ep: GroupPosition,
    /// The ranks of [`ExpertParallel::etp`].
    pub parts: Group,
    /// Where the group has a device link its all-to-alls are overlapped with the experts' GEMMs.
    pub overlap: bool,
    /// Into how many chunks a rank's experts are split for that, if it is not left to arithmetic.
    pub pieces: Option<usize>,
    /// Routers choose at random.
    pub forced: bool,
}

impl ExpertParallel {
    pub(super) fn of(rank: &Rank) -> Self {
        let place = |axis, at| GroupPosition { rank: at, size: rank.mesh.axis_size(axis) };
        let (etp, ep) = (place(Axis::Etp, rank.coords.etp), place(Axis::Ep, rank.coords.ep));
        let (group, parts) = (rank.group(Axis::EtpEp), rank.group(Axis::Etp));
        Self { group, etp, ep, parts, overlap: false, pieces: None, forced: false }
    }

    /// How many neighbours of [`ExpertParallel::group`] have tokens of one micro-batch, if `tensor_parallel` ranks
    /// share one: these, or all of the group. `None` if a micro-batch's tokens go to several groups and these have
    /// others too.
    pub fn sharing_tokens(&self, tensor_parallel: usize) -> Option<usize> {
        let (all, tp) = (self.group.size(), tensor_parallel);
        (all.is_multiple_of(tp) || tp.is_multiple_of(all)).then_some(tp.min(all))
    }

    /// Which of the layer's experts this rank holds: contiguous blocks, in the order of the ranks, as in Megatron-LM
    /// (`megatron/core/transformer/moe/moe_layer.py`, `local_expert_indices`).
    ///
    /// # Panics
    /// If the ranks do not divide the experts.
    pub fn local(&self, experts: usize) -> Range<usize> {
        let GroupPosition { rank, size } = self.ep;
        assert!(experts.is_multiple_of(size), "expert-parallel {size} does not divide {experts} experts");
        let count = experts / size;
        rank * count..(rank + 1) * count
    }
}
