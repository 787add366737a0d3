//! A member's memory, which the others open: by its address within a process, by CUDA's handle between processes.

use super::layout::{MARK, MEMBERS, memory};
use super::ptx;
use crate::comm::Group;
use cudarc::driver::{result as driver, sys};
use serde::{Deserialize, Serialize};
use std::ffi::{CString, c_uint};
use std::sync::atomic::{AtomicU32, Ordering};

/// This member's own: memory that the others write to, the word that ends waiting kernels, and the kernels.
pub(super) struct Own {
    rank: usize,
    context: usize,
    stream: usize,
    memory: u64,
    /// A word of host memory, and its address on the device.
    word: usize,
    word_on_device: u64,
    module: usize,
    kernels: [usize; 4],
}

/// How others open a member's memory.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Offer {
    rank: usize,
    gpu: usize,
    /// For members in its process, which cannot open handles of their own.
    address: u64,
    /// `CUipcMemHandle`; empty if there are no other processes.
    handle: Vec<u8>,
    capability: i32,
}

/// The memory of all members.
pub(super) struct Opened {
    /// As this member's GPU addresses it.
    pub members: [u64; MEMBERS],
    /// What is to be closed, in which context.
    handles: Vec<u64>,
    context: usize,
}

impl Own {
    /// For a group of `size`; `stream` is idle.
    pub(super) fn new(rank: usize, size: usize, context: usize, stream: usize) -> Result<Self, String> {
        let mut own = Self { rank, context, stream, memory: 0, word: 0, word_on_device: 0, module: 0, kernels: [0; 4] };
        let source = CString::new(ptx::module()).map_err(|error| error.to_string())?;
        let bytes = memory(size);
        // SAFETY: the context is the device's primary one, which lives as long as the process; what the driver writes is
        // read only if the call has succeeded; the memory is written within its size; the image of the module ends with
        // a zero.
        let make = |own: &mut Self| unsafe {
            driver::ctx::set_current(context as _)?;
            own.memory = driver::malloc_sync(bytes)?;
            driver::memset_d8_async(own.memory, 0, bytes, stream as _)?;
            sys::cuMemsetD32Async(own.memory + MARK as u64, rank as c_uint, 1, stream as _).result()?;
            // Not the whole GPU, where a pipeline's receive may wait for what comes later.
            driver::stream::synchronize(stream as _)?;
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            let word = driver::malloc_host(size_of::<AtomicU32>(), flags)?;
            own.word = word as usize;
            word.cast::<u32>().write(0);
            sys::cuMemHostGetDevicePointer_v2(&mut own.word_on_device, word, 0).result()?;
            let module = driver::module::load_data(source.as_ptr().cast())?;
            own.module = module as usize;
            for (kernel, name) in own.kernels.iter_mut().zip(ptx::names()) {
                let name = CString::new(name).expect("a name has no zero");
                *kernel = driver::module::get_function(module, name)? as usize;
            }
            Ok(())
        };
        make(&mut own).map_err(|error: driver::DriverError| format!("memory that other GPUs write to: {error}"))?;
        Ok(own)
    }

    pub(super) fn kernels(&self) -> [usize; 4] {
        self.kernels
    }

    pub(super) fn stop_on_device(&self) -> u64 {
        self.word_on_device
    }

    /// Ends kernels that wait.
    pub(super) fn stop(&self) {
        // SAFETY: the word is host memory of this value, aligned, and nobody writes to it otherwise.
        unsafe { AtomicU32::from_ptr(self.word as *mut u32) }.store(1, Ordering::Release);
    }

    /// How the others open it; `is_local` if all are in this process.
    pub(super) fn offer(&self, gpu: usize, is_local: bool) -> Result<Offer, String> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        if !is_local {
            // SAFETY: the driver writes the handle of memory that exists.
            let made = unsafe { sys::cuIpcGetMemHandle(&mut handle, self.memory) }.result();
            made.map_err(|error| format!("a handle for other processes: {error}"))?;
        }
        let handle = if is_local { Vec::new() } else { handle.reserved.map(|byte| byte as u8).to_vec() };
        let major = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        // SAFETY: the driver writes a number.
        let capability =
            driver::device::get(gpu as i32).and_then(|gpu| unsafe { driver::device::get_attribute(gpu, major) });
        let capability = capability.map_err(|error| format!("the GPU's compute capability: {error}"))?;
        Ok(Offer { rank: self.rank, gpu, address: self.memory, handle, capability })
    }
}

impl Offer {
    /// The major number of the compute capability of the member's GPU.
    pub(super) fn capability(&self) -> i32 {
        self.capability
    }
}

impl Opened {
    /// Opens the memory of all members of `group`, and reads there whose it is.
    pub(super) fn open(group: &Group, offers: &[Offer], own: &Own) -> Result<Self, String> {
        let mut opened = Self { members: [0; MEMBERS], handles: Vec::new(), context: own.context };
        for (member, offer) in offers.iter().enumerate() {
            let why = |error| format!("memory of rank {} cannot be opened: {error}", offer.rank);
            opened.members[member] = if member == group.rank() {
                own.memory
            } else if group.is_here(member) {
                reach(offer.gpu, own.context).map_err(why)?;
                offer.address
            } else {
                let address = open(&offer.handle).map_err(why)?;
                opened.handles.push(address);
                address
            };
            let mut found = [0u32];
            // SAFETY: the memory is larger, and what is read outlives the copy.
            unsafe {
                driver::memcpy_dtoh_async(&mut found, opened.members[member] + MARK as u64, own.stream as _)
                    .and_then(|()| driver::stream::synchronize(own.stream as _))
            }
            .map_err(why)?;
            if found[0] as usize != offer.rank {
                return Err(format!("memory of rank {} reads as that of {}", offer.rank, found[0]));
            }
        }
        Ok(opened)
    }
}

/// Lets kernels of `context` use the memory of GPU `gpu` of this process.
fn reach(gpu: usize, context: usize) -> Result<(), driver::DriverError> {
    // SAFETY: the device's primary context lives as long as the process.
    unsafe {
        let peer = driver::primary_ctx::retain(gpu as i32)?;
        driver::ctx::set_current(context as _)?;
        match sys::cuCtxEnablePeerAccess(peer, 0).result() {
            Err(driver::DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Ok(()),
            other => other,
        }
    }
}

/// Opens memory of another process in the current context.
fn open(handle: &[u8]) -> Result<u64, driver::DriverError> {
    let reserved = std::array::from_fn(|at| handle.get(at).copied().unwrap_or(0) as _);
    let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
    let mut address = 0;
    // SAFETY: the driver checks the handle, and what it writes is read only if it has opened it.
    unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, sys::CUipcMemHandle { reserved }, lazily) }.result()?;
    Ok(address)
}

impl Drop for Opened {
    fn drop(&mut self) {
        for &address in &self.handles {
            // SAFETY: no kernel is queued that uses it. What cannot be closed is a leak.
            let _ = unsafe {
                driver::ctx::set_current(self.context as _).and_then(|()| sys::cuIpcCloseMemHandle(address).result())
            };
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: the others have closed it, and no kernel is queued that uses it. What cannot be freed is a leak.
        unsafe {
            if driver::ctx::set_current(self.context as _).is_err() {
                return;
            }
            if self.memory != 0 {
                let _ = driver::free_sync(self.memory);
            }
            if self.word != 0 {
                let _ = driver::free_host(self.word as _);
            }
            if self.module != 0 {
                let _ = driver::module::unload(self.module as _);
            }
        }
    }
}
