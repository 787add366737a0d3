//! Records of operations at their launch: only a check of a flag while no session runs.

use super::{Note, Noted, Operation, cupti, events};
use crate::cuda;
use burn_cubecl::tensor::CubeTensor;
use cubecl_common::device::DeviceId;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The kind of marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Marks {
    Off,
    Cupti,
    Events,
}

static MARKS: AtomicU8 = AtomicU8::new(Marks::Off as u8);
/// Never reused in a process, so that late records of one session cannot be assigned to another.
static NEXT: AtomicU64 = AtomicU64::new(1);
static NOTES: Mutex<Vec<Note>> = Mutex::new(Vec::new());

thread_local! {
    /// Operations of this thread that have not ended.
    static OPEN: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Sets the kind of marks from now on. No rank may be launching work.
pub(super) fn set(marks: Marks) {
    MARKS.store(marks as u8, Ordering::Release);
}

/// All records since the last call.
pub(super) fn take() -> Vec<Note> {
    std::mem::take(&mut *NOTES.lock())
}

/// Until it is dropped, launches of this thread belong to the operation.
#[must_use = "the operation ends when this is dropped"]
pub struct Open {
    device: DeviceId,
    id: u64,
    marks: Marks,
    /// Threads have separate streams.
    thread: PhantomData<*const ()>,
}

/// Records that this thread begins an operation on the GPU of `near`; `None` while no profile is recorded. Launches of
/// nested operations belong to the inner one.
#[inline]
pub fn operation(near: &CubeTensor, what: impl FnOnce() -> Operation) -> Option<Open> {
    let marks = match MARKS.load(Ordering::Relaxed) {
        off if off == Marks::Off as u8 => return None,
        cupti if cupti == Marks::Cupti as u8 => Marks::Cupti,
        _ => Marks::Events,
    };
    matches!(near.device, cubecl::Device::Cuda(_)).then(|| begin(near.client.service_id().device, marks, what()))
}

fn begin(device: DeviceId, marks: Marks, operation: Operation) -> Open {
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let parent = OPEN.with_borrow_mut(|open| {
        let parent = open.last().copied();
        open.push(id);
        parent
    });
    let noted = Noted { gpu: usize::from(device.index_id), operation };
    NOTES.lock().push(Note { id, parent, noted });
    cuda::mark(device, move |stream| match marks {
        Marks::Cupti => cupti::push(id),
        _ => events::record(id, stream),
    });
    Open { device, id, marks, thread: PhantomData }
}

impl Drop for Open {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let (id, marks) = (self.id, self.marks);
        OPEN.with_borrow_mut(|open| open.retain(|other| *other != id));
        cuda::mark(self.device, move |stream| match marks {
            Marks::Cupti => cupti::pop(),
            _ => events::record(id, stream),
        });
    }
}
