//! One rank's notes of when it did what.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::What;

/// A stretch of one rank's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What it was spent on.
    pub what: What,
    /// Model chunk of this rank, where it concerns one.
    pub chunk: Option<usize>,
    /// Micro-batch, where it concerns one.
    pub micro_batch: Option<usize>,
    /// Nanoseconds from the origin that all recorders of a run share.
    pub start: u64,
    /// Nanoseconds from the same origin; not before `start`.
    pub end: u64,
}

/// Notes spans of time, or nothing at all: switched off, it costs a branch.
///
/// One rank owns it; spans that are begun inside another one must end inside it, so that they nest.
#[derive(Debug, Default)]
pub struct Recorder {
    origin: Option<Instant>,
    spans: Vec<Span>,
}

/// The beginning of a span.
#[derive(Clone, Copy, Debug)]
#[must_use = "a span is noted when its mark is handed to `Recorder::end`"]
pub struct Mark(Option<Instant>);

impl Recorder {
    /// Notes nothing.
    pub fn off() -> Self {
        Self::default()
    }

    /// Counts time from `origin`, which must be the same on all ranks of a run.
    pub fn new(origin: Instant) -> Self {
        Self { origin: Some(origin), spans: Vec::new() }
    }

    /// Whether anything is noted.
    pub fn is_on(&self) -> bool {
        self.origin.is_some()
    }

    /// Now, if anything is noted.
    #[inline]
    pub fn begin(&self) -> Mark {
        Mark(self.origin.map(|_| Instant::now()))
    }

    /// Notes what was done since `mark`. A mark of the time before the recorder was switched on is dropped.
    #[inline]
    pub fn end(&mut self, mark: Mark, what: What, chunk: Option<usize>, micro_batch: Option<usize>) {
        if let (Some(origin), Some(start)) = (self.origin, mark.0) {
            let since = |time: Instant| time.saturating_duration_since(origin).as_nanos() as u64;
            self.spans.push(Span { what, chunk, micro_batch, start: since(start), end: since(Instant::now()) });
        }
    }

    /// The spans noted since the last call, in the order in which they ended.
    pub fn take(&mut self) -> Vec<Span> {
        std::mem::take(&mut self.spans)
    }
}
