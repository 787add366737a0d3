//! Draws a timeline, simulated or measured: as text for a terminal, as SVG for a page.

mod svg;
#[cfg(test)]
mod tests;
mod text;

pub use svg::{escape, svg};
pub use text::{Colors, text};

use super::{Action, Pass, Span, Ticks, Timeline, Work};

/// The passes of a rank with their times, and nothing between them.
fn passes(spans: &[Span]) -> impl Iterator<Item = (Work, Ticks, Ticks)> {
    spans.iter().filter_map(|span| match span.action {
        Action::Compute(work) if span.end > span.start => Some((work, span.start, span.end)),
        _ => None,
    })
}

/// What the legend and the scale need to know of a timeline.
struct Extent {
    /// The passes that occur, in the order of [`Pass`].
    kinds: Vec<Pass>,
    chunks: usize,
    /// Digits of the largest micro-batch number.
    digits: usize,
    /// The shortest pass.
    shortest: Ticks,
    makespan: Ticks,
}

impl Extent {
    fn of(timeline: &Timeline) -> Self {
        let all = || timeline.ranks.iter().flat_map(|spans| passes(spans));
        let mut kinds: Vec<Pass> = all().map(|(work, ..)| work.pass).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let last = all().map(|(work, ..)| work.micro_batch).max().unwrap_or(0);
        Self {
            kinds,
            chunks: all().map(|(work, ..)| work.chunk + 1).max().unwrap_or(1),
            digits: last.to_string().len(),
            shortest: all().map(|(_, start, end)| end - start).min().unwrap_or(1),
            makespan: timeline.makespan().max(1),
        }
    }
}
