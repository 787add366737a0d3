//! How much of a rank's collectives ran while it computed. Pure.

use super::{Category, Lane, Span, Track};
use std::fmt;
use std::path::{Path, PathBuf};

/// Time of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Nanoseconds in which at least one ran.
    pub total: u64,
    /// Of these, nanoseconds in which the rank computed.
    pub hidden: u64,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = 100.0 * self.hidden as f64 / self.total.max(1) as f64;
        write!(f, "{:.1} ms, {share:.0} % under compute", self.total as f64 / 1e6)
    }
}

/// Collectives of one rank: those of all tracks together, and each track that has some.
///
/// The rank computes where its device does a pass, an update or anything else that is no collective, and does not wait
/// for one. A rank without a device communicates on its own thread, so nothing is hidden.
pub fn overlaps(spans: &[Span]) -> (Overlap, Vec<(Track, Overlap)>) {
    let of = |wanted: &dyn Fn(&Span) -> bool| -> Vec<(u64, u64)> {
        union(spans.iter().filter(|span| wanted(span)).map(|span| (span.start, span.end)))
    };
    if !spans.iter().any(|span| span.track == Track::Device) {
        let total = length(&of(&|span| span.kind.category() == Category::Communication));
        return (Overlap { total, hidden: 0 }, Vec::new());
    }
    let works = |span: &Span| matches!(span.kind.category(), Category::Compute | Category::Optimizer);
    let busy = of(&|span| span.track == Track::Device && works(span));
    let waits = of(&|span| span.track == Track::Device && span.kind.category() == Category::Other);
    let computes = without(&busy, &waits);
    let overlap = |collectives: Vec<(u64, u64)>| Overlap {
        total: length(&collectives),
        hidden: length(&collectives) - length(&without(&collectives, &computes)),
    };
    let tracks = Track::ALL.into_iter().filter(|track| track.is_overlapped());
    let by_track = tracks.map(|track| (track, overlap(of(&|span| span.track == track))));
    (overlap(of(&|span| span.track.is_overlapped())), by_track.filter(|(_, overlap)| overlap.total > 0).collect())
}

/// [`overlaps`] in a line; `None` without collectives.
pub fn summary(spans: &[Span]) -> Option<String> {
    let (all, by_track) = overlaps(spans);
    let parts: Vec<String> = by_track.iter().map(|(track, overlap)| format!("{} {overlap}", track.name())).collect();
    let parts = if parts.len() > 1 { format!(" ({})", parts.join("; ")) } else { String::new() };
    (all.total > 0).then(|| format!("collectives {all}{parts}"))
}

/// A line for each lane and step with collectives.
pub fn summaries(lanes: &[Lane]) -> String {
    let of_lane = |lane: &Lane| -> Vec<String> {
        let line = |(step, spans): &(u64, Vec<Span>)| {
            summary(spans).map(|text| format!("step {step}, {}: {text}\n", lane.name))
        };
        lane.steps.iter().filter_map(line).collect()
    };
    lanes.iter().flat_map(of_lane).collect()
}

/// Where the [`summaries`] of a timeline are written: `trace.json.txt` for `trace.json`.
pub fn summary_file(timeline: &Path) -> PathBuf {
    let mut name = timeline.as_os_str().to_owned();
    name.push(".txt");
    name.into()
}

/// The same instants in intervals that do not touch, in order.
fn union(intervals: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = intervals.filter(|(start, end)| start < end).collect();
    all.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::with_capacity(all.len());
    for (start, end) in all {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

/// What of `a` is not in `b`; both are unions.
fn without(a: &[(u64, u64)], b: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut left = Vec::with_capacity(a.len());
    let mut first = 0;
    for &(start, end) in a {
        let mut from = start;
        while first < b.len() && b[first].1 <= start {
            first += 1;
        }
        for &(hole, until) in b[first..].iter().take_while(|hole| hole.0 < end) {
            if from < hole {
                left.push((from, hole));
            }
            from = from.max(until);
        }
        if from < end {
            left.push((from, end));
        }
    }
    left
}

fn length(union: &[(u64, u64)]) -> u64 {
    union.iter().map(|(start, end)| end - start).sum()
}

#[cfg(test)]
mod tests {
    use super::super::SpanKind;
    use super::*;
    use proptest::prelude::*;

    fn span(kind: SpanKind, track: Track, start: u64, end: u64) -> Span {
        Span { kind, chunk: None, micro_batch: None, start, end, track }
    }

    #[test]
    fn only_what_overlaps_with_work_is_hidden() {
        let spans = [
            span(SpanKind::Forward, Track::Host, 0, 1),
            span(SpanKind::Forward, Track::Device, 0, 100),
            // Inside the pass the device is idle.
            span(SpanKind::Wait, Track::Device, 40, 60),
            span(SpanKind::Receive, Track::Device, 100, 120),
            span(SpanKind::Norm, Track::Device, 120, 130),
            span(SpanKind::GatherParameters, Track::Gathers, 30, 60),
            span(SpanKind::Receive, Track::Receives, 90, 125),
            span(SpanKind::Send, Track::Sends, 95, 97),
        ];
        let (all, tracks) = overlaps(&spans);
        assert_eq!(all, Overlap { total: 30 + 35, hidden: 10 + 10 + 5 });
        let expected = [
            (Track::Gathers, Overlap { total: 30, hidden: 10 }),
            (Track::Sends, Overlap { total: 2, hidden: 2 }),
            (Track::Receives, Overlap { total: 35, hidden: 15 }),
        ];
        assert_eq!(tracks, expected);
        let line = summary(&[
            span(SpanKind::Forward, Track::Device, 0, 3_000_000),
            span(SpanKind::Send, Track::Sends, 0, 1_500_000),
        ]);
        assert_eq!(line.as_deref(), Some("collectives 1.5 ms, 100 % under compute"));
        assert!(summary(&spans).unwrap().contains("(gathers of weights 0.0 ms, 33 % under compute; sends"));
    }

    #[test]
    fn a_rank_without_a_device_hides_nothing() {
        let spans =
            [span(SpanKind::Forward, Track::Host, 0, 100), span(SpanKind::GatherParameters, Track::Host, 10, 30)];
        assert_eq!(overlaps(&spans), (Overlap { total: 20, hidden: 0 }, Vec::new()));
        assert_eq!(summary(&spans[..1]), None);
        let steps = vec![(3, spans.to_vec()), (4, Vec::new())];
        let lanes = [Lane { process: 0, rank: 1, name: "rank 1 (pp 1)".into(), steps }];
        assert_eq!(summaries(&lanes), "step 3, rank 1 (pp 1): collectives 0.0 ms, 0 % under compute\n");
    }

    proptest! {
        /// Against a bit per instant.
        #[test]
        fn intervals_are_sets_of_instants(
            a in prop::collection::vec((0_u64..60, 0_u64..12), 0..12),
            b in prop::collection::vec((0_u64..60, 0_u64..12), 0..12),
        ) {
            let set = |list: &[(u64, u64)]| union(list.iter().map(|&(start, len)| (start, start + len)));
            let has = |list: &[(u64, u64)], at: u64| list.iter().any(|&(start, len)| (start..start + len).contains(&at));
            let left = without(&set(&a), &set(&b));
            let count = (0..80).filter(|&at| has(&a, at) && !has(&b, at)).count();
            prop_assert_eq!(length(&left), count as u64);
            prop_assert_eq!(length(&set(&a)), (0..80).filter(|&at| has(&a, at)).count() as u64);
        }
    }
}
