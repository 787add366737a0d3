//! How much of a step was spent computing.

use super::{Category, Span, Track, What};
use crate::schedule::{Costs, Placement};

/// A host that only issues work says nothing of how long it takes: the device's spans, if there are any.
fn decisive(spans: &[Span]) -> impl Iterator<Item = &Span> {
    let by_device = spans.iter().any(|span| span.track == Track::Device);
    let track = if by_device { Track::Device } else { Track::Host };
    spans.iter().filter(move |span| span.track == track)
}

/// Nanoseconds of one rank's spans in which it computed: the innermost span decides, so a message inside a pass is not
/// computing and a recomputation inside a backward is counted once. The spans must nest.
pub fn busy(spans: &[Span]) -> u64 {
    let mut sorted: Vec<&Span> = decisive(spans).collect();
    // Outer spans first where several begin together.
    sorted.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
    let mut total = 0;
    let mut open: Vec<&Span> = Vec::new();
    let computes = |span: &Span| span.what.category() == Category::Compute;
    for span in sorted {
        while open.pop_if(|outer| outer.end <= span.start).is_some() {}
        let length = span.end - span.start;
        // What lies inside another span replaces a piece of it.
        if let Some(outer) = open.last().filter(|outer| computes(outer)) {
            total -= span.end.min(outer.end) - span.start;
        }
        if computes(span) {
            total += length;
        }
        open.push(span);
    }
    total
}

/// The share of a step in which the ranks of a pipeline did not compute, all together, from the first beginning to the
/// last end of a computation on any of them. The simulated one is
/// [`Timeline::idle_share`](crate::schedule::Timeline::idle_share). `None` where nobody computed.
pub fn idle_share(ranks: &[&[Span]]) -> Option<f64> {
    let computing =
        || ranks.iter().flat_map(|spans| decisive(spans)).filter(|span| span.what.category() == Category::Compute);
    let start = computing().map(|span| span.start).min()?;
    let end = computing().map(|span| span.end).max()?;
    let all = (end - start) * ranks.len() as u64;
    let computed: u64 = ranks.iter().map(|spans| busy(spans)).sum();
    (all > 0).then(|| 1.0 - computed as f64 / all as f64)
}

/// The mean duration of each stage's passes in nanoseconds, for the simulator. `ranks` are the spans of one pipeline. A
/// simulation with these durations has the bubble of the schedule and of unequal stages; what the bubble as seen has
/// beyond that is the price of messages, and of passes that did not always take the same time.
pub fn measured_costs(placement: Placement, ranks: &[&[Span]]) -> Costs {
    let mean = |stage: usize, what: What| {
        let (rank, chunk) = placement.holder(stage);
        let passes = || decisive(ranks[rank]).filter(move |span| span.what == what && span.chunk == Some(chunk));
        let total: u64 = passes().map(|span| span.end - span.start).sum();
        total.checked_div(passes().count() as u64)
    };
    let of_stages = |costs: &dyn Fn(usize) -> u64| (0..placement.stages()).map(costs).collect();
    Costs {
        forward: of_stages(&|stage| mean(stage, What::Forward).unwrap_or(0)),
        // Where backward passes are whole, their halves are not known, and no schedule asks for them.
        backward_input: of_stages(&|stage| {
            mean(stage, What::BackwardInput).or_else(|| mean(stage, What::Backward)).unwrap_or(0)
        }),
        backward_weight: of_stages(&|stage| mean(stage, What::BackwardWeight).unwrap_or(0)),
        transfer: 0,
    }
}
