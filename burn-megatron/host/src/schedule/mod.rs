//! Pipeline schedules as data: for every pipeline rank the list of what it does in a step.
//!
//! Nothing here computes, waits or sends: no tensors, no threads. The engine walks through its rank's list.
//!
//! - [`ScheduleSpec`] says which schedule is wanted, [`Schedule::new`] makes the lists. A [`Schedule`] is also read from
//!   text and written as text, one line of passes per rank.
//! - [`Schedule::check`] proves that they are complete and ordered, that every send meets its receive, and that they
//!   cannot deadlock even with sends that block. [`Schedule::posted`] are the lists with receives ahead of time.
//! - [`simulate()`] plays them with given durations; [`Timeline`] has the bubble, [`Schedule::peak_activations`] the
//!   activations in flight; [`bounds`] has the formulas they are tested against.
//! - [`dynamic_context`] assigns sequences of unequal lengths to ranks that hold the same weights.
//! - [`stages`] divides layers over stages; [`draw`] draws a timeline as text or SVG.
//!
//! A model is split into `pipeline × virtual pipeline` stages, which are assigned to the ranks by a [`Placement`].

mod action;
pub mod bounds;
mod build;
mod check;
mod config;
pub mod draw;
pub mod dynamic_context;
mod effort;
mod fault;
mod from_text;
mod inputs;
mod orders;
mod placement;
mod posted;
mod simulate;
mod spec;
pub mod stages;
#[cfg(test)]
mod tests;
mod text;
mod timeline;

pub use action::{Action, Pass, Payload, Transfer, Work};
pub use config::{AUTO, PipelineConfig, PipelineError};
pub use effort::Effort;
pub use fault::Fault;
pub use inputs::Input;
pub use placement::Placement;
pub use simulate::{Costs, Link, simulate};
pub use spec::{ScheduleError, ScheduleKind, ScheduleSpec};
pub use text::ScheduleTextError;
pub use timeline::{Span, Ticks, Timeline};

/// What every pipeline rank does in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What was asked for.
    pub spec: ScheduleSpec,
    /// The list of each pipeline rank.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// Where the stages are.
    pub fn placement(&self) -> Placement {
        self.spec.placement()
    }

    /// The passes of a rank, without what is between them.
    pub fn passes(&self, rank: usize) -> impl Iterator<Item = Work> {
        self.ranks[rank].iter().filter_map(|action| match action {
            Action::Compute(work) => Some(*work),
            _ => None,
        })
    }

    /// The most activations that each rank holds at once, from a forward until its last backward pass. `weight` is
    /// what a stage's activations of one micro-batch count, for example 1, its layers or its bytes.
    pub fn peak_activations(&self, weight: impl Fn(usize) -> u64) -> Vec<u64> {
        let peak = |rank: usize| {
            let (mut kept, mut peak) = (0, 0);
            for work in self.passes(rank) {
                let weight = weight(self.placement().stage(rank, work.chunk));
                if work.pass == Pass::Forward {
                    kept += weight;
                    peak = peak.max(kept);
                }
                if work.pass.frees_activations() || self.spec.forward_only {
                    kept -= weight;
                }
            }
            peak
        };
        (0..self.ranks.len()).map(peak).collect()
    }

    /// The most tensors that each rank has received, or is receiving, and not used yet.
    pub fn peak_received(&self) -> Vec<usize> {
        let peak = |rank: usize| {
            let (mut waiting, mut peak) = (0, 0);
            for action in &self.ranks[rank] {
                match action {
                    Action::Recv(_) => waiting += 1,
                    Action::Compute(work) if matches!(self.input(rank, *work), Some(Input::Remote(_))) => waiting -= 1,
                    _ => {}
                }
                peak = peak.max(waiting);
            }
            peak
        };
        (0..self.ranks.len()).map(peak).collect()
    }
}
