//! Host memory that DMA copy engines of a GPU read and write.

use cudarc::driver::{DriverError, result as driver, sys};
use memmap2::MmapMut;
use rayon::prelude::*;

/// The smallest page of the systems that have CUDA.
const PAGE: usize = 4096;

/// Page-locked host memory. Raw handles are stored as integers, because they cross threads.
pub(super) struct Pages {
    memory: MmapMut,
    pub address: usize,
    pub context: usize,
}

impl Pages {
    /// Takes the memory page by page before it is locked: the system may take seconds for it, in which the driver would
    /// let no other thread work.
    pub fn new(gpu: usize, bytes: usize) -> Result<Self, String> {
        let mut memory = MmapMut::map_anon(bytes).map_err(|error| error.to_string())?;
        // Larger pages are locked sooner; without them it is right as well.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        memory.par_chunks_mut(PAGE).for_each(|page| page[0] = 0);
        let address = memory.as_mut_ptr() as usize;
        // SAFETY: the context is the device's primary one, which CubeCL retains for the life of the process. The range is
        // mapped until `drop` has unlocked it.
        unsafe {
            let context = driver::primary_ctx::retain(gpu as i32).map_err(told)?;
            driver::ctx::set_current(context).map_err(told)?;
            let locked = sys::cuMemHostRegister_v2(address as _, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE);
            locked.result().map_err(told)?;
            Ok(Self { memory, address, context: context as usize })
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the range was locked in this context, which lives as long as the process, and no copy to it is under
        // way: such a copy keeps it alive. Memory that cannot be unlocked stays so until it is unmapped.
        unsafe {
            let _ = driver::ctx::set_current(self.context as _);
            let _ = sys::cuMemHostUnregister(self.address as _);
        }
    }
}

/// The driver's words.
pub(super) fn told(error: DriverError) -> String {
    error.to_string()
}
