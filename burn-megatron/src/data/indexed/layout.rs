//! The `.idx` file: where its sections lie, and what makes one unacceptable.
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

use super::Dtype;

pub(super) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
pub(super) const HEADER: usize = 34;

/// What is wrong with an index, and at which byte of it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Defect {
    pub byte: usize,
    pub what: String,
}

fn defect<T>(byte: usize, what: impl Into<String>) -> Result<T, Defect> {
    Err(Defect { byte, what: what.into() })
}

/// Sections of a checked index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub dtype: Dtype,
    pub sequences: usize,
    pub boundaries: usize,
    pub multimodal: bool,
}

impl Layout {
    pub fn length(&self, index: &[u8], sequence: usize) -> usize {
        i32_at(index, self.lengths_at() + 4 * sequence) as usize
    }

    pub fn pointer(&self, index: &[u8], sequence: usize) -> usize {
        i64_at(index, self.pointers_at() + 8 * sequence) as usize
    }

    pub fn boundary(&self, index: &[u8], document: usize) -> usize {
        i64_at(index, self.boundaries_at() + 8 * document) as usize
    }

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

    /// Checks header and size: after this, no section reaches past the end of the file.
    pub fn parse(index: &[u8]) -> Result<Self, Defect> {
        let present = &index[..index.len().min(MAGIC.len())];
        if present != &MAGIC[..present.len()] || present.is_empty() {
            return defect(0, "not a Megatron index: it does not start with 'MMIDIDX'");
        }
        if index.len() < HEADER {
            return defect(index.len(), format!("the file ends inside the {HEADER} byte header"));
        }
        let version = u64_at(index, 9);
        if version != VERSION {
            return defect(9, format!("version {version}, only version {VERSION} is known"));
        }
        let Some(dtype) = Dtype::from_code(index[17]) else {
            return defect(17, format!("element type code {}, known are 1 to 8", index[17]));
        };
        let (sequences, boundaries) = (u64_at(index, 18), u64_at(index, 26));
        // Every sequence takes 12 bytes and every boundary 8, so larger counts cannot fit; this also keeps the
        // arithmetic below from overflowing.
        let size = index.len() as u64;
        if sequences > size / 12 {
            return defect(18, format!("{sequences} sequences do not fit into a file of {size} bytes"));
        }
        if boundaries > size / 8 {
            return defect(26, format!("{boundaries} document boundaries do not fit into a file of {size} bytes"));
        }
        if boundaries == 0 {
            return defect(26, "no document boundary; even an index without documents has one");
        }
        let (sequences, boundaries) = (sequences as usize, boundaries as usize);
        let mut layout = Layout { dtype, sequences, boundaries, multimodal: false };
        layout.check_size(index.len())?;
        layout.multimodal = index.len() > layout.end();
        Ok(layout)
    }

    fn check_size(&self, size: usize) -> Result<(), Defect> {
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

    /// Checks every entry and returns the number of tokens.
    pub fn check_entries(&self, index: &[u8]) -> Result<usize, Defect> {
        let mut tokens = 0usize;
        for sequence in 0..self.sequences {
            let byte = self.lengths_at() + 4 * sequence;
            let length = i32_at(index, byte);
            if length < 0 {
                return defect(byte, format!("sequence {sequence} has length {length}"));
            }
            let byte = self.pointers_at() + 8 * sequence;
            let (pointer, expected) = (i64_at(index, byte), (tokens * self.dtype.size()) as i64);
            if pointer != expected {
                let what = format!(
                    "sequence {sequence} starts at byte {pointer} of the .bin, by the lengths it is byte {expected}"
                );
                return defect(byte, what);
            }
            tokens += length as usize;
        }
        let mut previous = 0;
        for document in 0..self.boundaries {
            let byte = self.boundaries_at() + 8 * document;
            let boundary = i64_at(index, byte);
            if document == 0 && boundary != 0 {
                return defect(byte, format!("the first document starts at sequence {boundary} instead of 0"));
            }
            if boundary < previous {
                return defect(byte, format!("document {document} starts at sequence {boundary}, before {previous}"));
            }
            previous = boundary;
        }
        if previous != self.sequences as i64 {
            let what = format!("the last document ends at sequence {previous} of {}", self.sequences);
            return defect(self.end() - 8, what);
        }
        Ok(tokens)
    }
}

fn bytes_at<const N: usize>(index: &[u8], byte: usize) -> [u8; N] {
    index[byte..byte + N].try_into().expect("N bytes")
}

fn u64_at(index: &[u8], byte: usize) -> u64 {
    u64::from_le_bytes(bytes_at(index, byte))
}

fn i64_at(index: &[u8], byte: usize) -> i64 {
    i64::from_le_bytes(bytes_at(index, byte))
}

fn i32_at(index: &[u8], byte: usize) -> i32 {
    i32::from_le_bytes(bytes_at(index, byte))
}
