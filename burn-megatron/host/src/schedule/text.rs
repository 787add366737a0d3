//! Schedules as text: a line per rank, a word per pass, as PyTorch's pipeline schedules are written.
//!
//! `2F0` is the forward pass of micro-batch 0 through stage 2; `B` is a whole backward pass, `I` its input gradient and
//! `W` its weight gradients (`torch/distributed/pipelining/schedules.py`, `_Action`). Stages are numbered in the order of
//! the layers. Only passes are written: transfers, gradient reductions and the step follow from them.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::{Fault, Pass, Placement, Schedule, ScheduleKind, ScheduleSpec, Work};

/// Why a text is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are the values in the messages")]
pub enum ScheduleTextError {
    /// There are no passes.
    #[error("no passes; a schedule has a line per rank, for example `0F0 0F1 0B0 0B1`")]
    Empty,
    /// A word is no pass.
    #[error(
        "line {line}: `{word}` is no pass; a pass is a stage, one of F, B, I and W, and a micro-batch, for example 2F0"
    )]
    Word { line: usize, word: String },
    /// There are more stages and micro-batches than passes.
    #[error(
        "{passes} passes are too few for stages 0 to {stage} and micro-batches 0 to {micro_batch}: each stage needs a \
         forward pass of each micro-batch; the largest stage and micro-batch of a schedule of n and m are n - 1 and m - 1"
    )]
    Few { passes: usize, stage: usize, micro_batch: usize },
    /// The stages cannot be divided over the ranks.
    #[error("{stages} stages are not divided equally over {ranks} ranks (lines); nearest legal: {nearest} stages")]
    Stages { stages: usize, ranks: usize, nearest: usize },
    /// A rank has a stage of another rank.
    #[error(
        "rank {rank} runs stage {stage}, which belongs to rank {holder}: stage s is on rank s % {ranks}, or, with two \
         stages per rank, the stages go down the ranks and up again"
    )]
    Placement { rank: usize, stage: usize, holder: usize, ranks: usize },
    /// The lists cannot be run.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// A pass of a stage.
struct Word {
    pass: Pass,
    stage: usize,
    micro_batch: usize,
}

impl FromStr for Word {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let at = text.find(|c: char| !c.is_ascii_digit()).ok_or(())?;
        let (stage, rest) = text.split_at(at);
        let passes = [Pass::Forward, Pass::Backward, Pass::BackwardInput, Pass::BackwardWeight];
        let pass = passes.into_iter().find(|pass| rest.starts_with(pass.letter())).ok_or(())?;
        let micro_batch = &rest[1..];
        // `+1` is a number to `parse`.
        if !micro_batch.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(());
        }
        let number = |digits: &str| digits.parse().map_err(|_| ());
        Ok(Self { pass, stage: number(stage)?, micro_batch: number(micro_batch)? })
    }
}

/// The passes of all ranks. Empty lines and what follows a `#` are skipped; commas separate too, and what is between two
/// commas may be empty, as in PyTorch's CSV files, where that is time without work.
fn words(text: &str) -> Result<Vec<Vec<Word>>, ScheduleTextError> {
    let mut ranks = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        let words = line.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
        let passes = words.map(|word| {
            word.parse()
                .map_err(|()| ScheduleTextError::Word { line: index + 1, word: word.chars().take(40).collect() })
        });
        let passes: Vec<Word> = passes.collect::<Result<_, _>>()?;
        if !passes.is_empty() {
            ranks.push(passes);
        }
    }
    Ok(ranks)
}

/// Which of the placements the ranks' stages have.
fn placement(ranks: &[Vec<Word>], stages: usize) -> Result<Placement, ScheduleTextError> {
    let count = ranks.len();
    if !stages.is_multiple_of(count) {
        let nearest = (stages / count).max(1) * count;
        return Err(ScheduleTextError::Stages { stages, ranks: count, nearest });
    }
    let chunks = stages / count;
    let foreign = |placement: Placement| {
        let runs = ranks.iter().enumerate().flat_map(|(rank, words)| words.iter().map(move |word| (rank, word.stage)));
        runs.map(|(rank, stage)| (rank, stage, placement.holder(stage).0)).find(|(rank, _, holder)| rank != holder)
    };
    let placements = [Placement::Loop { ranks: count, chunks }, Placement::V { ranks: count }];
    let legal = placements.into_iter().find(|placement| placement.chunks() == chunks && foreign(*placement).is_none());
    legal.ok_or_else(|| {
        let (rank, stage, holder) = foreign(placements[0]).expect("the first placement is not that of the text");
        ScheduleTextError::Placement { rank, stage, holder, ranks: count }
    })
}

impl FromStr for Schedule {
    type Err = ScheduleTextError;

    /// Reads a schedule, and [proves](Schedule::check) it like the built-in ones.
    fn from_str(text: &str) -> Result<Self, ScheduleTextError> {
        let ranks = words(text)?;
        let all = || ranks.iter().flatten();
        let (Some(stage), Some(micro_batch)) =
            (all().map(|word| word.stage).max(), all().map(|word| word.micro_batch).max())
        else {
            return Err(ScheduleTextError::Empty);
        };
        let passes = all().count();
        if stage.saturating_add(1).saturating_mul(micro_batch.saturating_add(1)) > passes {
            return Err(ScheduleTextError::Few { passes, stage, micro_batch });
        }
        let placement = placement(&ranks, stage + 1)?;
        let kind = match placement {
            Placement::V { .. } => ScheduleKind::ZbV,
            Placement::Loop { ranks: 1, chunks: 1 } => ScheduleKind::NoPipeline,
            Placement::Loop { chunks: 1, .. } => ScheduleKind::OneFOneB,
            Placement::Loop { .. } => ScheduleKind::Interleaved,
        };
        let spec = ScheduleSpec {
            virtual_pipeline: placement.chunks(),
            forward_only: all().all(|word| word.pass == Pass::Forward),
            ..ScheduleSpec::new(kind, placement.ranks(), micro_batch + 1)
        };
        let work = |word: &Word| Work {
            pass: word.pass,
            chunk: placement.holder(word.stage).1,
            micro_batch: word.micro_batch,
        };
        let passes: Vec<Vec<Work>> = ranks.iter().map(|words| words.iter().map(work).collect()).collect();
        Ok(Schedule::of_passes(spec, &passes)?)
    }
}

impl fmt::Display for Schedule {
    /// The passes of every rank. What is written reads back as the same lists.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for rank in 0..self.ranks.len() {
            let word = |work: Work| {
                let stage = self.placement().stage(rank, work.chunk);
                format!("{stage}{}{}", work.pass.letter(), work.micro_batch)
            };
            writeln!(f, "{}", self.passes(rank).map(word).collect::<Vec<_>>().join(" "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Action;

    fn error(text: &str) -> String {
        text.parse::<Schedule>().unwrap_err().to_string()
    }

    #[test]
    fn what_is_written_reads_back() {
        for kind in ScheduleKind::ALL {
            for (ranks, micro_batches) in (1..=5).flat_map(|ranks| (1..=9).map(move |count| (ranks, count))) {
                for chunks in 1..=3 {
                    let spec = ScheduleSpec::new(kind, ranks, micro_batches).with_virtual_pipeline(chunks);
                    for spec in [spec, spec.forward_only()] {
                        let Ok(schedule) = Schedule::new(spec) else { continue };
                        let read: Schedule = schedule.to_string().parse().unwrap();
                        assert_eq!(read.ranks, schedule.ranks, "{spec:?}");
                        assert_eq!(read.placement(), schedule.placement(), "{spec:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn words_are_those_of_pytorch() {
        let schedule = Schedule::new(ScheduleSpec::new(ScheduleKind::OneFOneB, 2, 2)).unwrap();
        assert_eq!(schedule.to_string(), "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n");
        // A CSV file with empty cells where a rank waits, and a comment.
        let csv = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,  # the last rank\n\n";
        assert_eq!(csv.parse::<Schedule>().unwrap().ranks, schedule.ranks);
    }

    #[test]
    fn orders_that_no_built_in_schedule_has_are_proven_too() {
        // Weight gradients of one micro-batch apart, the other backward pass whole; the last rank takes 1 before 0.
        let mixed: Schedule = "0F1 0F0 0I1 0B0 0W1\n1F1 1B1 1F0 1I0 1W0".parse().unwrap();
        assert_eq!(mixed.check(), Ok(()));
        // In a V both chunks of the last rank are neighbours: a whole backward pass follows the half of one.
        let v: Schedule = "0F0 3F0 3I0 0B0 3W0\n1F0 2F0 2I0 1B0 2W0".parse().unwrap();
        assert_eq!(v.placement(), Placement::V { ranks: 2 });
        assert!(v.ranks[1].contains(&Action::ReduceGrads { chunk: 1 }));
    }

    #[test]
    fn what_is_no_schedule_is_refused_with_the_reason() {
        for (text, words) in [
            ("", "no passes"),
            ("# 0F0", "no passes"),
            ("0F0 0X0", "line 1: `0X0` is no pass"),
            ("0F0\n\n1F+1", "line 3: `1F+1` is no pass"),
            ("0F99999999999999999999999", "is no pass"),
            ("0F0 0B9999999999", "2 passes are too few for stages 0 to 0 and micro-batches 0 to 9999999999"),
            ("0F0 1F0 2F0\n3F0 4F0", "5 stages are not divided equally over 2 ranks (lines); nearest legal: 4 stages"),
            ("1F0 1B0\n0F0 0B0", "rank 0 runs stage 1, which belongs to rank 1"),
            ("0F0 0B0\n1F0", "rank 1 never does: backward of micro-batch 0 in chunk 0"),
            ("0F0 0B0 0B0", "rank 0 must not do, or not once more: backward of micro-batch 0"),
            ("0F0 0I0", "rank 0 never does: backward, weights of micro-batch 0"),
            ("0B0 0F0", "rank 0 does too early: backward of micro-batch 0"),
            (
                "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0",
                "deadlock: rank 0 waits at: backward of micro-batch 0 in chunk 0; rank 1 waits at: forward of micro-batch 1",
            ),
        ] {
            let error = error(text);
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }
}
