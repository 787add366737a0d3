//! What the members of a group in several processes of one host have issued, in memory that they share.
//!
//! Each member writes its last operations there, as words, and reads what the others have written under the same
//! number. Whoever comes second notices that the operations differ. Nobody waits for anybody.

use super::{DIMS, DeviceOp, DeviceOpKind, Disagreement};
use crate::comm::one_host::SharedMemory;
use crate::comm::{Group, ReduceOp};
use burn::tensor::DType;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Operations of each member; one that is further ahead of a peer than this is not compared with it.
const SLOTS: usize = 1024;

/// Words before the rows of an all-to-all: the kind with its argument, type and number of dimensions, and the shape.
const HEAD: usize = 1 + DIMS;

/// What GPUs send each other, in an order that gives each type and reduction its number.
const DTYPES: [DType; 13] = [
    DType::F64,
    DType::F32,
    DType::Flex32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
];
const REDUCTIONS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

/// A ring of slots for each member.
pub(crate) struct SharedRecorder {
    memory: SharedMemory,
    members: usize,
}

impl SharedRecorder {
    /// The recorder of `group`, all of whose members call this.
    ///
    /// # Errors
    /// The same for all of them: why the first of them cannot take part.
    fn meet(group: &Group) -> Result<Self, String> {
        let memory = SharedMemory::meet(group, bytes(group.size()))?;
        Ok(Self { memory, members: group.size() })
    }

    /// Notes that `member`, which nobody else calls this for, issues `op` as operation `sequence` of the group, and
    /// compares it with what `peers` have issued.
    ///
    /// # Errors
    /// If one of them has issued something else under this number.
    pub(crate) fn issue(
        &self,
        member: usize,
        sequence: u64,
        op: &DeviceOp,
        peers: impl IntoIterator<Item = usize>,
    ) -> Result<(), Disagreement> {
        let Some(kind) = op.kind_as_word() else { return Ok(()) };
        self.write(member, sequence, kind, op);
        // Of two members that write at the same time, at least one reads what the other has written.
        fence(Ordering::SeqCst);
        for peer in peers {
            if let Some(theirs) = self.read(peer, sequence).filter(|theirs| !op.agrees(member, theirs, peer)) {
                return Err(Disagreement { peer, theirs: Box::new(theirs) });
            }
        }
        Ok(())
    }

    fn write(&self, member: usize, sequence: u64, kind: u64, op: &DeviceOp) {
        let (number, words) = self.slot(member, sequence);
        // Readers see that the slot changes before they can see any of its new words.
        number.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        let shape = op.shape.iter().map(|length| *length as u64);
        let (send, receive) = op.splits();
        let rows = send.iter().chain(receive).map(|rows| *rows as u64);
        let values = std::iter::once(kind).chain(shape).chain(rows);
        words.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        number.store(sequence + 1, Ordering::Release);
    }

    /// What a member has written under this number, if it is there: the member may be behind, or too far ahead.
    fn read(&self, member: usize, sequence: u64) -> Option<DeviceOp> {
        let (number, words) = self.slot(member, sequence);
        if number.load(Ordering::Acquire) != sequence + 1 {
            return None;
        }
        let op = DeviceOp::from_words(words);
        fence(Ordering::Acquire);
        op.filter(|_| number.load(Ordering::Relaxed) == sequence + 1)
    }

    /// The number of a member's operation plus one, 0 while there is none, and its words.
    fn slot(&self, member: usize, sequence: u64) -> (&AtomicU64, &[AtomicU64]) {
        let slot = member * SLOTS + (sequence % SLOTS as u64) as usize;
        // SAFETY: the slot is within the memory, which lives as long as `self`, is aligned to a page, and is accessed as
        // atomic words only.
        let words = unsafe {
            let start = self.memory.start().cast::<AtomicU64>().add(slot * slot_words(self.members));
            std::slice::from_raw_parts(start, 1 + HEAD + 2 * self.members)
        };
        (&words[0], &words[1..])
    }
}

/// Words of a slot: its number, and those of an operation; whole cache lines.
fn slot_words(members: usize) -> usize {
    (1 + HEAD + 2 * members).next_multiple_of(8)
}

fn bytes(members: usize) -> usize {
    size_of::<u64>() * slot_words(members) * SLOTS * members
}

impl DeviceOp {
    /// Kind, type, number of dimensions and the kind's argument in 16 bits each; `None` for a type that no GPU sends.
    fn kind_as_word(&self) -> Option<u64> {
        let (kind, argument) = match &self.kind {
            DeviceOpKind::AllReduce(op) => (0, REDUCTIONS.iter().position(|it| it == op)?),
            DeviceOpKind::AllGather(dim) => (1, *dim),
            DeviceOpKind::ReduceScatter(dim) => (2, *dim),
            DeviceOpKind::Broadcast(root) => (3, *root),
            DeviceOpKind::Reduce(root) => (4, *root),
            DeviceOpKind::AllToAll { .. } => (5, 0),
            DeviceOpKind::Message => (6, 0),
        };
        let dtype = DTYPES.iter().position(|it| *it == self.dtype)?;
        Some([kind, dtype, self.rank, argument].iter().rev().fold(0, |word, part| (word << 16) | *part as u64))
    }

    /// The rows of an all-to-all.
    fn splits(&self) -> (&[usize], &[usize]) {
        match &self.kind {
            DeviceOpKind::AllToAll { send, receive } => (send, receive),
            _ => (&[], &[]),
        }
    }

    /// The operation that a slot holds; anything or `None` if the slot changes meanwhile.
    fn from_words(words: &[AtomicU64]) -> Option<Self> {
        let word = |at: usize| words[at].load(Ordering::Relaxed) as usize;
        let [kind, dtype, rank, argument] = [0, 16, 32, 48].map(|shift| (word(0) >> shift) & 0xffff);
        let (shape, members) = (std::array::from_fn(|dim| word(1 + dim)), (words.len() - HEAD) / 2);
        let kind = match kind {
            0 => DeviceOpKind::AllReduce(*REDUCTIONS.get(argument)?),
            1 => DeviceOpKind::AllGather(argument),
            2 => DeviceOpKind::ReduceScatter(argument),
            3 => DeviceOpKind::Broadcast(argument),
            4 => DeviceOpKind::Reduce(argument),
            5 => {
                let rows = |start: usize| (start..start + members).map(word).collect();
                DeviceOpKind::AllToAll { send: rows(HEAD), receive: rows(HEAD + members) }
            }
            6 => DeviceOpKind::Message,
            _ => return None,
        };
        Some(Self { kind, dtype: *DTYPES.get(dtype)?, rank: rank.min(DIMS), shape })
    }
}

impl Group {
    /// Lets members in several processes of one host compare what they issue on their GPUs from now on. A collective,
    /// before the first of these operations. Where the processes may not share memory, as in several containers, and
    /// between hosts, process 0 compares what they [report](super::ReportedOps).
    pub(crate) fn share_recorder(&self) {
        let Some((world, id)) = &self.world else { return };
        if !self.is_in_one_process()
            && self.is_on_one_host()
            && let Ok(shared) = SharedRecorder::meet(self)
        {
            world.share_recorder(*id, shared);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
