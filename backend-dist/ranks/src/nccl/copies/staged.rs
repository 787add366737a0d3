//! Copies between GPUs of several processes of one host.
//!
//! A process cannot read another one's tensors, but memory of a fixed size, whose handle it has opened once. Every
//! member has two such buffers. It copies what others read of its source there, with the bandwidth of its own memory,
//! and they copy from there; sources that are larger than a buffer go through it in rounds. A stream of its own fills
//! the buffers, piece by piece, so that one piece is filled while another is read. CubeCL's own pages are not shared: a CUDA pool whose
//! memory other processes read never returns any to the driver, and an allocation must not be freed before all of them
//! have closed it.
//!
//! Rounds are numbered like the operations of threads, with the same invariants: all members know the number of rounds
//! after the first one of an operation, and two buffers and two events of a kind are enough for each member. A buffer
//! is filled again two rounds later, after the events that mark the end of the others' copies.

use super::buffers::{BUFFER, Own, PIECE, PIECES, Peers};
use super::{Lent, Pull};
use crate::comm::Group;
use crate::comm::one_host::{Packed, SharedBoard, agree, piece};
use crate::nccl::PinnedBuffer;
use crate::nccl::communicator::{Call, behind, stamp};
use cudarc::driver::{result as driver, sys};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long the end of a run waits for the other members.
const FAREWELL: Duration = Duration::from_secs(5);

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
        let peers = agree(group, Peers::open(group, &hellos, own.stream));
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
        let [filling, stream] = [state.own.stream as sys::CUstream, call.target().1 as sys::CUstream];
        call.follow()?;
        call.let_follow(filling)?;
        let (mut theirs, mut rounds, mut round, mut complete) = (Vec::new(), 1, 0, 0);
        while round < rounds {
            let number = state.rounds;
            state.rounds += 1;
            let slot = usize::from(number % 2 == 1);
            state.prepare(call, number, self.member)?;
            let buffer = state.own.member.buffers + slot * BUFFER;
            for (at, ready) in state.own.member.ready[slot].into_iter().enumerate() {
                let mut is_filled = false;
                for (range, &Lent { address, bytes }) in lent.iter().enumerate() {
                    let start = packed.start(range, bytes).expect("a range has its own size");
                    if let Some(piece) = piece(start, bytes, round * PIECES + at, PIECE) {
                        let to = buffer + at * PIECE + piece.buffer;
                        copy(filling, [address + piece.range, to], piece.bytes, self.member)?;
                        is_filled = true;
                    }
                }
                // The last one also marks the end of this member's fills.
                if is_filled || at == PIECES - 1 {
                    stamp(ready, filling)?;
                }
            }
            let Some(notes) = self.board.all_gather(number, &packed.to_bytes(), || call.has_failed()) else {
                return Err("the run has failed".into());
            };
            if round == 0 {
                theirs = notes.iter().map(|note| Packed::from_bytes(note)).collect();
                rounds = theirs.iter().map(|packed: &Packed| packed.rounds(BUFFER)).max().unwrap_or(0).max(1);
            }
            for (index, &Pull { member, from, to, bytes, slot: waited }) in pulls.iter().enumerate() {
                let is_own = member == self.member;
                let start = if is_own { Some(0) } else { theirs[member].start(from, bytes) };
                let start = start.ok_or_else(|| format!("member {member} has no {bytes} bytes for this one"))?;
                if is_own && round == 0 && bytes > 0 {
                    copy(stream, [lent[from].address, to], bytes, member)?;
                }
                let peer = &state.peers.members[member];
                for (at, ready) in peer.ready[slot].into_iter().enumerate().filter(|_| !is_own) {
                    if let Some(piece) = piece(start, bytes, round * PIECES + at, PIECE) {
                        behind(stream, ready)?;
                        let from = peer.buffers + slot * BUFFER + at * PIECE + piece.buffer;
                        copy(stream, [from, to + piece.range], piece.bytes, member)?;
                    }
                }
                // Whoever waits for a copy waits for those before it too.
                if complete == index && (is_own || start + bytes <= (round + 1) * BUFFER) {
                    complete += 1;
                    waited.map_or(Ok(()), |slot| call.record(slot))?;
                }
            }
            stamp(state.own.member.done[slot], stream)?;
            round += 1;
        }
        state.sources.push_back((state.rounds - 1, sources));
        Ok(())
    }

    /// Closes what is the others', and frees this member's own when they have done the same; all work of the
    /// communicator's stream has ended. Leaks it if they do not come.
    pub(super) fn end(&self, has_failed: impl Fn() -> bool) {
        let State { rounds, sources, peers, own } = std::mem::take(&mut *self.state.lock());
        // SAFETY: the stream lives as long as `own`. An error no longer concerns the run.
        let _ = unsafe { driver::stream::synchronize(own.stream as _) };
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
    /// Before the buffer of a round is filled: lets the stream that fills it wait until the others have copied what was
    /// there, and the compute stream, which orders the reuse of memory, until older sources are copied.
    fn prepare(&mut self, call: Call, number: u64, member: usize) -> Result<(), String> {
        let slot = usize::from(number % 2 == 1);
        if number >= 2 {
            let others = self.peers.members.iter().enumerate().filter(|(other, _)| *other != member);
            let stream = self.own.stream as sys::CUstream;
            others.map(|(_, peer)| peer.done[slot]).try_for_each(|done| behind(stream, done))?;
        }
        while self.sources.front().is_some_and(|(last, _)| last + 2 <= number) {
            // This member's own copies of its source are before `done`.
            call.compute_waits_for(self.own.member.ready[slot][PIECES - 1])?;
            call.compute_waits_for(self.own.member.done[slot])?;
            self.sources.pop_front();
        }
        Ok(())
    }
}

/// Queues a copy between two addresses of what `member` sends.
fn copy(stream: sys::CUstream, [from, to]: [usize; 2], bytes: usize, member: usize) -> Result<(), String> {
    // SAFETY: the callers' ranges are within their buffers, pieces within the members'. A member's buffer is complete
    // after `ready` and stays until `done`, and the target's memory is free after the work that the stream waits for.
    unsafe { driver::memcpy_dtod_async(to as u64, from as u64, bytes, stream) }
        .map_err(|error| format!("{bytes} bytes from member {member}: {error}"))
}
