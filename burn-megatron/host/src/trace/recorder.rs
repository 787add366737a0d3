//! One rank's notes of when it did what.

use std::fmt;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::SpanKind;

/// A stretch of one rank's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What it was spent on.
    pub kind: SpanKind,
    /// Model chunk of this rank, where it concerns one.
    pub chunk: Option<usize>,
    /// Micro-batch, where it concerns one.
    pub micro_batch: Option<usize>,
    /// Nanoseconds from the origin that all recorders of a run share.
    pub start: u64,
    /// Nanoseconds from the same origin; not before `start`.
    pub end: u64,
    /// Whose time it is.
    pub track: Track,
}

/// Whose time a span is. Spans of a host nest, as do those of its device; collectives overlap with both, each kind on a
/// track of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Track {
    /// The rank's thread, which on GPUs only issues work.
    #[default]
    Host,
    /// The device that does the work, its waits for collectives included.
    Device,
    /// Weights, from the data-parallel ranks.
    Gathers,
    /// Gradients, over the data-parallel ranks.
    Sums,
    /// Activations and their gradients, over tensor parallel ranks.
    TensorParallel,
    /// To other stages.
    Sends,
    /// From other stages, the time included that the GPU waits for the other end.
    Receives,
}

impl Track {
    /// All of them, from top to bottom.
    pub const ALL: [Track; 7] =
        [Track::Host, Track::Device, Track::Gathers, Track::Sums, Track::TensorParallel, Track::Sends, Track::Receives];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Track::Host => "host",
            Track::Device => "compute",
            Track::Gathers => "gathers of weights",
            Track::Sums => "sums of gradients",
            Track::TensorParallel => "tensor parallel",
            Track::Sends => "sends",
            Track::Receives => "receives",
        }
    }

    /// Whether it is a collective's.
    pub fn is_overlapped(self) -> bool {
        !matches!(self, Track::Host | Track::Device)
    }
}

/// What a device has done since it was read last, in nanoseconds from the recorders' origin.
#[derive(Clone, Debug, Default)]
pub struct DeviceTimes {
    /// The time of each stamp.
    pub stamps: Vec<u64>,
    /// What was not between stamps: on which track, from when, until when.
    pub others: Vec<(SpanKind, Track, u64, u64)>,
}

/// The clock of a device that works asynchronously.
pub trait DeviceClock: Send {
    /// Notes when the device reaches this point; a number for [`DeviceClock::read`], counted from 0 after each read.
    fn stamp(&mut self) -> usize;
    /// Waits for the device: the times of the stamps, its waits, and the collectives overlapped with it.
    fn read(&mut self) -> DeviceTimes;
}

/// Notes spans of time, or nothing at all: switched off, it costs a branch.
///
/// One rank owns it; spans that are begun inside another one must end inside it, so that they nest.
#[derive(Default)]
pub struct Recorder {
    origin: Option<Instant>,
    spans: Vec<Span>,
    device: Option<Box<dyn DeviceClock>>,
    /// Spans that have stamps too.
    stamped: Vec<(Span, [usize; 2])>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (spans, device) = (self.spans.len(), if self.device.is_some() { ", with a device" } else { "" });
        write!(f, "Recorder({spans} spans{device})")
    }
}

/// The beginning of a span.
#[derive(Clone, Copy, Debug)]
#[must_use = "a span is noted when its mark is handed to `Recorder::end`"]
pub struct Mark(Option<(Instant, Option<usize>)>);

impl Recorder {
    /// Notes nothing.
    pub fn off() -> Self {
        Self::default()
    }

    /// Counts time from `origin`, which must be the same on all ranks of a run.
    pub fn new(origin: Instant) -> Self {
        Self { origin: Some(origin), ..Self::default() }
    }

    /// What all times count from, if anything is noted.
    pub fn origin(&self) -> Option<Instant> {
        self.origin
    }

    /// Notes the device's times too.
    pub fn with_device(mut self, device: Option<Box<dyn DeviceClock>>) -> Self {
        self.device = device;
        self
    }

    /// Takes the device's clock out, for another recorder.
    pub fn take_device(&mut self) -> Option<Box<dyn DeviceClock>> {
        self.device.take()
    }

    /// Whether anything is noted.
    pub fn is_on(&self) -> bool {
        self.origin.is_some()
    }

    /// Now, if anything is noted.
    #[inline]
    pub fn begin(&mut self) -> Mark {
        let device = &mut self.device;
        Mark(self.origin.map(|_| (Instant::now(), device.as_mut().map(|device| device.stamp()))))
    }

    /// Notes what was done since `mark`. A mark of the time before the recorder was switched on is dropped.
    #[inline]
    pub fn end(&mut self, mark: Mark, kind: SpanKind, chunk: Option<usize>, micro_batch: Option<usize>) {
        if let (Some(origin), Some((start, stamp))) = (self.origin, mark.0) {
            let since = |time: Instant| time.saturating_duration_since(origin).as_nanos() as u64;
            let (start, end, track) = (since(start), since(Instant::now()), Track::Host);
            let span = Span { kind, chunk, micro_batch, start, end, track };
            self.spans.push(span);
            if let (Some(from), Some(device)) = (stamp, &mut self.device) {
                self.stamped.push((span, [from, device.stamp()]));
            }
        }
    }

    /// The spans noted since the last call, in the order in which they ended; then those of the device, for which it
    /// waits, and of what was overlapped with it and has ended.
    pub fn take(&mut self) -> Vec<Span> {
        let mut spans = std::mem::take(&mut self.spans);
        if let Some(device) = &mut self.device {
            let DeviceTimes { stamps, others } = device.read();
            let of_device = |(span, [start, end]): (Span, [usize; 2])| Span {
                start: stamps[start],
                end: stamps[end].max(stamps[start]),
                track: Track::Device,
                ..span
            };
            spans.extend(self.stamped.drain(..).map(of_device));
            let other = |(kind, track, start, end)| Span { kind, chunk: None, micro_batch: None, start, end, track };
            spans.extend(others.into_iter().map(other));
        }
        spans
    }
}
