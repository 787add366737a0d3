//! What processes say to each other, as bytes on a TCP connection.
//!
//! A frame is the length of its head, the number of its blobs and their lengths, then the head as MessagePack and the
//! blobs as they are; numbers are little-endian.

use crate::comm::codec;
use crate::comm::failure::{OpRecord, RunError};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Bytes of a tensor or a value; shared where the hub passes them on to several processes.
pub(crate) type Blob = Arc<Vec<u8>>;

/// One meeting of a group that spans processes, the same in all of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct MeetingKey {
    /// Name and members of the group.
    pub group: String,
    /// How many meetings the group had before.
    pub sequence: u64,
}

/// What one member brings to a meeting, beside its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// Position in the group.
    pub member: usize,
    /// Global rank.
    pub rank: usize,
    /// What the member does.
    pub record: OpRecord,
}

/// What a frame means.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Head {
    /// Nothing has happened; somebody lives at this end.
    Alive,
    /// To the hub: what this process's members bring; a blob each. `processes` are those that have members.
    Bring { meeting: MeetingKey, processes: Vec<usize>, parts: Vec<Part> },
    /// From the hub: what the members of the other processes have brought; a blob each.
    Met { meeting: MeetingKey, members: Vec<usize> },
    /// A message from one member to another, in one blob; `receiver` is the other's global rank.
    Mail { group: String, from: usize, to: usize, receiver: usize, record: OpRecord },
    /// To the hub: a rank of this process has failed. From the hub: this is the first failure of the run.
    Failed(RunError),
    /// To the hub: all ranks of this process have finished. From the hub: all ranks have.
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

impl Frame {
    /// Heads and counts beyond this come from something that is not us.
    pub const SANE: u32 = 1 << 26;

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

    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let mut counts = [0; 8];
        from.read_exact(&mut counts)?;
        let [length, blobs] = [0, 4].map(|at| u32::from_le_bytes(counts[at..at + 4].try_into().expect("four bytes")));
        if length > Self::SANE || blobs > Self::SANE {
            return Err(bad(format!("a message of {length} bytes and {blobs} parts")));
        }
        let mut lengths = vec![0; 8 * blobs as usize];
        from.read_exact(&mut lengths)?;
        let mut head = vec![0; length as usize];
        from.read_exact(&mut head)?;
        let head = codec::from_bytes(&head).map_err(bad)?;
        let blob = |length: &[u8]| {
            let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
            let mut blob = Vec::new();
            // Grows as bytes come: a wrong length must not take all memory.
            match from.by_ref().take(length).read_to_end(&mut blob)? as u64 == length {
                true => Ok(Arc::new(blob)),
                false => Err(io::ErrorKind::UnexpectedEof.into()),
            }
        };
        Ok(Self { head, blobs: lengths.chunks_exact(8).map(blob).collect::<io::Result<_>>()? })
    }
}
