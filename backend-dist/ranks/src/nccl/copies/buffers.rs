//! GPU memory and events that processes of one host open of each other, by CUDA's handles for other processes.

use crate::comm::Group;
use cudarc::driver::{result as driver, sys};
use serde::{Deserialize, Serialize};

/// Bytes of a piece of a buffer, which others copy while the next ones are filled.
pub(super) const PIECE: usize = 4 << 20;

/// Pieces of a buffer.
pub(super) const PIECES: usize = 8;

/// Bytes of a buffer: a shard of 16,384 tokens with 1,024 features in bf16.
pub(super) const BUFFER: usize = PIECES * PIECE;

/// What other processes open, a `CUipcMemHandle` or `CUipcEventHandle`.
type Handle = Vec<u8>;

/// A member's buffers, and its events, each of even and of odd rounds: a piece is ready, the member's copies are done.
#[derive(Clone, Default)]
pub(super) struct Member {
    pub buffers: usize,
    pub ready: [[usize; PIECES]; 2],
    pub done: [usize; 2],
}

/// The same, as it is told to the others: raw for those in its process, which cannot open handles of their own.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    rank: usize,
    buffers: usize,
    events: Vec<usize>,
    /// Of the buffers.
    memory: Handle,
    /// Of the events.
    handles: Vec<Handle>,
}

/// This member's own, freed when no other has it open.
#[derive(Default)]
pub(super) struct Own {
    pub member: Member,
    /// The stream that fills the buffers.
    pub stream: usize,
}

/// The others', closed before they free them.
#[derive(Default)]
pub(super) struct Peers {
    pub members: Vec<Member>,
    opened: Vec<Member>,
}

impl Own {
    /// Buffers and events on the GPU of this context. The buffers begin with the member's rank.
    pub(super) fn new(group: &Group, context: usize) -> Result<Self, String> {
        let mut own = Self::default();
        let flags =
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 | sys::CUevent_flags::CU_EVENT_INTERPROCESS as u32;
        let rank = group.ranks()[group.rank()] as u32;
        // SAFETY: the context is the device's primary one, which lives as long as the process; what is written is read
        // only if the call has succeeded, and the memory is written within its size.
        let mut make = || unsafe {
            driver::ctx::set_current(context as _)?;
            let (_, highest) = driver::stream::get_priority_range()?;
            let kind = driver::stream::StreamKind::NonBlocking;
            own.stream = driver::stream::create_with_priority(kind, highest)? as usize;
            own.member.buffers = driver::malloc_sync(2 * BUFFER)? as usize;
            sys::cuMemsetD32Async(own.member.buffers as u64, rank, 1, own.stream as _).result()?;
            for event in own.member.events() {
                let mut made = std::ptr::null_mut();
                sys::cuEventCreate(&mut made, flags).result()?;
                *event = made as usize;
            }
            // Not the whole GPU, where a pipeline's receive may wait for what comes later.
            driver::stream::synchronize(own.stream as _)
        };
        make().map_err(|error| format!("buffers that other processes read: {error}"))?;
        Ok(own)
    }

    /// What the others open.
    pub(super) fn hello(&self, group: &Group) -> Result<Hello, String> {
        let buffers = self.member.buffers;
        let events: Vec<usize> = self.member.clone().events().map(|event| *event).collect();
        let bytes = |reserved: [std::ffi::c_char; 64]| reserved.map(|byte| byte as u8).to_vec();
        let mut memory = sys::CUipcMemHandle { reserved: [0; 64] };
        let of_event = |event: &usize| {
            let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
            // SAFETY: the driver writes the handle of an event that exists.
            unsafe { sys::cuIpcGetEventHandle(&mut handle, *event as _) }.result().map(|()| bytes(handle.reserved))
        };
        // SAFETY: the driver writes the handle of memory that exists.
        let handles = unsafe { sys::cuIpcGetMemHandle(&mut memory, buffers as u64) }.result();
        let handles = handles.and_then(|()| events.iter().map(of_event).collect());
        let handles = handles.map_err(|error| format!("handles for other processes: {error}"))?;
        let (rank, memory) = (group.ranks()[group.rank()], bytes(memory.reserved));
        Ok(Hello { rank, buffers, events, memory, handles })
    }
}

impl Peers {
    /// Opens what is in other processes, and reads from there on `stream`.
    pub(super) fn open(group: &Group, hellos: &[Hello], stream: usize) -> Result<Self, String> {
        let mut peers = Self::default();
        for (member, hello) in hellos.iter().enumerate() {
            if group.is_here(member) {
                let mut raw = Member { buffers: hello.buffers, ..Member::default() };
                raw.events().zip(&hello.events).for_each(|(event, told)| *event = *told);
                peers.members.push(raw);
                continue;
            }
            let reason = |error| format!("memory of rank {} cannot be opened: {error}", hello.rank);
            peers.opened.push(Member::default());
            let opened = peers.opened.last_mut().expect("it was pushed");
            opened.open(hello).map_err(reason)?;
            let mut found = [0u32];
            // SAFETY: the memory is as large as a buffer, and what is read outlives the copy.
            unsafe {
                driver::memcpy_dtoh_async(&mut found, opened.buffers as u64, stream as _)
                    .and_then(|()| driver::stream::synchronize(stream as _))
            }
            .map_err(reason)?;
            if found[0] as usize != hello.rank {
                return Err(format!("memory of rank {} reads as {}", hello.rank, found[0]));
            }
            peers.members.push(opened.clone());
        }
        Ok(peers)
    }
}

impl Member {
    /// The events, in an order that all members know.
    fn events(&mut self) -> impl Iterator<Item = &mut usize> {
        self.ready.as_flattened_mut().iter_mut().chain(&mut self.done)
    }

    fn open(&mut self, hello: &Hello) -> Result<(), driver::DriverError> {
        let bytes = |handle: &Handle| std::array::from_fn(|at| handle.get(at).copied().unwrap_or(0) as _);
        let memory = sys::CUipcMemHandle { reserved: bytes(&hello.memory) };
        let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the driver checks the handles; what it writes is read only if it has opened them.
        unsafe {
            let mut address = 0;
            sys::cuIpcOpenMemHandle_v2(&mut address, memory, lazily).result()?;
            self.buffers = address as usize;
            self.events().zip(&hello.handles).try_for_each(|(event, handle)| {
                let mut opened = std::ptr::null_mut();
                sys::cuIpcOpenEventHandle(&mut opened, sys::CUipcEventHandle { reserved: bytes(handle) }).result()?;
                *event = opened as usize;
                Ok(())
            })
        }
    }

    fn destroy_events(&mut self) {
        for event in self.events().filter(|event| **event != 0) {
            // SAFETY: nothing waits for it any more, or the driver keeps it until then. One that cannot be destroyed is
            // a small leak.
            let _ = unsafe { driver::event::destroy(*event as _) };
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let Self { member, stream } = self;
        member.destroy_events();
        // SAFETY: the others have closed it, and nothing is queued that uses it. An error leaks it.
        unsafe {
            if member.buffers != 0 {
                let _ = driver::free_sync(member.buffers as u64);
            }
            if *stream != 0 {
                let _ = driver::stream::destroy(*stream as _);
            }
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        for opened in &mut self.opened {
            opened.destroy_events();
            if opened.buffers != 0 {
                // SAFETY: nothing is queued that uses it. An error leaks it.
                let _ = unsafe { sys::cuIpcCloseMemHandle(opened.buffers as u64) }.result();
            }
        }
    }
}
