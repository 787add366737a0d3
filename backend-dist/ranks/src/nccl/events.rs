//! A communicator's events, which are reused once nothing waits for them.

use crate::slot_pool::SlotPool;
use cudarc::driver::{result as driver, sys as cuda_sys};
use parking_lot::Mutex;

/// A pool of events. Between [`take`](Self::take) and [`give`](Self::give) a slot's event belongs to one operation.
#[derive(Default)]
pub(crate) struct Events {
    pool: Mutex<(SlotPool, Vec<Option<usize>>)>,
}

impl Events {
    /// A slot whose event is unused. Its last record is older than all operations from here on.
    pub(crate) fn take(&self) -> usize {
        self.lock(|(slots, _)| slots.take())
    }

    /// Returns `slot`: from here on its event may be recorded again.
    pub(crate) fn give(&self, slot: usize) {
        self.lock(|(slots, _)| slots.give(slot));
    }

    /// The event of `slot`, created on first use in the calling thread's context.
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

    /// Whether the work before the record of `slot`'s event is done.
    pub(crate) fn has_passed(&self, slot: usize) -> bool {
        // SAFETY: events live as long as the pool.
        self.get(slot).is_ok_and(|event| unsafe { driver::event::query(event as _) }.is_ok())
    }

    fn lock<T>(&self, f: impl FnOnce(&mut (SlotPool, Vec<Option<usize>>)) -> T) -> T {
        f(&mut self.pool.lock())
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.lock(|(_, events)| {
            for event in events.drain(..).flatten() {
                // SAFETY: no other reference to the event exists. One that cannot be destroyed is a small leak.
                let _ = unsafe { driver::event::destroy(event as _) };
            }
        });
    }
}
