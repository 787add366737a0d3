//! Chrome's trace event format, which <https://ui.perfetto.dev> and `chrome://tracing` open.
//!
//! Format: "Trace Event Format", Google, 2016: complete events (`ph: "X"`) with times in microseconds, and metadata
//! events (`ph: "M"`) that name processes and threads.

use std::io::{self, Write};

use serde::Serialize;

use super::{Span, Track};

/// The timeline of one rank.
#[derive(Clone, Debug)]
pub struct Lane {
    /// Number of the process that the rank runs in, 0 where all ranks are threads of one.
    pub process: usize,
    /// Global rank.
    pub rank: usize,
    /// The label of the lane, for example `rank 3 (pp 1, tp 1)`.
    pub name: String,
    /// Numbers of steps and what was noted in each.
    pub steps: Vec<(u64, Vec<Span>)>,
}

#[derive(Serialize)]
struct Event<'a, A> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'a str>,
    ph: &'static str,
    pid: usize,
    tid: usize,
    /// Microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: A,
}

#[derive(Serialize)]
struct Name<'a> {
    name: &'a str,
}

#[derive(Serialize)]
struct SortIndex {
    sort_index: usize,
}

#[derive(Serialize)]
struct SpanArgs {
    step: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    chunk: Option<usize>,
    #[serde(rename = "micro-batch", skip_serializing_if = "Option::is_none")]
    micro_batch: Option<usize>,
}

/// Writes the lanes as one JSON object, an event per line.
///
/// # Errors
/// When `out` refuses.
pub fn write_chrome(out: &mut dyn Write, lanes: &[Lane]) -> io::Result<()> {
    out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut list = List { out, first: true };
    let mut named = Vec::new();
    for lane in lanes {
        let pid = lane.process;
        let about = |list: &mut List, name, tid, value: &str| {
            let args = Name { name: value };
            list.event(&Event { name, cat: None, ph: "M", pid, tid, ts: None, dur: None, args })
        };
        if !named.contains(&pid) {
            named.push(pid);
            about(&mut list, "process_name", lane.rank, &format!("process {pid}"))?;
        }
        for track in Track::ALL {
            let spans = lane.steps.iter().flat_map(|(step, spans)| spans.iter().map(move |span| (*step, span)));
            let spans: Vec<_> = spans.filter(|(_, span)| span.track == track).collect();
            let lines = if track.is_overlapped() { lines(&spans) } else { vec![0; spans.len()] };
            let count = match lines.iter().max() {
                None if track != Track::Host => continue,
                most => most.map_or(1, |most| most + 1),
            };
            for line in 0..count {
                let suffix = match (track, line) {
                    (Track::Host, _) => String::new(),
                    (_, 0) => format!(", {}", track.name()),
                    _ => format!(", {} ({})", track.name(), line + 1),
                };
                let tid = thread(lane, track, line);
                about(&mut list, "thread_name", tid, &format!("{}{suffix}", lane.name))?;
                let args = SortIndex { sort_index: (Track::ALL.len() * lane.rank + track as usize) * LINES + line };
                let event =
                    Event { name: "thread_sort_index", cat: None, ph: "M", pid, tid, ts: None, dur: None, args };
                list.event(&event)?;
            }
            for ((step, span), line) in spans.into_iter().zip(lines) {
                list.event(&complete(lane, line, step, span))?;
            }
        }
    }
    out.write_all(b"\n]}\n")
}

/// The most lines of a track: a rank has two neighbours in a pipeline.
const LINES: usize = 4;

/// The rank, in the millions for what is not its host.
fn thread(lane: &Lane, track: Track, line: usize) -> usize {
    1_000_000 * (LINES * track as usize + line) + lane.rank
}

/// By span, its line in a track: the first where nothing else is then. Collectives of several groups run at the same
/// time, which a line cannot show.
fn lines(spans: &[(u64, &Span)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|&index| spans[index].1.start);
    let (mut ends, mut lines) = ([0; LINES], vec![0; spans.len()]);
    for index in order {
        let Span { start, end, .. } = *spans[index].1;
        let line = ends.iter().position(|free| *free <= start).unwrap_or(LINES - 1);
        (lines[index], ends[line]) = (line, end);
    }
    lines
}

fn complete<'a>(lane: &Lane, line: usize, step: u64, span: &Span) -> Event<'a, SpanArgs> {
    // Both ends are rounded alike, so that spans that nest in nanoseconds still do in microseconds.
    let micros = |nanos: u64| nanos as f64 / 1e3;
    Event {
        name: span.kind.name(),
        cat: Some(span.kind.category().name()),
        ph: "X",
        pid: lane.process,
        tid: thread(lane, span.track, line),
        ts: Some(micros(span.start)),
        dur: Some(micros(span.end - span.start)),
        args: SpanArgs { step, chunk: span.chunk, micro_batch: span.micro_batch },
    }
}

struct List<'a> {
    out: &'a mut dyn Write,
    first: bool,
}

impl List<'_> {
    fn event(&mut self, event: &impl Serialize) -> io::Result<()> {
        self.out.write_all(if self.first { b"\n" } else { b",\n" })?;
        self.first = false;
        serde_json::to_writer(&mut *self.out, event).map_err(io::Error::from)
    }
}
