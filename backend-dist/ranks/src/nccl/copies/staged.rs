//! Copies between GPUs of several processes of one host.
//!
//! A process cannot read another one's tensors, but memory of a fixed size, whose handle it has opened once. Every
//! member has two such buffers. It copies what others read of its source there, with the bandwidth of its own memory,
//! and they copy from there; sources that are larger than a buffer go through it in rounds. CubeCL's own pages are not
//! shared: a CUDA pool whose memory other processes read never returns any to the driver, and an allocation must not
//! be freed before all of them have closed it.
//!
//! Rounds are numbered like the operations of threads, with the same invariants: all members know the number of rounds
//! after the first one of an operation, and two buffers and two events of a kind are enough for each member. A buffer
//! is filled again two rounds later, after the events that mark the end of the others' copies.

use super::{Lent, Pull};
use crate::comm::Group;
use crate::comm::one_host::{Packed, SharedBoard, agree, piece};
use crate::nccl::PinnedBuffer;
use crate::nccl::communicator::Call;
use cudarc::driver::{result as driver, sys};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Bytes of a buffer: a shard of 16,384 tokens with 1,024 features in bf16.
const BUFFER: usize = 32 << 20;

/// How long the end of a run waits for the other members.
const FAREWELL: Duration = Duration::from_secs(5);

/// What other processes open, a `CUipcMemHandle` or `CUipcEventHandle`.
type Handle = Vec<u8>;

/// A member's buffers, and its events: ready and done, each of even and of odd rounds.
#[derive(Clone, Default)]
struct Member {
    buffers: usize,
    ready: [usize; 2],
    done: [usize; 2],
}

/// The same, as it is told to the others: raw for those in its process, which cannot open handles of their own.
#[derive(Clone, Serialize, Deserialize)]
struct Hello {
    rank: usize,
    raw: [usize; 5],
    handles: Vec<Handle>,
}

/// This member's own, freed when no other has it open.
#[derive(Default)]
struct Own(Member);

/// The others', closed before they free them.
#[derive(Default)]
struct Peers {
    members: Vec<Member>,
    opened: Vec<Member>,
}

#[derive(Default)]
struct State {
    rounds: u64,
    /// Sources of operations, with the number of their last round.
    sources: VecDeque<(u64, Vec<PinnedBuffer>)>,
    // Closed before this member's own is freed.
    peers: Peers,
    own: Own,
}

/// One member's state.
pub(crate) struct Staged {
    board: SharedBoard,
    member: usize,
    state: Mutex<State>,
}

impl Staged {
    /// This member's state; a collective. `context` is that of its GPU.
    ///
    /// # Errors
    /// The same for all members: why the first of them cannot take part.
    pub(super) fn join(group: &Group, context: usize) -> Result<Self, String> {
        let own = Own::new(group, context);
        let hello = own.as_ref().map_err(Clone::clone).and_then(|own| own.hello(group));
        let hellos = group.all_gather_host(hello);
        let hellos = hellos.into_iter().collect::<Result<Vec<_>, _>>()?;
        let (own, board) = (own?, SharedBoard::meet(group)?);
        let peers = agree(group, Peers::open(group, &hellos));
        if peers.is_err() {
            // Nobody frees what another one has open.
            group.barrier();
        }
        let state = State { peers: peers?, own, ..State::default() };
        Ok(Self { board, member: group.rank(), state: Mutex::new(state) })
    }

    /// Queues the copies of an operation, see [`DmaCopies::queue`](super::DmaCopies::queue).
    pub(super) fn queue(
        &self,
        call: Call,
        lent: &[Lent],
        pulls: &[Pull],
        sources: Vec<PinnedBuffer>,
    ) -> Result<(), String> {
        let state = &mut *self.state.lock();
        let packed = Packed::of(lent.iter().map(|lent| lent.bytes));
        let stream = call.target().1 as sys::CUstream;
        let copy = |to: usize, from: usize, bytes: usize, what: &str| {
            // SAFETY: the caller's ranges are within its buffers, pieces within the members'; a member's buffer is
            // complete after `ready` and stays until `done`, and the target's memory is free after the work that the
            // stream waits for.
            unsafe { driver::memcpy_dtod_async(to as u64, from as u64, bytes, stream) }
                .map_err(|error| format!("{bytes} bytes {what}: {error}"))
        };
        call.follow()?;
        let (mut theirs, mut rounds, mut round) = (Vec::new(), 1, 0);
        let mut waiting = pulls.iter().peekable();
        while round < rounds {
            let number = state.rounds;
            state.rounds += 1;
            let slot = usize::from(number % 2 == 1);
            state.prepare(call, number, self.member)?;
            let buffer = state.own.0.buffers + slot * BUFFER;
            for (range, &Lent { address, bytes }) in lent.iter().enumerate() {
                let start = packed.start(range, bytes).expect("a range has its own size");
                if let Some(piece) = piece(start, bytes, round, BUFFER) {
                    copy(buffer + piece.buffer, address + piece.range, piece.bytes, "for the other members")?;
                }
            }
            call.record_event(state.own.0.ready[slot])?;
            let Some(notes) = self.board.all_gather(number, &packed.to_bytes(), || call.has_failed()) else {
                return Err("the run has failed".into());
            };
            if round == 0 {
                theirs = notes.iter().map(|note| Packed::from_bytes(note)).collect();
                rounds = theirs.iter().map(|packed: &Packed| packed.rounds(BUFFER)).max().unwrap_or(0).max(1);
            }
            for &Pull { member, from, to, bytes, .. } in pulls.iter().filter(|pull| pull.bytes > 0) {
                if member == self.member {
                    if round == 0 {
                        copy(to, lent[from].address, bytes, "of this member")?;
                    }
                    continue;
                }
                let start = theirs[member].start(from, bytes);
                let start = start.ok_or_else(|| format!("member {member} has no {bytes} bytes for this one"))?;
                if let Some(piece) = piece(start, bytes, round, BUFFER) {
                    let peer = &state.peers.members[member];
                    call.wait_for(peer.ready[slot])?;
                    let from = peer.buffers + slot * BUFFER + piece.buffer;
                    copy(to + piece.range, from, piece.bytes, &format!("from member {member}"))?;
                }
            }
            call.record_event(state.own.0.done[slot])?;
            round += 1;
            // Whoever waits for a copy waits for those before it too.
            let has_ended = |pull: &&Pull| {
                let start = theirs[pull.member].start(pull.from, pull.bytes).unwrap_or(0);
                pull.member == self.member || start + pull.bytes <= round * BUFFER
            };
            while let Some(pull) = waiting.next_if(has_ended) {
                pull.slot.map_or(Ok(()), |slot| call.record(slot))?;
            }
        }
        state.sources.push_back((state.rounds - 1, sources));
        Ok(())
    }

    /// Closes what is the others', and frees this member's own when they have done the same; all work of the
    /// communicator's stream has ended. Leaks it if they do not come.
    pub(super) fn end(&self, has_failed: impl Fn() -> bool) {
        let State { rounds, sources, peers, own } = std::mem::take(&mut *self.state.lock());
        drop(peers);
        let start = Instant::now();
        match self.board.all_gather(rounds, &[], || has_failed() || start.elapsed() > FAREWELL) {
            Some(_) => drop((sources, own)),
            None => std::mem::forget(own),
        }
    }

    /// Leaks everything that unfinished copies may use.
    pub(super) fn abandon(&self) {
        std::mem::forget(std::mem::take(&mut *self.state.lock()));
    }
}

impl State {
    /// Before the buffer of a round is filled: lets the communicator's stream wait until the others have copied what
    /// was there, and the compute stream, which orders the reuse of memory, until older sources are copied.
    fn prepare(&mut self, call: Call, number: u64, member: usize) -> Result<(), String> {
        let slot = usize::from(number % 2 == 1);
        if number >= 2 {
            let others = self.peers.members.iter().enumerate().filter(|(other, _)| *other != member);
            others.map(|(_, peer)| peer.done[slot]).try_for_each(|done| call.wait_for(done))?;
        }
        while self.sources.front().is_some_and(|(last, _)| last + 2 <= number) {
            call.compute_waits_for(self.own.0.ready[slot])?;
            self.sources.pop_front();
        }
        Ok(())
    }
}

impl Own {
    /// Buffers and events on the GPU of this context. The buffers begin with the member's rank.
    fn new(group: &Group, context: usize) -> Result<Self, String> {
        let mut own = Self::default();
        let flags =
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 | sys::CUevent_flags::CU_EVENT_INTERPROCESS as u32;
        let rank = group.ranks()[group.rank()] as u32;
        // SAFETY: the context is the device's primary one, which lives as long as the process; what is written is read
        // only if the call has succeeded, and the memory is written within its size.
        let mut make = || unsafe {
            driver::ctx::set_current(context as _)?;
            own.0.buffers = driver::malloc_sync(2 * BUFFER)? as usize;
            sys::cuMemsetD32_v2(own.0.buffers as u64, rank, 1).result()?;
            for event in own.0.ready.iter_mut().chain(&mut own.0.done) {
                let mut made = std::ptr::null_mut();
                sys::cuEventCreate(&mut made, flags).result()?;
                *event = made as usize;
            }
            sys::cuCtxSynchronize().result()
        };
        make().map_err(|error| format!("buffers that other processes read: {error}"))?;
        Ok(own)
    }

    /// What the others open.
    fn hello(&self, group: &Group) -> Result<Hello, String> {
        let Member { buffers, ready, done } = self.0;
        let raw = [buffers, ready[0], ready[1], done[0], done[1]];
        let bytes = |reserved: [std::ffi::c_char; 64]| reserved.map(|byte| byte as u8).to_vec();
        let mut memory = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the driver writes the handle of memory and events that exist.
        let handles = unsafe { sys::cuIpcGetMemHandle(&mut memory, buffers as u64) }.result().and_then(|()| {
            let events = raw[1..].iter().map(|event| {
                let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
                // SAFETY: as above.
                unsafe { sys::cuIpcGetEventHandle(&mut handle, *event as _) }.result().map(|()| bytes(handle.reserved))
            });
            std::iter::once(Ok(bytes(memory.reserved))).chain(events).collect()
        });
        let handles = handles.map_err(|error| format!("handles for other processes: {error}"))?;
        Ok(Hello { rank: group.ranks()[group.rank()], raw, handles })
    }
}

impl Peers {
    /// Opens what is in other processes, and reads from there.
    fn open(group: &Group, hellos: &[Hello]) -> Result<Self, String> {
        let mut peers = Self::default();
        for (member, hello) in hellos.iter().enumerate() {
            if group.is_here(member) {
                let [buffers, ready @ .., _, _] = hello.raw;
                peers.members.push(Member { buffers, ready, done: [hello.raw[3], hello.raw[4]] });
                continue;
            }
            let reason = |error| format!("memory of rank {} cannot be opened: {error}", hello.rank);
            peers.opened.push(Member::default());
            let opened = peers.opened.last_mut().expect("it was pushed");
            opened.open(&hello.handles).map_err(reason)?;
            let mut found = [0u32];
            // SAFETY: the memory is as large as a buffer.
            unsafe { driver::memcpy_dtoh_sync(&mut found, opened.buffers as u64) }.map_err(reason)?;
            if found[0] as usize != hello.rank {
                return Err(format!("memory of rank {} reads as {}", hello.rank, found[0]));
            }
            peers.members.push(opened.clone());
        }
        Ok(peers)
    }
}

impl Member {
    fn open(&mut self, handles: &[Handle]) -> Result<(), driver::DriverError> {
        let bytes = |handle: &Handle| std::array::from_fn(|at| handle.get(at).copied().unwrap_or(0) as _);
        let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut events = self.ready.iter_mut().chain(&mut self.done);
        // SAFETY: the driver checks the handles; what it writes is read only if it has opened them.
        unsafe {
            let mut address = 0;
            sys::cuIpcOpenMemHandle_v2(&mut address, sys::CUipcMemHandle { reserved: bytes(&handles[0]) }, lazily)
                .result()?;
            self.buffers = address as usize;
            handles[1..].iter().zip(&mut events).try_for_each(|(handle, event)| {
                let mut opened = std::ptr::null_mut();
                sys::cuIpcOpenEventHandle(&mut opened, sys::CUipcEventHandle { reserved: bytes(handle) }).result()?;
                *event = opened as usize;
                Ok(())
            })
        }
    }

    fn destroy_events(&self) {
        for event in self.ready.into_iter().chain(self.done).filter(|event| *event != 0) {
            // SAFETY: nothing waits for it any more, or the driver keeps it until then. One that cannot be destroyed is
            // a small leak.
            let _ = unsafe { driver::event::destroy(event as _) };
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.destroy_events();
        if self.0.buffers != 0 {
            // SAFETY: the others have closed it, and nothing is queued that uses it. An error leaks it.
            let _ = unsafe { driver::free_sync(self.0.buffers as u64) };
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        for opened in &self.opened {
            opened.destroy_events();
            if opened.buffers != 0 {
                // SAFETY: nothing is queued that uses it. An error leaks it.
                let _ = unsafe { sys::cuIpcCloseMemHandle(opened.buffers as u64) }.result();
            }
        }
    }
}
