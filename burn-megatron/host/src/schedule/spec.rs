//! Which schedule is wanted, and whether there is one.

use std::fmt;
use std::str::FromStr;

use layouts::mesh::Nearest;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Placement;

/// The schedules.
///
/// ```
/// use host::schedule::ScheduleKind;
///
/// assert_eq!("gpipe".parse(), Ok(ScheduleKind::GPipe));
/// assert!(ScheduleKind::ZbH1.splits_backward());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
pub enum ScheduleKind {
    /// One rank: forward and backward of each micro-batch in turn.
    NoPipeline,
    /// All forwards, then all backwards (arXiv 1811.06965).
    GPipe,
    /// One forward, one backward (PipeDream-Flush; arXiv 2104.04473 section 2.2).
    OneFOneB,
    /// 1F1B over several chunks per rank (arXiv 2104.04473 section 2.2).
    Interleaved,
    /// 1F1B with the weight gradients moved into the bubble (arXiv 2401.10241 section 2.1).
    ZbH1,
    /// Two chunks per rank in a V, weight gradients in the bubble (arXiv 2401.10241 section 6).
    ZbV,
}

impl ScheduleKind {
    /// Every schedule.
    pub const ALL: [ScheduleKind; 6] = [
        ScheduleKind::NoPipeline,
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
    ];

    /// As it is written on the command line and in configurations.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleKind::NoPipeline => "none",
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneFOneB => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZbH1 => "zb-h1",
            ScheduleKind::ZbV => "zb-v",
        }
    }

    /// Whether the backward pass is two actions, input gradient and weight gradients.
    pub fn splits_backward(self) -> bool {
        matches!(self, ScheduleKind::ZbH1 | ScheduleKind::ZbV)
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<ScheduleKind> for &'static str {
    fn from(kind: ScheduleKind) -> Self {
        kind.name()
    }
}

impl TryFrom<String> for ScheduleKind {
    type Error = ScheduleError;

    fn try_from(text: String) -> Result<Self, ScheduleError> {
        text.parse()
    }
}

impl FromStr for ScheduleKind {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let same = |kind: &ScheduleKind| kind.name().eq_ignore_ascii_case(text);
        ScheduleKind::ALL.into_iter().find(same).ok_or_else(|| ScheduleError::Name { value: text.to_string() })
    }
}

/// A wanted schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleSpec {
    /// Which one.
    pub kind: ScheduleKind,
    /// Ranks that the layers are divided over.
    pub pipeline_parallel: usize,
    /// Model chunks per rank.
    pub virtual_pipeline: usize,
    /// Micro-batches per step.
    pub micro_batches: usize,
    /// Interleaved only: consecutive micro-batches of a chunk before the next chunk takes them (Megatron's
    /// `--microbatch-group-size-per-virtual-pipeline-stage`). `None` is Megatron's default, the pipeline size.
    pub group_size: Option<usize>,
    /// Only the forward passes, for evaluation.
    pub forward_only: bool,
}

impl ScheduleSpec {
    /// A schedule with the chunks per rank that it has by itself: 2 for [`ScheduleKind::ZbV`], otherwise 1.
    pub fn new(kind: ScheduleKind, pipeline_parallel: usize, micro_batches: usize) -> Self {
        let virtual_pipeline = if kind == ScheduleKind::ZbV { 2 } else { 1 };
        Self { kind, pipeline_parallel, virtual_pipeline, micro_batches, group_size: None, forward_only: false }
    }

    /// With so many chunks per rank. 1F1B with several chunks is the interleaved schedule.
    pub fn with_virtual_pipeline(mut self, chunks: usize) -> Self {
        self.virtual_pipeline = chunks;
        if self.kind == ScheduleKind::OneFOneB && chunks > 1 {
            self.kind = ScheduleKind::Interleaved;
        }
        self
    }

    /// With so many micro-batches per group; only for the interleaved schedule.
    pub fn with_group_size(mut self, group_size: usize) -> Self {
        self.group_size = Some(group_size);
        self
    }

    /// Only the forward passes.
    pub fn forward_only(mut self) -> Self {
        self.forward_only = true;
        self
    }

    /// Where the stages are.
    pub fn placement(&self) -> Placement {
        match self.kind {
            ScheduleKind::ZbV => Placement::V { ranks: self.pipeline_parallel },
            _ => Placement::Loop { ranks: self.pipeline_parallel, chunks: self.virtual_pipeline },
        }
    }

    /// Micro-batches per group of the interleaved schedule.
    pub fn group(&self) -> usize {
        self.group_size.unwrap_or(self.pipeline_parallel)
    }

    /// Checks that there is such a schedule.
    ///
    /// # Errors
    /// Names the key, its value and the nearest legal one.
    pub fn check(&self) -> Result<(), ScheduleError> {
        let sizes = [
            ("pipeline-parallel", self.pipeline_parallel),
            ("virtual-pipeline", self.virtual_pipeline),
            ("micro-batches", self.micro_batches),
            ("microbatch-group-size", self.group_size.unwrap_or(1)),
        ];
        if let Some((key, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ScheduleError::Zero { key });
        }
        let (kind, ranks) = (self.kind, self.pipeline_parallel);
        let needs_pipeline = matches!(kind, ScheduleKind::Interleaved | ScheduleKind::ZbV);
        if (kind == ScheduleKind::NoPipeline && ranks > 1) || (needs_pipeline && ranks < 2) {
            return Err(ScheduleError::Ranks { kind, ranks, nearest: if needs_pipeline { 2 } else { 1 } });
        }
        let (chunks, nearest) = match kind {
            ScheduleKind::Interleaved => (self.virtual_pipeline >= 2, 2),
            ScheduleKind::ZbV => (self.virtual_pipeline == 2, 2),
            _ => (self.virtual_pipeline == 1, 1),
        };
        if !chunks {
            return Err(ScheduleError::Chunks { kind, chunks: self.virtual_pipeline, nearest });
        }
        match self.group_size {
            Some(_) if kind != ScheduleKind::Interleaved => Err(ScheduleError::GroupUnused { kind }),
            _ if kind == ScheduleKind::Interleaved => self.check_group(),
            _ => Ok(()),
        }
    }

    /// Megatron's rule: a group of fewer micro-batches than ranks, the last one too, would wait for itself.
    fn check_group(&self) -> Result<(), ScheduleError> {
        let (ranks, micro_batches, group) = (self.pipeline_parallel, self.micro_batches, self.group());
        let legal = |group: usize, micro_batches: usize| {
            let last = micro_batches % group;
            (ranks..=micro_batches).contains(&group) && (last == 0 || last >= ranks)
        };
        if legal(group, micro_batches) {
            return Ok(());
        }
        let groups = Nearest::where_legal(group, micro_batches, |group| legal(group, micro_batches));
        let totals = Nearest::where_legal(micro_batches, micro_batches + group + ranks, |total| legal(group, total));
        Err(ScheduleError::Group { group, ranks, micro_batches, groups, totals })
    }
}

/// Why there is no such schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are the values in the messages")]
pub enum ScheduleError {
    /// A size is zero.
    #[error("{key} 0 is no size; nearest legal: 1")]
    Zero { key: &'static str },
    /// Not the name of a schedule.
    #[error("schedule `{value}` is unknown; legal: none, gpipe, 1f1b, interleaved, zb-h1, zb-v")]
    Name { value: String },
    /// A pipeline where there is none, or none where there must be one.
    #[error("pipeline-parallel {ranks} does not fit schedule {kind}; nearest legal: {nearest}")]
    Ranks { kind: ScheduleKind, ranks: usize, nearest: usize },
    /// A number of chunks that the schedule does not have.
    #[error("virtual-pipeline {chunks} does not fit schedule {kind}; nearest legal: {nearest}")]
    Chunks { kind: ScheduleKind, chunks: usize, nearest: usize },
    /// A group size for a schedule without groups.
    #[error("microbatch-group-size has no meaning in schedule {kind}; it belongs to schedule interleaved")]
    GroupUnused { kind: ScheduleKind },
    /// Micro-batches and groups that do not fit.
    #[error(
        "microbatch-group-size {group} with {micro_batches} micro-batches leaves a group of fewer micro-batches than \
         pipeline-parallel {ranks}; nearest legal: microbatch-group-size {groups}, or micro-batches {totals}"
    )]
    Group { group: usize, ranks: usize, micro_batches: usize, groups: Nearest, totals: Nearest },
}

#[cfg(test)]
mod tests {
    use super::*;
    use ScheduleKind::{GPipe, Interleaved, NoPipeline, OneFOneB, ZbH1, ZbV};

    fn error(spec: ScheduleSpec) -> String {
        spec.check().unwrap_err().to_string()
    }

    #[test]
    fn names_read_back() {
        for kind in ScheduleKind::ALL {
            assert_eq!(kind.name().to_uppercase().parse(), Ok(kind));
        }
        assert!("zb".parse::<ScheduleKind>().unwrap_err().to_string().contains("zb-h1, zb-v"));
    }

    #[test]
    fn several_chunks_make_1f1b_interleaved() {
        assert_eq!(ScheduleSpec::new(OneFOneB, 2, 4).with_virtual_pipeline(2).kind, Interleaved);
        assert_eq!(ScheduleSpec::new(OneFOneB, 2, 4).with_virtual_pipeline(1).kind, OneFOneB);
    }

    #[test]
    fn what_does_not_fit_is_named_with_the_nearest() {
        for (spec, words) in [
            (ScheduleSpec::new(OneFOneB, 0, 4), "pipeline-parallel 0"),
            (ScheduleSpec::new(OneFOneB, 4, 0), "micro-batches 0"),
            (ScheduleSpec::new(NoPipeline, 2, 4), "pipeline-parallel 2 does not fit schedule none; nearest legal: 1"),
            (ScheduleSpec::new(ZbV, 1, 4), "pipeline-parallel 1 does not fit schedule zb-v; nearest legal: 2"),
            (ScheduleSpec::new(ZbV, 2, 4).with_virtual_pipeline(3), "virtual-pipeline 3"),
            (ScheduleSpec::new(GPipe, 2, 4).with_virtual_pipeline(2), "virtual-pipeline 2"),
            (ScheduleSpec::new(Interleaved, 2, 4), "virtual-pipeline 1 does not fit"),
            (ScheduleSpec::new(ZbH1, 2, 4).with_group_size(2), "microbatch-group-size has no meaning"),
        ] {
            let error = error(spec);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn groups_follow_megatrons_rule() {
        let spec = |micro_batches| ScheduleSpec::new(Interleaved, 4, micro_batches).with_virtual_pipeline(2);
        assert!(spec(8).check().is_ok());
        assert!(spec(9).with_group_size(5).check().is_ok(), "the last group has 4");
        let message = error(spec(10));
        assert!(message.contains("microbatch-group-size 4 with 10 micro-batches"), "{message}");
        assert!(message.contains("nearest legal: microbatch-group-size 5, or micro-batches 8, 12"), "{message}");
        assert!(error(spec(8).with_group_size(3)).contains("nearest legal: microbatch-group-size 4"));
        assert!(error(spec(8).with_group_size(9)).contains("nearest legal: microbatch-group-size 8"));
        assert!(error(spec(2)).contains("microbatch-group-size none, or micro-batches 4"));
    }
}
