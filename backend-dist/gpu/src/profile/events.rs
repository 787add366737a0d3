//! Times of operations from events on the compute stream, if CUPTI is missing.

use super::intervals::{union, without};
use super::{Note, Profile, Source, Span};
use crate::cuda::enter;
use cudarc::driver::sys::{CUevent_flags, CUstream};
use cudarc::driver::{DriverError, result as driver};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Operations and the events before and after them, as integers because they cross threads.
static EVENTS: Mutex<Vec<(u64, usize)>> = Mutex::new(Vec::new());

/// Records an event for an operation on the compute stream; on the device's thread. Without an event the operation has
/// no time.
pub(super) fn record(id: u64, stream: Option<CUstream>) {
    let Some(stream) = stream else { return };
    let Ok(event) = driver::event::create(CUevent_flags::CU_EVENT_DEFAULT) else { return };
    // SAFETY: the event was created in the stream's context, which is current, and is destroyed after it is read.
    if unsafe { driver::event::record(event, stream) }.is_ok() {
        EVENTS.lock().push((id, event as usize));
    }
}

/// Drops all events; all GPUs are idle.
pub(super) fn forget() {
    for (_, event) in std::mem::take(&mut *EVENTS.lock()) {
        // SAFETY: it has passed, and there is no other reference to it. An error is a small leak.
        let _ = unsafe { driver::event::destroy(event as _) };
    }
}

/// The profile of `window` nanoseconds with these `notes`; all GPUs are idle.
///
/// # Errors
/// The driver's error about an event.
pub(super) fn profile(why: String, window: u64, notes: Vec<Note>) -> Result<Profile, DriverError> {
    let mut pairs: HashMap<u64, Vec<usize>> = HashMap::new();
    for (id, event) in EVENTS.lock().iter() {
        pairs.entry(*id).or_default().push(*event);
    }
    // The first operation of each GPU has its first event: notes are in the order of launch.
    let mut bases: HashMap<usize, usize> = HashMap::new();
    let mut times = HashMap::new();
    for note in &notes {
        let Some([begin, end]) = pairs.get(&note.id).map(Vec::as_slice) else { continue };
        let base = *bases.entry(note.noted.gpu).or_insert(*begin);
        enter(note.noted.gpu)?;
        let since = |event: usize| -> Result<u64, DriverError> {
            // SAFETY: both events were recorded in the current context, and have passed.
            let milliseconds = unsafe { driver::event::elapsed(base as _, event as _) }?;
            Ok((f64::from(milliseconds).max(0.0) * 1e6) as u64)
        };
        times.insert(note.id, (since(*begin)?, since(*end)?));
    }
    let mut parts: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    for note in &notes {
        if let (Some(parent), Some(time)) = (note.parent, times.get(&note.id)) {
            parts.entry(parent).or_default().push(*time);
        }
    }
    let mut spans = Vec::new();
    for (index, note) in notes.iter().enumerate() {
        let Some(time) = times.get(&note.id) else { continue };
        let inner = union(parts.remove(&note.id).unwrap_or_default());
        for (start, end) in without(*time, &inner) {
            let (gpu, name) = (note.noted.gpu, note.noted.operation.name.to_string());
            spans.push(Span { gpu, name, start, end, bytes: 0, operation: Some(index) });
        }
    }
    forget();
    let operations = notes.into_iter().map(|note| note.noted).collect();
    Ok(Profile { source: Source::Events { why }, window, operations, spans, dropped: 0 })
}
