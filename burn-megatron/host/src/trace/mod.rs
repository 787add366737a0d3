//! What every rank did when within a training step: recorded, analysed, and written for <https://ui.perfetto.dev>.
//!
//! No tensors and no threads: a rank owns its [`Recorder`] and hands its [`Span`]s over as plain numbers.

mod bubble;
mod chrome;
mod overlap;
mod recorder;
mod span_kind;
#[cfg(test)]
mod tests;

pub use bubble::{busy, idle_share};
pub use chrome::{Lane, write_chrome};
pub use overlap::{Overlap, overlaps, summaries, summary, summary_file};
pub use recorder::{DeviceClock, DeviceTimes, Mark, Recorder, Span, Track};
pub use span_kind::{Category, SpanKind};
