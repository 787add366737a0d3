//! The `.idx` file: where its sections are, and what makes one unacceptable.
//!
//! ```text
//! byte        content (little-endian, not aligned)
//! 0           9 bytes "MMIDIDX\0\0"
//! 9           u64     version, 1
//! 17          u8      element type of the .bin
//! 18          u64     N, number of sequences
//! 26          u64     D, number of document boundaries (documents + 1)
//! 34          i32[N]  tokens per sequence
//! 34+4N       i64[N]  where each sequence starts in the .bin, in bytes
//! 34+12N      i64[D]  first sequence of each document; the first is 0, the last is N
//! 34+12N+8D   i8[N]   modes, in multimodal files only
//! ```

use std::io::{self, BufReader, Read};

use super::Dtype;
use crate::positioned::PositionedFile;

pub(super) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
pub(super) const HEADER: usize = 34;

/// Why an index is not accepted.
#[derive(Debug)]
pub(super) enum IndexFault {
    /// It cannot be read.
    Io(io::Error),
    /// It is wrong at a byte.
    Defect { byte: usize, what: String },
}

impl From<io::Error> for IndexFault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn defect<T>(byte: usize, what: impl Into<String>) -> Result<T, IndexFault> {
    Err(IndexFault::Defect { byte, what: what.into() })
}

/// Sections of an index whose header and size were checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub dtype: Dtype,
    pub sequences: usize,
    pub boundaries: usize,
    pub multimodal: bool,
}

/// The entries of a checked index.
pub(super) struct Entries {
    /// Tokens of each sequence.
    pub lengths: Vec<u32>,
    /// First sequence of each document, and the end of the last one; empty where every document is one sequence.
    pub boundaries: Vec<u64>,
    /// Tokens of all sequences.
    pub tokens: usize,
}

impl Layout {
    fn lengths_at(&self) -> usize {
        HEADER
    }

    fn pointers_at(&self) -> usize {
        HEADER + 4 * self.sequences
    }

    fn boundaries_at(&self) -> usize {
        HEADER + 12 * self.sequences
    }

    fn end(&self) -> usize {
        HEADER + 12 * self.sequences + 8 * self.boundaries
    }

    /// Checks the header and the size of an index: after this, no section reaches past the end of the file.
    pub fn parse(index: &PositionedFile) -> Result<Self, IndexFault> {
        let size = index.size() as usize;
        let header = index.read(0, size.min(HEADER))?;
        let present = &header[..size.min(MAGIC.len())];
        if present != &MAGIC[..present.len()] || present.is_empty() {
            return defect(0, "not a Megatron index: it does not start with 'MMIDIDX'");
        }
        if size < HEADER {
            return defect(size, format!("the file ends inside the {HEADER} byte header"));
        }
        let number = |byte: usize| u64::from_le_bytes(header[byte..byte + 8].try_into().expect("8 bytes"));
        let version = number(9);
        if version != VERSION {
            return defect(9, format!("version {version}, only version {VERSION} is known"));
        }
        let Some(dtype) = Dtype::from_code(header[17]) else {
            return defect(17, format!("element type code {}, known are 1 to 8", header[17]));
        };
        let (sequences, boundaries) = (number(18), number(26));
        // Every sequence takes 12 bytes and every boundary 8, so larger counts cannot fit; this also keeps the
        // arithmetic below from overflowing.
        let bytes = size as u64;
        if sequences > bytes / 12 {
            return defect(18, format!("{sequences} sequences do not fit into a file of {size} bytes"));
        }
        if boundaries > bytes / 8 {
            return defect(26, format!("{boundaries} document boundaries do not fit into a file of {size} bytes"));
        }
        if boundaries == 0 {
            return defect(26, "no document boundary; even an index without documents has one");
        }
        let (sequences, boundaries) = (sequences as usize, boundaries as usize);
        let mut layout = Layout { dtype, sequences, boundaries, multimodal: false };
        layout.check_size(size)?;
        layout.multimodal = size > layout.end();
        Ok(layout)
    }

    fn check_size(&self, size: usize) -> Result<(), IndexFault> {
        let end = self.end();
        let sections = [
            ("sequence lengths", self.lengths_at(), self.pointers_at()),
            ("sequence pointers", self.pointers_at(), self.boundaries_at()),
            ("document boundaries", self.boundaries_at(), end),
        ];
        if let Some((name, from, to)) = sections.into_iter().find(|(.., to)| size < *to) {
            return defect(size, format!("the file ends inside the {name} (bytes {from} to {to})"));
        }
        if size > end && size != end + self.sequences {
            return defect(end, format!("{} bytes follow after the last document boundary", size - end));
        }
        Ok(())
    }

    /// Reads every entry once and checks it. Pointers are not kept: they are the sums of the lengths.
    pub fn read_entries(&self, index: &PositionedFile) -> Result<Entries, IndexFault> {
        let (lengths, tokens) = self.read_lengths(index)?;
        Ok(Entries { lengths, boundaries: self.read_boundaries(index)?, tokens })
    }

    fn read_lengths(&self, index: &PositionedFile) -> Result<(Vec<u32>, usize), IndexFault> {
        let (mut lengths, mut tokens) = (Vec::with_capacity(self.sequences), 0usize);
        let mut stored = BufReader::new(index.reader(self.lengths_at() as u64));
        let mut pointers = BufReader::new(index.reader(self.pointers_at() as u64));
        for sequence in 0..self.sequences {
            let length = i32::from_le_bytes(next(&mut stored)?);
            let Ok(length) = u32::try_from(length) else {
                return defect(self.lengths_at() + 4 * sequence, format!("sequence {sequence} has length {length}"));
            };
            let (pointer, expected) = (i64::from_le_bytes(next(&mut pointers)?), (tokens * self.dtype.size()) as i64);
            if pointer != expected {
                let what = format!(
                    "sequence {sequence} starts at byte {pointer} of the .bin, by the lengths it is byte {expected}"
                );
                return defect(self.pointers_at() + 8 * sequence, what);
            }
            lengths.push(length);
            tokens += length as usize;
        }
        Ok((lengths, tokens))
    }

    fn read_boundaries(&self, index: &PositionedFile) -> Result<Vec<u64>, IndexFault> {
        let mut stored = BufReader::new(index.reader(self.boundaries_at() as u64));
        let (mut boundaries, mut previous) = (Vec::new(), 0);
        for document in 0..self.boundaries {
            let boundary = i64::from_le_bytes(next(&mut stored)?);
            let byte = self.boundaries_at() + 8 * document;
            if document == 0 && boundary != 0 {
                return defect(byte, format!("the first document starts at sequence {boundary} instead of 0"));
            }
            if boundary < previous {
                return defect(byte, format!("document {document} starts at sequence {boundary}, before {previous}"));
            }
            if boundary != document as i64 && boundaries.is_empty() {
                boundaries = (0..document as u64).collect();
            }
            if boundary != document as i64 || !boundaries.is_empty() {
                boundaries.push(boundary as u64);
            }
            previous = boundary;
        }
        if previous != self.sequences as i64 {
            let what = format!("the last document ends at sequence {previous} of {}", self.sequences);
            return defect(self.end() - 8, what);
        }
        Ok(boundaries)
    }
}

/// The next entry of a section.
fn next<const N: usize>(section: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    section.read_exact(&mut bytes)?;
    Ok(bytes)
}
