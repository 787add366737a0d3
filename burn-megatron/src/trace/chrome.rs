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
    /// What stands beside the lane, for example `rank 3 (pp 1, tp 1)`.
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
struct Place {
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
        for (track, suffix) in [(Track::Host, ""), (Track::Device, ", device"), (Track::Beside, ", beside")] {
            let spans = || lane.steps.iter().flat_map(|(_, spans)| spans);
            if track != Track::Host && !spans().any(|span| span.track == track) {
                continue;
            }
            let tid = thread(lane, track);
            about(&mut list, "thread_name", tid, &format!("{}{suffix}", lane.name))?;
            let args = SortIndex { sort_index: 3 * lane.rank + track as usize };
            let event = Event { name: "thread_sort_index", cat: None, ph: "M", pid, tid, ts: None, dur: None, args };
            list.event(&event)?;
        }
        for (step, spans) in &lane.steps {
            for span in spans {
                list.event(&complete(lane, *step, span))?;
            }
        }
    }
    out.write_all(b"\n]}\n")
}

/// The rank, in the millions for what is not its host.
fn thread(lane: &Lane, track: Track) -> usize {
    1_000_000 * track as usize + lane.rank
}

fn complete<'a>(lane: &Lane, step: u64, span: &Span) -> Event<'a, Place> {
    // Both ends are rounded alike, so that spans that nest in nanoseconds still do in microseconds.
    let micros = |nanos: u64| nanos as f64 / 1e3;
    Event {
        name: span.what.name(),
        cat: Some(span.what.category().name()),
        ph: "X",
        pid: lane.process,
        tid: thread(lane, span.track),
        ts: Some(micros(span.start)),
        dur: Some(micros(span.end - span.start)),
        args: Place { step, chunk: span.chunk, micro_batch: span.micro_batch },
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
