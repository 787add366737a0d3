//! Events of a communicator that are used again once nobody waits for them any more.

use crate::slots::Slots;
use cudarc::driver::{result as driver, sys as cuda_sys};
use std::sync::{Mutex, PoisonError};

/// A pool of events. Between [`take`](Self::take) and [`give`](Self::give) a slot's event belongs to one operation.
#[derive(Default)]
pub(crate) struct Events {
    pool: Mutex<(Slots, Vec<Option<usize>>)>,
}

impl Events {
    /// A slot whose event nobody uses. Its last record is older than any operation that is issued from here on.
    pub(crate) fn take(&self) -> usize {
        self.lock(|(slots, _)| slots.take())
    }

    /// Gives `slot` back: from here on its event may be recorded anew.
    pub(crate) fn give(&self, slot: usize) {
        self.lock(|(slots, _)| slots.give(slot));
    }

    /// The event of `slot`, made on first use in the calling thread's context.
    pub(crate) fn get(&self, slot: usize) -> Result<usize, String> {
        self.lock(|(_, events)| {
            if events.len() <= slot {
                events.resize(slot + 1, None);
            }
            if let Some(event) = events[slot] {
                return Ok(event);
            }
            let event = driver::event::create(cuda_sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                .map_err(|error| error.to_string())? as usize;
            events[slot] = Some(event);
            Ok(event)
        })
    }

    /// Whether the work behind which the event of `slot` was recorded is done.
    pub(crate) fn has_passed(&self, slot: usize) -> bool {
        // SAFETY: events live as long as the pool.
        self.get(slot).is_ok_and(|event| unsafe { driver::event::query(event as _) }.is_ok())
    }

    fn lock<T>(&self, f: impl FnOnce(&mut (Slots, Vec<Option<usize>>)) -> T) -> T {
        f(&mut self.pool.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.lock(|(_, events)| {
            for event in events.drain(..).flatten() {
                // SAFETY: nobody knows of the event any more. One that cannot be destroyed is a small leak.
                let _ = unsafe { driver::event::destroy(event as _) };
            }
        });
    }
}
