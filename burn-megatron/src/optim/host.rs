//! The page-locked host memory that a rank's state is copied to for checkpoints, reserved while training begins.

use backend_dist::gpu::host_copy::HostMemory;
use std::cell::{OnceCell, RefCell};
use std::io;
use std::thread::{self, JoinHandle};

/// Memory that is being reserved, that is there, or that there is none of.
#[derive(Default)]
pub(super) struct HostReserve {
    thread: RefCell<Option<JoinHandle<Result<HostMemory, String>>>>,
    memory: OnceCell<HostMemory>,
    /// Why there is none.
    trouble: RefCell<Option<String>>,
}

impl HostReserve {
    /// Reserves `bytes` bytes for the GPU of this index, on a thread. Fails if the system gives no more threads.
    pub fn begin(gpu: usize, bytes: usize) -> io::Result<Self> {
        let thread = thread::Builder::new().name("host memory".into()).spawn(move || HostMemory::new(gpu, bytes))?;
        Ok(Self { thread: RefCell::new(Some(thread)), ..Self::default() })
    }

    /// The memory; waits until it is reserved.
    pub fn memory(&self) -> Option<&HostMemory> {
        if let Some(thread) = self.thread.take() {
            match thread.join().unwrap_or_else(|_| Err("the thread panicked; its message is above".into())) {
                Ok(memory) => drop(self.memory.set(memory)),
                Err(error) => *self.trouble.borrow_mut() = Some(error),
            }
        }
        self.memory.get()
    }

    /// Lets what is launched from here on wait for a copy that is under way.
    pub fn protect(&self) {
        self.memory.get().iter().for_each(|memory| memory.protect());
    }

    /// Why there is no memory, once.
    pub fn take_trouble(&self) -> Option<String> {
        self.trouble.take()
    }
}
