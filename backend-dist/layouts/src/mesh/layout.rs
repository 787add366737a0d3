//! How many ranks each kind of parallelism gets, written by the user.

use super::GridKind;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The size of every kind of parallelism. All sizes are counts of ranks, at least 1.
///
/// World size is `tp * cp * dp * pp`. The experts of an MoE model are laid over the same ranks by `ep` and `etp`; what
/// remains, `world / (etp * ep * pp)`, replicates the experts. In files the sizes are named as their flags are.
///
/// ```
/// use layouts::mesh::ParallelLayout;
///
/// let layout: ParallelLayout = "TP2 SP DP4 ZeRO1".parse()?;
/// assert_eq!((layout.world_size(), layout.sequence_parallel()), (8, true));
/// let filled = ParallelLayout { tp: 2, pp: 2, ..Default::default() }.fill_world(16)?;
/// assert_eq!(filled.to_string(), "TP2 PP2 DP4");
/// let refused = ParallelLayout { tp: 3, ..Default::default() }.fill_world(8).unwrap_err();
/// assert_eq!(refused.to_string(), "tensor-parallel 3 does not divide world size 8; nearest legal: 2, 4");
/// # Ok::<(), layouts::mesh::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ParallelLayout {
    /// Tensor parallel: every layer's matrices are sharded over these ranks.
    #[serde(rename = "tensor-parallel", alias = "tp")]
    pub tp: usize,
    /// Context parallel: the sequence is sharded over these ranks in the whole model.
    #[serde(rename = "context-parallel", alias = "cp")]
    pub cp: usize,
    /// Expert parallel: the experts of a layer are divided over these ranks.
    #[serde(rename = "expert-parallel", alias = "ep")]
    pub ep: usize,
    /// Tensor parallel inside an expert; `None` means the same as `tp`, Megatron's default.
    #[serde(rename = "expert-tensor-parallel", alias = "etp")]
    pub etp: Option<usize>,
    /// Pipeline parallel: the layers are divided over these stages.
    #[serde(rename = "pipeline-parallel", alias = "pp")]
    pub pp: usize,
    /// Virtual pipeline: model chunks per pipeline stage.
    #[serde(rename = "virtual-pipeline", alias = "vpp")]
    pub vpp: usize,
    /// Data parallel: copies of the model, each with its own samples.
    #[serde(rename = "data-parallel", alias = "dp")]
    pub dp: usize,
    /// Sequence parallel: activations between tensor parallel regions are sharded along the sequence over the `tp`
    /// ranks.
    #[serde(rename = "sequence-parallel", alias = "sp")]
    pub sp: bool,
    /// ZeRO stage 0 to 3: what is sharded over the data parallel ranks (1 optimizer, 2 and gradients, 3 and weights).
    pub zero: u8,
    /// ZeRO shards inside groups of so many neighbouring data and context parallel ranks, and the groups hold the same:
    /// PyTorch's hybrid sharding (HSDP), Megatron-LM's `--num-distributed-optimizer-instances`. `None`
    /// means one group of all of them.
    #[serde(rename = "zero-group")]
    pub zero_group: Option<usize>,
}

impl Default for ParallelLayout {
    fn default() -> Self {
        Self { tp: 1, cp: 1, ep: 1, etp: None, pp: 1, vpp: 1, dp: 1, sp: false, zero: 0, zero_group: None }
    }
}

impl ParallelLayout {
    /// Number of ranks the layout needs.
    pub fn world_size(&self) -> usize {
        self.tp * self.cp * self.dp * self.pp
    }

    /// Tensor parallel size inside an expert.
    pub fn expert_tp(&self) -> usize {
        self.etp.unwrap_or(self.tp)
    }

    /// Whether all ranks that a token's experts are on are among the same `ranks` neighbours: those of a tensor-parallel
    /// group, or times `cp` those of a data-parallel rank.
    pub fn has_experts_within(&self, ranks: usize) -> bool {
        ranks.is_multiple_of(self.expert_tp() * self.ep)
    }

    /// Whether activations are really sharded along the sequence: `sp` changes nothing on one tensor parallel rank.
    pub fn sequence_parallel(&self) -> bool {
        self.sp && self.tp > 1
    }

    /// Ranks over which ZeRO shards the parameters of a grid; 1 where nothing is sharded. The groups of routed experts
    /// are as many as those of the other parameters, each of them inside one of these. The layout must be legal.
    pub fn zero_shards(&self, grid: GridKind) -> usize {
        let dense = self.dp * self.cp;
        let group = self.zero_group.unwrap_or(dense);
        match grid {
            _ if self.zero == 0 => 1,
            GridKind::Dense => group,
            GridKind::Expert => self.expert_dp() / (dense / group),
        }
    }

    /// The ZeRO stage of the parameters of a grid: 0 where one rank has nothing to shard with others.
    pub fn zero_stage(&self, grid: GridKind) -> u8 {
        if self.zero_shards(grid) == 1 { 0 } else { self.zero }
    }

    /// Ranks that hold the same experts.
    fn expert_dp(&self) -> usize {
        self.tp * self.cp * self.dp / (self.expert_tp() * self.ep)
    }

    /// The same layout with the data parallel size that fills `world` ranks.
    ///
    /// # Errors
    /// Names the first size that does not divide what is left of the world, and the nearest ones that do.
    pub fn fill_world(mut self, world: usize) -> Result<Self, LayoutError> {
        self.check_sizes()?;
        let mut left = world;
        let mut of = format!("world size {world}");
        for (key, value) in
            [("tensor-parallel", self.tp), ("context-parallel", self.cp), ("pipeline-parallel", self.pp)]
        {
            divides(key, value, left, &of)?;
            left /= value;
            if value > 1 {
                of = format!("{of} / {key} {value}");
            }
        }
        self.dp = left;
        self.check()?;
        Ok(self)
    }

    /// Checks what can be checked without a model.
    pub fn check(&self) -> Result<(), LayoutError> {
        self.check_sizes()?;
        let per_stage = self.tp * self.cp * self.dp;
        let etp = self.expert_tp();
        divides("expert-tensor-parallel", etp, per_stage, &format!("{per_stage} (ranks of a pipeline stage)"))?;
        let of = format!("{per_stage} (ranks of a pipeline stage) / expert-tensor-parallel {etp}");
        divides("expert-parallel", self.ep, per_stage / etp, &of)?;
        self.check_zero_group()
    }

    fn check_zero_group(&self) -> Result<(), LayoutError> {
        let Some(group) = self.zero_group else { return Ok(()) };
        if self.zero == 0 {
            return Err(LayoutError::GroupWithoutZero { group });
        }
        let (dense, experts) = (self.dp * self.cp, self.expert_dp());
        let of = match self.cp {
            1 => format!("data-parallel {dense}"),
            cp => format!("{dense} (data-parallel {} · context-parallel {cp})", self.dp),
        };
        divides("zero-group", group, dense, &of)?;
        let legal = |group: usize| dense.is_multiple_of(group) && experts.is_multiple_of(dense / group);
        if legal(group) {
            return Ok(());
        }
        let nearest = Nearest::where_legal(group, dense, legal);
        Err(LayoutError::ZeroGroupOfExperts { group, groups: dense / group, experts, nearest })
    }

    fn check_sizes(&self) -> Result<(), LayoutError> {
        let sizes = [
            ("tensor-parallel", self.tp),
            ("context-parallel", self.cp),
            ("expert-parallel", self.ep),
            ("expert-tensor-parallel", self.expert_tp()),
            ("pipeline-parallel", self.pp),
            ("virtual-pipeline", self.vpp),
            ("data-parallel", self.dp),
            ("zero-group", self.zero_group.unwrap_or(1)),
        ];
        if let Some((key, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(LayoutError::Zero { key });
        }
        if self.vpp > 1 && self.pp == 1 {
            return Err(LayoutError::VirtualWithoutPipeline { vpp: self.vpp });
        }
        if self.zero > 3 {
            return Err(LayoutError::ZeroStage { zero: self.zero });
        }
        Ok(())
    }
}

fn divides(key: &'static str, value: usize, total: usize, of: &str) -> Result<(), LayoutError> {
    if total.is_multiple_of(value) {
        return Ok(());
    }
    Err(LayoutError::NotADivisor { key, value, of: of.to_string(), nearest: Nearest::divisors(value, total) })
}

/// The closest legal values below and above one that was refused; shown as `2, 4`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nearest(pub Vec<usize>);

impl Nearest {
    /// The closest divisors of `total` below and above `value`.
    pub fn divisors(value: usize, total: usize) -> Self {
        Self::where_legal(value, total, |x| total.is_multiple_of(x))
    }

    /// The closest values in `1..=max` below and above `value` that satisfy `legal`, none where they are more than a
    /// million away.
    pub fn where_legal(value: usize, max: usize, legal: impl Fn(usize) -> bool) -> Self {
        const FAR: usize = 1 << 20;
        let below = (1..value.min(max.saturating_add(1))).rev().take(FAR).find(|&x| legal(x));
        let above = (value.saturating_add(1)..=max).take(FAR).find(|&x| legal(x));
        Self(below.into_iter().chain(above).collect())
    }
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [] => f.write_str("none"),
            values => f.write_str(&values.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// Why a layout cannot be laid over the ranks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum LayoutError {
    /// A size is zero.
    #[error("{key} 0 is not a number of ranks; nearest legal: 1")]
    Zero { key: &'static str },
    /// A size does not divide the ranks that are there for it.
    #[error("{key} {value} does not divide {of}; nearest legal: {nearest}")]
    NotADivisor { key: &'static str, value: usize, of: String, nearest: Nearest },
    /// Model chunks per stage without stages.
    #[error("virtual-pipeline {vpp} needs pipeline-parallel 2 or more; with pipeline-parallel 1 the nearest legal: 1")]
    VirtualWithoutPipeline { vpp: usize },
    /// An unknown ZeRO stage.
    #[error("zero {zero} is not a stage; nearest legal: 3")]
    ZeroStage { zero: u8 },
    /// Groups of ZeRO without ZeRO.
    #[error("zero-group {group} needs zero 1, 2 or 3: with zero 0 nothing is sharded; nearest legal: zero 1")]
    GroupWithoutZero { group: usize },
    /// The groups of ZeRO do not divide the ranks that hold the same experts.
    #[error(
        "zero-group {group} makes {groups} groups, and each holds whole experts: {groups} must divide the {experts} \
         ranks that hold the same experts; nearest legal: {nearest}"
    )]
    ZeroGroupOfExperts { group: usize, groups: usize, experts: usize, nearest: Nearest },
    /// A layout in words has the same one twice.
    #[error("{name} is twice in a layout; leave one out")]
    Twice { name: String },
    /// A layout in words, such as `TP2 SP DP2`, has a word that is none of them.
    #[error(
        "`{word}` is not a part of a layout; use TP, CP, EP, ETP, PP, VPP, DP with a size, SP, ZeRO1 to ZeRO3, or Group \
         with the size of ZeRO's groups"
    )]
    Word { word: String },
}
