//! What processes send each other, as bytes on a TCP connection.
//!
//! A frame is the length of its head, the number of its blobs and their lengths, then the head as MessagePack and the
//! blobs as they are; numbers are little-endian.

use crate::comm::codec;
use crate::comm::failure::{OpRecord, RunError};
#[cfg(any(feature = "cuda", test))]
use crate::comm::recorder::Report;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Bytes of a tensor or a value; shared where process 0 forwards them to several processes.
pub(crate) type Blob = Arc<Vec<u8>>;

/// One collective of a group that spans processes, the same in all of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct OpKey {
    /// Name and members of the group.
    pub group: String,
    /// How many collectives the group had before.
    pub sequence: u64,
}

/// One member's call of a collective; its input is a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Contribution {
    /// Position in the group.
    pub member: usize,
    /// Global rank.
    pub rank: usize,
    /// The operation that the member has called.
    pub record: OpRecord,
}

/// A member of a group and its global rank.
pub(crate) type Member = (usize, usize);

/// What a frame means.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Head {
    /// The sender is alive.
    Heartbeat,
    /// To process 0: the calls of the sender's members, with an input each. `processes` are those that have members.
    Contribute { op: OpKey, processes: Vec<usize>, contributions: Vec<Contribution> },
    /// From process 0, for the processes `to`, which it reaches by the receiver: the inputs of the members of the other
    /// processes, and of their own if they are several.
    Gathered { op: OpKey, members: Vec<Member>, to: Vec<usize> },
    /// To process 0: the process above the sender can send to it.
    Linked,
    /// To process 0: what the sender's ranks have issued on their GPUs.
    #[cfg(any(feature = "cuda", test))]
    Issued { reports: Vec<Report> },
    /// A tensor from one member to another, in one blob; `receiver` is the other's global rank.
    Message { group: String, from: usize, to: usize, receiver: usize, record: OpRecord },
    /// To process 0: a rank of the sender has failed. From process 0: this is the first failure of the run.
    Failed(RunError),
    /// To process 0: all ranks of the sender have finished. From process 0: all ranks have.
    Finished,
}

/// A message between two processes.
#[derive(Debug)]
pub(crate) struct Frame {
    pub head: Head,
    pub blobs: Vec<Blob>,
}

impl From<Head> for Frame {
    fn from(head: Head) -> Self {
        Self { head, blobs: Vec::new() }
    }
}

/// Most bytes of a head: that of a failure has a line for each rank.
const HEAD: u32 = 1 << 24;
/// Most blobs of a frame: a process sends one for each of its members of a group.
const BLOBS: u32 = 1 << 16;

impl Frame {
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let head = codec::to_bytes(&self.head);
        let mut start = Vec::with_capacity(8 + 8 * self.blobs.len() + head.len());
        start.extend((head.len() as u32).to_le_bytes());
        start.extend((self.blobs.len() as u32).to_le_bytes());
        self.blobs.iter().for_each(|blob| start.extend((blob.len() as u64).to_le_bytes()));
        start.extend(head);
        out.write_all(&start)?;
        self.blobs.iter().try_for_each(|blob| out.write_all(blob))
    }

    /// # Errors
    /// Of kind `InvalidData` if the bytes are no frame.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let mut counts = [0; 8];
        from.read_exact(&mut counts)?;
        let [length, blobs] = [0, 4].map(|at| u32::from_le_bytes(counts[at..at + 4].try_into().expect("four bytes")));
        if length > HEAD || blobs > BLOBS {
            return Err(bad(format!("a frame with a head of {length} bytes and {blobs} blobs")));
        }
        let lengths = read_bytes(from, 8 * u64::from(blobs))?;
        let head = codec::from_bytes(&read_bytes(from, length.into())?).map_err(bad)?;
        let blob = |length: &[u8]| {
            let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
            read_bytes(from, length).map(Arc::new)
        };
        Ok(Self { head, blobs: lengths.chunks_exact(8).map(blob).collect::<io::Result<_>>()? })
    }
}

/// So many bytes. The buffer grows as they arrive: a wrong length must not take all memory.
pub(super) fn read_bytes(from: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match from.by_ref().take(length).read_to_end(&mut bytes)? as u64 == length {
        true => Ok(bytes),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
