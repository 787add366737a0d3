//! Copies through CUDA.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::{result as driver, sys};
use parking_lot::Mutex;

use super::held;
use super::pages::{Pages, told};
use crate::cuda::{self, PinnedBuffer};
use crate::{buffer::Buffer, failed};

/// Page-locked host memory of a rank, for one copy of its buffers at a time.
pub struct HostMemory {
    pages: Arc<Pages>,
    stream: usize,
    /// Recorded behind what the buffers were computed with.
    ready: usize,
    /// Recorded behind the last copy.
    done: usize,
    /// Buffers whose copy the compute stream has not waited for yet.
    lent: RefCell<Vec<PinnedBuffer>>,
    /// The last copy, while somebody holds its bytes.
    last: RefCell<Weak<UnderWay>>,
}

/// A copy that is being queued.
pub struct HostCopy<'a> {
    memory: &'a HostMemory,
    under_way: Arc<UnderWay>,
    /// Says on the device's thread that all is queued, or why not.
    queued: Sender<Result<(), String>>,
    /// Bytes that are taken.
    filled: usize,
}

/// A copy, for who reads it.
struct UnderWay {
    /// `None` when it is dropped.
    pages: Option<Arc<Pages>>,
    done: usize,
    queued: Mutex<Receiver<Result<(), String>>>,
    ended: OnceLock<Result<(), String>>,
}

/// Bytes of a copy. The host memory takes the next copy when all of them are dropped.
#[derive(Clone)]
pub struct HostBytes {
    copy: Arc<UnderWay>,
    range: Range<usize>,
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "HostMemory({} bytes)", self.pages.len())
    }
}

impl fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "HostBytes({:?})", self.range)
    }
}

impl HostMemory {
    /// Page-locks `bytes` bytes for copies from the GPU of this index. That may take seconds, and be done on any thread.
    ///
    /// # Errors
    /// What the driver says, for example that there is too little memory.
    pub fn new(gpu: usize, bytes: usize) -> Result<Self, String> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let event = || driver::event::create(flags).map(|event| event as usize).map_err(told);
        let pages = Pages::new(gpu, bytes)?;
        let stream = driver::stream::create(driver::stream::StreamKind::NonBlocking).map_err(told)? as usize;
        let (ready, done) = (event()?, event()?);
        let (pages, lent, last) = (Arc::new(pages), RefCell::default(), RefCell::default());
        Ok(Self { pages, stream, ready, done, lent, last })
    }

    /// A new copy; `None` while bytes of the last one are held.
    pub fn begin(&self) -> Option<HostCopy<'_>> {
        if Arc::strong_count(&self.pages) > 1 {
            return None;
        }
        // The count orders nothing: what others have read of the bytes lies before what is copied over them.
        fence(Ordering::Acquire);
        let (sender, receiver) = channel();
        let under_way = UnderWay {
            pages: Some(self.pages.clone()),
            done: self.done,
            queued: Mutex::new(receiver),
            ended: OnceLock::new(),
        };
        let under_way = Arc::new(under_way);
        *self.last.borrow_mut() = Arc::downgrade(&under_way);
        Some(HostCopy { memory: self, under_way, queued: sender, filled: 0 })
    }

    /// Lets what the thread launches from here on wait until the buffers are copied. Needed before they are written.
    pub fn protect(&self) {
        let lent = self.lent.take();
        let Some(first) = lent.first() else { return };
        let (tensor, done) = (first.tensor.clone(), self.done);
        let index = tensor.client.service_id().device.index_id;
        cuda::submit(
            [&tensor],
            move |_, compute| {
                let wait = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
                // SAFETY: the event lives as long as a rank's memory for copies, and was recorded on this thread.
                let waits = unsafe { driver::stream::wait_event(compute, done as _, wait) };
                drop(lent);
                waits.map_err(|error| format!("waiting for a copy to the host: {error}"))
            },
            failed::noting(index),
        );
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // Buffers that are still copied must not be given back. On a GPU that has failed that is a leak.
        let under_way = self.last.get_mut().upgrade();
        if under_way.is_some_and(|copy| copy.wait().is_err()) {
            std::mem::forget(self.lent.take());
        }
    }
}

impl HostCopy<'_> {
    /// Queues the copy of a buffer; `None` if it does not fit.
    pub fn add(&mut self, buffer: &Buffer) -> Option<HostBytes> {
        let (tensor, bytes) = (buffer.cube(), buffer.bytes());
        let start = self.filled;
        if start + bytes > self.memory.pages.len() {
            return None;
        }
        self.filled += held(bytes);
        let HostMemory { stream, ready, done, .. } = *self.memory;
        // Not the copy itself: whoever drops that last waits for this thread of the device.
        let (pages, queued) = (self.memory.pages.clone(), self.queued.clone());
        let to = pages.address + start;
        let queue = move |from: usize, compute: sys::CUstream| {
            let wait = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: stream and events live as long as the rank's memory for copies. The buffer has this many bytes and
            // is not written until the compute stream has waited for `done`; those of the host lie in `pages`,
            // and nobody reads them before `done` is over.
            unsafe {
                driver::event::record(ready as _, compute)?;
                driver::stream::wait_event(stream as _, ready as _, wait)?;
                sys::cuMemcpyDtoHAsync_v2(to as _, from as u64, bytes, stream as _).result()?;
                driver::event::record(done as _, stream as _)
            }
        };
        let index = tensor.client.service_id().device.index_id;
        cuda::submit(
            [tensor],
            move |[from], compute| {
                let result = queue(from as usize, compute)
                    .map_err(|error| format!("copying {bytes} bytes to the host: {error}"));
                if let Err(message) = &result {
                    // Nobody may wait for it any more.
                    let _ = queued.send(Err(message.clone()));
                }
                drop(pages);
                result
            },
            failed::noting(index),
        );
        self.memory.lent.borrow_mut().push(PinnedBuffer::new(tensor.clone()));
        Some(HostBytes { copy: self.under_way.clone(), range: start..start + bytes })
    }

    /// Nothing more is copied. Without this, waiting for the bytes is an error.
    pub fn end(self) {
        let queued = self.queued;
        match self.memory.lent.borrow().last() {
            Some(last) => {
                cuda::mark(last.tensor.client.service_id().device, move |_| {
                    let _ = queued.send(Ok(()));
                });
                // Nothing may be launched any more, but others wait for the bytes.
                cuda::flush(&last.tensor);
            }
            None => drop(queued.send(Ok(()))),
        }
    }
}

impl UnderWay {
    fn wait(&self) -> Result<(), String> {
        let wait = || {
            self.queued.lock().recv().map_err(|_| "the copy to the host was not queued")??;
            let pages = self.pages.as_ref().ok_or("the copy to the host is over")?;
            // SAFETY: the context lives as long as the process, the event as long as a rank's memory for copies. It was
            // recorded before the message was sent, and is recorded again only when all bytes are dropped.
            unsafe {
                driver::ctx::set_current(pages.context as _).map_err(told)?;
                driver::event::synchronize(self.done as _).map_err(told)
            }
        };
        self.ended.get_or_init(wait).clone()
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        // A GPU whose copy has not ended may still write: better a leak.
        if self.wait().is_err() {
            std::mem::forget(self.pages.take());
        }
    }
}

impl HostBytes {
    /// Waits until they are there.
    ///
    /// # Errors
    /// If the GPU has failed.
    pub fn wait(&self) -> Result<(), String> {
        self.copy.wait()
    }

    /// How many they are.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Some of them.
    ///
    /// # Panics
    /// If there are no such bytes.
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "bytes {range:?} of {}", self.len());
        Self { copy: self.copy.clone(), range: self.range.start + range.start..self.range.start + range.end }
    }

    /// The bytes.
    ///
    /// # Panics
    /// If the GPU has failed; [`wait`](Self::wait) says that without a panic.
    pub fn bytes(&self) -> &[u8] {
        self.wait().unwrap_or_else(|error| panic!("a copy to the host that has failed is read: {error}"));
        let pages = self.copy.pages.as_ref().expect("it is there until it is dropped");
        // SAFETY: the range is inside the pages, which live as long as this value; the copy is over, and the memory
        // takes no other one while this value lives.
        unsafe { std::slice::from_raw_parts((pages.address + self.range.start) as *const u8, self.range.len()) }
    }
}
