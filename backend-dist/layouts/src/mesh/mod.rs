//! The mesh of ranks and its groups. Pure arithmetic, no tensors and no threads.
//!
//! Ranks are numbered as in Megatron-LM (`megatron/core/parallel_state.py`, `RankGenerator`): in the order
//! tp, cp, ep, dp, pp with the leftmost fastest. The same ranks carry two grids. The *dense* grid has the axes
//! `tp, cp, dp, pp`; the *expert* grid, for the experts of an MoE model, has `etp, ep, edp, pp`. Both have the same
//! pipeline stages.

mod grid;
mod layout;
#[cfg(test)]
mod tests;
mod words;

pub use layout::{LayoutError, Nearest, ParallelLayout};

use grid::Grid;
use std::fmt;

/// A set of ranks that differ only in some coordinates: one dimension of the mesh, or several taken together.
///
/// ```
/// use layouts::mesh::{Axis, Mesh, ParallelLayout};
///
/// let mesh = Mesh::new(ParallelLayout { tp: 2, dp: 2, ..Default::default() })?;
/// assert_eq!(mesh.groups(Axis::Tp), [[0, 1], [2, 3]]);
/// assert_eq!(mesh.groups(Axis::Dp), [[0, 2], [1, 3]]);
/// assert_eq!(Axis::DpCp.name(), "dp-cp");
/// # Ok::<(), layouts::mesh::LayoutError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Every rank.
    World,
    /// Tensor parallel.
    Tp,
    /// Context parallel.
    Cp,
    /// Data parallel.
    Dp,
    /// Data and context parallel: the ranks that hold the same dense weights and sum their gradients.
    DpCp,
    /// Pipeline parallel.
    Pp,
    /// Tensor and pipeline parallel: the ranks that together hold one dense model.
    TpPp,
    /// Tensor and context parallel: the ranks that work on the same samples in one stage.
    TpCp,
    /// Tensor, data and context parallel: the ranks of one pipeline stage.
    TpDpCp,
    /// Tensor parallel inside experts.
    Etp,
    /// Expert parallel.
    Ep,
    /// Expert tensor and expert parallel: the ranks that together hold all experts of a layer.
    EtpEp,
    /// Expert tensor, expert and pipeline parallel: the ranks that together hold all experts of the model.
    EtpEpPp,
    /// Expert data parallel: the ranks that hold the same experts.
    Edp,
}

impl Axis {
    /// Every axis, for loops over all groups.
    pub const ALL: [Axis; 14] = [
        Axis::World,
        Axis::Tp,
        Axis::Cp,
        Axis::Dp,
        Axis::DpCp,
        Axis::Pp,
        Axis::TpPp,
        Axis::TpCp,
        Axis::TpDpCp,
        Axis::Etp,
        Axis::Ep,
        Axis::EtpEp,
        Axis::EtpEpPp,
        Axis::Edp,
    ];

    /// Lower case, as in log lines and error messages: `tp`, `dp-cp`, …
    pub fn name(self) -> &'static str {
        match self {
            Axis::World => "world",
            Axis::Tp => "tp",
            Axis::Cp => "cp",
            Axis::Dp => "dp",
            Axis::DpCp => "dp-cp",
            Axis::Pp => "pp",
            Axis::TpPp => "tp-pp",
            Axis::TpCp => "tp-cp",
            Axis::TpDpCp => "tp-dp-cp",
            Axis::Etp => "etp",
            Axis::Ep => "ep",
            Axis::EtpEp => "etp-ep",
            Axis::EtpEpPp => "etp-ep-pp",
            Axis::Edp => "edp",
        }
    }

    /// The grid of the axis, and which of its four dimensions vary inside a group.
    fn dimensions(self) -> (GridKind, [bool; 4]) {
        use GridKind::{Dense, Expert};
        // Dense: tp, cp, dp, pp. Expert: etp, ep, edp, pp.
        match self {
            Axis::World => (Dense, [true, true, true, true]),
            Axis::Tp => (Dense, [true, false, false, false]),
            Axis::Cp => (Dense, [false, true, false, false]),
            Axis::Dp => (Dense, [false, false, true, false]),
            Axis::DpCp => (Dense, [false, true, true, false]),
            Axis::Pp => (Dense, [false, false, false, true]),
            Axis::TpPp => (Dense, [true, false, false, true]),
            Axis::TpCp => (Dense, [true, true, false, false]),
            Axis::TpDpCp => (Dense, [true, true, true, false]),
            Axis::Etp => (Expert, [true, false, false, false]),
            Axis::Ep => (Expert, [false, true, false, false]),
            Axis::EtpEp => (Expert, [true, true, false, false]),
            Axis::EtpEpPp => (Expert, [true, true, false, true]),
            Axis::Edp => (Expert, [false, false, true, false]),
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The coordinates of a rank on the dense grid (`tp, cp, dp, pp`) and on the expert grid (`etp, ep, edp, pp`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each field is the position along the axis it is named after")]
pub struct Coords {
    pub tp: usize,
    pub cp: usize,
    pub dp: usize,
    pub pp: usize,
    pub etp: usize,
    pub ep: usize,
    pub edp: usize,
}

/// The dense coordinates, for messages: `tp0 cp0 dp1 pp0`.
impl fmt::Display for Coords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp{} cp{} dp{} pp{}", self.tp, self.cp, self.dp, self.pp)
    }
}

/// The ranks of a world and the groups they form.
///
/// ```
/// use layouts::mesh::{Axis, Coords, Mesh};
///
/// let mesh = Mesh::new("TP2 PP2 DP2".parse()?)?;
/// assert_eq!(mesh.world_size(), 8);
/// assert_eq!(mesh.coords(5), Coords { tp: 1, dp: 0, pp: 1, etp: 1, ..Default::default() });
/// assert_eq!(mesh.group_of(Axis::Pp, 5), [1, 5]);
/// # Ok::<(), layouts::mesh::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    layout: ParallelLayout,
    dense: Grid,
    expert: Grid,
}

impl Mesh {
    /// The mesh of a layout whose data parallel size is known; the world has `tp * cp * dp * pp` ranks.
    ///
    /// # Errors
    /// A zero size, or expert sizes that do not divide the ranks of a stage; see [`LayoutError`].
    pub fn new(layout: ParallelLayout) -> Result<Mesh, LayoutError> {
        layout.check()?;
        let per_stage = layout.tp * layout.cp * layout.dp;
        let etp = layout.expert_tp();
        let edp = per_stage / (etp * layout.ep);
        Ok(Mesh {
            dense: Grid { sizes: [layout.tp, layout.cp, layout.dp, layout.pp], order: [0, 1, 2, 3] },
            expert: Grid { sizes: [etp, layout.ep, edp, layout.pp], order: [0, 1, 2, 3] },
            layout,
        })
    }

    /// The same with pipeline stages before data-parallel ranks, as Megatron-LM's `--use-tp-pp-dp-mapping`: the ranks of
    /// a pipeline are next to each other.
    pub fn with_tp_pp_dp_mapping(mut self) -> Self {
        for grid in [&mut self.dense, &mut self.expert] {
            grid.order = [0, 1, 3, 2];
        }
        self
    }

    /// The mesh of another layout, with its ranks in the same order.
    ///
    /// # Errors
    /// As [`Mesh::new`].
    pub fn resized(&self, layout: ParallelLayout) -> Result<Mesh, LayoutError> {
        let mut mesh = Mesh::new(layout)?;
        (mesh.dense.order, mesh.expert.order) = (self.dense.order, self.expert.order);
        Ok(mesh)
    }

    /// The layout the mesh was made from.
    pub fn layout(&self) -> &ParallelLayout {
        &self.layout
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.layout.world_size()
    }

    /// Number of ranks in each group of an axis.
    pub fn axis_size(&self, axis: Axis) -> usize {
        let (kind, varies) = axis.dimensions();
        self.grid(kind).sizes.iter().zip(varies).filter(|(_, varies)| *varies).map(|(size, _)| size).product()
    }

    /// The coordinates of a rank.
    ///
    /// # Panics
    /// If `rank` is not smaller than the world size.
    pub fn coords(&self, rank: usize) -> Coords {
        assert!(rank < self.world_size(), "rank {rank} is outside a world of {}", self.world_size());
        let [tp, cp, dp, pp] = self.dense.position(rank);
        let [etp, ep, edp, _] = self.expert.position(rank);
        Coords { tp, cp, dp, pp, etp, ep, edp }
    }

    /// The rank at a position of the dense grid; the expert coordinates follow from it and are not read.
    pub fn rank_of(&self, coords: Coords) -> usize {
        self.dense.rank([coords.tp, coords.cp, coords.dp, coords.pp])
    }

    /// All groups of an axis, each in ascending order, ordered by their first rank.
    pub fn groups(&self, axis: Axis) -> Vec<Vec<usize>> {
        let firsts = (0..self.world_size()).filter(|&rank| self.group_of(axis, rank)[0] == rank);
        firsts.map(|rank| self.group_of(axis, rank)).collect()
    }

    /// The group of an axis that `rank` belongs to, in ascending order.
    ///
    /// # Panics
    /// If `rank` is not smaller than the world size.
    pub fn group_of(&self, axis: Axis, rank: usize) -> Vec<usize> {
        assert!(rank < self.world_size(), "rank {rank} is outside a world of {}", self.world_size());
        let (kind, varies) = axis.dimensions();
        self.grid(kind).group(rank, varies)
    }

    fn grid(&self, kind: GridKind) -> &Grid {
        match kind {
            GridKind::Dense => &self.dense,
            GridKind::Expert => &self.expert,
        }
    }
}

/// Which of the two grids over the same ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GridKind {
    /// `tp, cp, dp, pp`: all parameters but routed experts.
    #[default]
    Dense,
    /// `etp, ep, edp, pp`: routed experts.
    Expert,
}

impl GridKind {
    /// The ranks that hold the same parameters and sum their gradients.
    pub fn dp_ranks(self) -> Axis {
        match self {
            Self::Dense => Axis::DpCp,
            Self::Expert => Axis::Edp,
        }
    }

    /// The ranks that shard the same parameters.
    pub fn tensor_parallel(self) -> Axis {
        match self {
            Self::Dense => Axis::Tp,
            Self::Expert => Axis::Etp,
        }
    }

    /// The ranks that together hold all parameters of the grid once.
    pub fn model_parallel(self) -> Axis {
        match self {
            Self::Dense => Axis::TpPp,
            Self::Expert => Axis::EtpEpPp,
        }
    }
}
