//! States that live in page-locked host memory and pass through GPU memory piece by piece.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::mpsc::channel;

use cudarc::driver::{DriverError, result as driver, sys};

use super::pages::{Pages, told};
use crate::{buffer::Buffer, cuda, failed};

/// Page-locked host memory of a rank, of which one DMA copy engine loads pieces while another stores pieces.
///
/// Pieces pass through slots: buffers in GPU memory that one piece has at a time. A load into a slot waits for the
/// last store from it, what the rank's thread launches after [`load`](Self::load) for the load, a store for what was
/// launched before it. The host waits where it looks at the bytes only.
pub struct OffloadMemory {
    pages: ManuallyDrop<Pages>,
    /// Some buffer of the GPU.
    near: Buffer,
    loads: usize,
    stores: usize,
    /// Recorded behind the last store of all.
    stored: usize,
    slots: Vec<Slot>,
}

/// Events of a slot.
#[derive(Clone, Copy)]
struct Slot {
    loaded: usize,
    computed: usize,
    stored: usize,
}

impl fmt::Debug for OffloadMemory {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "OffloadMemory({} bytes, {} slots)", self.pages.len(), self.slots.len())
    }
}

const WAIT: sys::CUevent_wait_flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;

impl OffloadMemory {
    /// Page-locks `bytes` zeros for the GPU of `near`; takes seconds for many. What the thread has launched before is
    /// over before the first load.
    ///
    /// # Errors
    /// What the driver says, for example that there is too little memory.
    pub fn new(near: &Buffer, bytes: usize, slots: usize) -> Result<Self, String> {
        let index = near.cube().client.service_id().device.index_id;
        let pages = Pages::new(index.into(), bytes)?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let event = || driver::event::create(flags).map(|event| event as usize).map_err(told);
        let stream = || {
            let stream = driver::stream::create(driver::stream::StreamKind::NonBlocking);
            stream.map(|stream| stream as usize).map_err(told)
        };
        let slot = |_| -> Result<Slot, String> { Ok(Slot { loaded: event()?, computed: event()?, stored: event()? }) };
        let slots = (0..slots).map(slot).collect::<Result<Vec<_>, _>>()?;
        let (loads, stores, stored, ready) = (stream()?, stream()?, event()?, event()?);
        let memory = Self { pages: ManuallyDrop::new(pages), near: near.clone(), loads, stores, stored, slots };
        cuda::submit(
            [near.cube()],
            move |_, compute| {
                // SAFETY: stream and event live as long as the process.
                let waits = unsafe {
                    driver::event::record(ready as _, compute)
                        .and_then(|()| driver::stream::wait_event(loads as _, ready as _, WAIT))
                };
                waits.map_err(|error| format!("waiting before the first load: {error}"))
            },
            failed::noting(index),
        );
        Ok(memory)
    }

    /// Begins a step: its loads find what the last step has stored, whatever slots it used.
    pub fn begin(&self) {
        let (loads, stored) = (self.loads, self.stored);
        self.submit(&self.near, "waiting for stored states", move |_, _| {
            // SAFETY: stream and event live as long as the process. An event that was not recorded is over.
            unsafe { driver::stream::wait_event(loads as _, stored as _, WAIT) }
        });
    }

    /// Fills a slot's buffers from these offsets.
    ///
    /// # Panics
    /// If the memory ends before a buffer does.
    pub fn load(&self, slot: usize, copies: &[(usize, Buffer)]) {
        let (Slot { loaded, stored, .. }, loads) = (self.slots[slot], self.loads);
        for (start, buffer) in copies {
            let (from, bytes) = (self.address(*start, buffer), buffer.bytes());
            self.submit(buffer, "loading states", move |to, compute| {
                // SAFETY: streams and events live as long as the process, the pages until `drop` has waited for all
                // copies, and both sides have so many bytes. Nobody writes the pages here but stores, which lie on
                // the other stream behind what used this load.
                unsafe {
                    driver::stream::wait_event(loads as _, stored as _, WAIT)?;
                    sys::cuMemcpyHtoDAsync_v2(to as u64, from as _, bytes, loads as _).result()?;
                    driver::event::record(loaded as _, loads as _)?;
                    driver::stream::wait_event(compute, loaded as _, WAIT)
                }
            });
        }
    }

    /// Copies a slot's buffers to these offsets, as what the thread has launched so far leaves them.
    ///
    /// # Panics
    /// If the memory ends before a buffer does.
    pub fn store(&mut self, slot: usize, copies: &[(usize, Buffer)]) {
        let (Slot { computed, stored, .. }, stores, last) = (self.slots[slot], self.stores, self.stored);
        for (start, buffer) in copies {
            let (to, bytes) = (self.address(*start, buffer), buffer.bytes());
            self.submit(buffer, "storing states", move |from, compute| {
                // SAFETY: as above. The buffer is written again only by a load, which waits for `stored`; the bytes are
                // looked at only after `wait`.
                unsafe {
                    driver::event::record(computed as _, compute)?;
                    driver::stream::wait_event(stores as _, computed as _, WAIT)?;
                    sys::cuMemcpyDtoHAsync_v2(to as _, from as u64, bytes, stores as _).result()?;
                    driver::event::record(stored as _, stores as _)?;
                    driver::event::record(last as _, stores as _)
                }
            });
        }
    }

    /// All bytes, as the stores so far leave them.
    ///
    /// # Panics
    /// If the GPU has failed.
    pub fn bytes(&self) -> &[u8] {
        self.wait().unwrap_or_else(|error| panic!("states in host memory are read after a copy has failed: {error}"));
        // SAFETY: the pages live as long as this value; no copy writes them, because stores need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.pages.address as *const u8, self.pages.len()) }
    }

    /// All bytes, to write.
    ///
    /// # Panics
    /// If the GPU has failed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.wait().unwrap_or_else(|error| panic!("states in host memory are set after a copy has failed: {error}"));
        // SAFETY: as above, and no copy reads them either.
        unsafe { std::slice::from_raw_parts_mut(self.pages.address as *mut u8, self.pages.len()) }
    }

    fn address(&self, start: usize, buffer: &Buffer) -> usize {
        let (end, len) = (start + buffer.bytes(), self.pages.len());
        assert!(end <= len, "states {start}..{end} of {len} bytes of host memory");
        self.pages.address + start
    }

    fn submit(
        &self,
        buffer: &Buffer,
        what: &'static str,
        queue: impl FnOnce(usize, sys::CUstream) -> Result<(), DriverError> + Send + 'static,
    ) {
        let index = buffer.cube().client.service_id().device.index_id;
        cuda::submit(
            [buffer.cube()],
            move |[pointer], compute| queue(pointer as usize, compute).map_err(|error| format!("{what}: {error}")),
            failed::noting(index),
        );
    }

    /// Waits until all that is queued is over.
    fn wait(&self) -> Result<(), String> {
        let tensor = self.near.cube();
        let (sender, queued) = channel();
        cuda::mark(tensor.client.service_id().device, move |_| sender.send(()).unwrap_or(()));
        cuda::flush(tensor);
        queued.recv().map_err(|_| "the copies were not queued")?;
        // SAFETY: the context lives as long as the process, and so do the streams.
        unsafe {
            driver::ctx::set_current(self.pages.context as _).map_err(told)?;
            driver::stream::synchronize(self.loads as _).map_err(told)?;
            driver::stream::synchronize(self.stores as _).map_err(told)
        }
    }
}

impl Drop for OffloadMemory {
    fn drop(&mut self) {
        // Slots that a copy still uses must not be given back either: their owner drops them after this. A GPU whose
        // copies have not ended may still write: better a leak.
        if self.wait().is_ok() {
            // SAFETY: nothing uses the pages any more, and this is the end of this value.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
        }
    }
}
