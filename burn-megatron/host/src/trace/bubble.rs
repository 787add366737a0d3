//! How much of a step was spent computing.

use super::{Category, Span, Track};

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
    let computes = |span: &Span| span.kind.category() == Category::Compute;
    for span in sorted {
        while open.pop_if(|outer| outer.end <= span.start).is_some() {}
        let length = span.end - span.start;
        // What lies inside another span replaces an interval of it.
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
        || ranks.iter().flat_map(|spans| decisive(spans)).filter(|span| span.kind.category() == Category::Compute);
    let start = computing().map(|span| span.start).min()?;
    let end = computing().map(|span| span.end).max()?;
    let all = (end - start) * ranks.len() as u64;
    let computed: u64 = ranks.iter().map(|spans| busy(spans)).sum();
    (all > 0).then(|| 1.0 - computed as f64 / all as f64)
}
