//! Reading `.bin`/`.idx` through memory maps.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::layout::Layout;
use super::{Dtype, IndexedError, paths};

/// An opened and fully checked `.bin`/`.idx` pair.
///
/// Opening reads the index once to check it; afterwards every access is a few reads at known places.
#[derive(Debug)]
pub struct IndexedDataset {
    bin_path: PathBuf,
    index: Mmap,
    tokens: Mmap,
    layout: Layout,
    num_tokens: usize,
}

impl IndexedDataset {
    /// Opens `PREFIX.bin` and `PREFIX.idx`.
    ///
    /// # Errors
    /// When a file is missing, or when the index is truncated, inconsistent or foreign: the error says what is wrong
    /// at which byte.
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self, IndexedError> {
        let (bin_path, idx_path) = paths(prefix.as_ref());
        let index = map(&idx_path)?;
        let refuse = |defect: super::layout::Defect| IndexedError::Index {
            path: idx_path.clone(),
            byte: defect.byte,
            what: defect.what,
        };
        let layout = Layout::parse(&index).map_err(refuse)?;
        let num_tokens = layout.check_entries(&index).map_err(refuse)?;
        let tokens = map(&bin_path)?;
        let expected = num_tokens * layout.dtype.size();
        if tokens.len() != expected {
            return Err(IndexedError::Tokens { path: bin_path, found: tokens.len(), expected });
        }
        Ok(Self { bin_path, index, tokens, layout, num_tokens })
    }

    /// Element type of the `.bin` file.
    pub fn dtype(&self) -> Dtype {
        self.layout.dtype
    }

    /// Number of sequences.
    pub fn num_sequences(&self) -> usize {
        self.layout.sequences
    }

    /// Number of documents; a document is a run of sequences, and may be empty.
    pub fn num_documents(&self) -> usize {
        self.layout.boundaries - 1
    }

    /// Number of tokens in all sequences.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Whether the index carries a mode per sequence, as Megatron's multimodal builder writes.
    pub fn is_multimodal(&self) -> bool {
        self.layout.multimodal
    }

    /// The `.bin` file.
    pub fn bin_path(&self) -> &Path {
        &self.bin_path
    }

    /// Tokens in a sequence.
    ///
    /// # Panics
    /// When there is no such sequence.
    pub fn sequence_length(&self, sequence: usize) -> usize {
        assert!(sequence < self.num_sequences(), "sequence {sequence} of {}", self.num_sequences());
        self.layout.length(&self.index, sequence)
    }

    /// The sequences of a document.
    ///
    /// # Panics
    /// When there is no such document.
    pub fn document(&self, document: usize) -> Range<usize> {
        assert!(document < self.num_documents(), "document {document} of {}", self.num_documents());
        self.layout.boundary(&self.index, document)..self.layout.boundary(&self.index, document + 1)
    }

    /// All tokens of a sequence.
    pub fn sequence(&self, sequence: usize) -> Vec<i64> {
        let length = self.sequence_length(sequence);
        let mut tokens = Vec::with_capacity(length);
        self.read(sequence, 0..length, &mut tokens);
        tokens
    }

    /// Appends the tokens of a part of a sequence to `out`.
    ///
    /// # Panics
    /// When the range reaches past the sequence.
    pub fn read(&self, sequence: usize, range: Range<usize>, out: &mut Vec<i64>) {
        let length = self.sequence_length(sequence);
        assert!(range.end <= length, "tokens {range:?} of sequence {sequence}, which has {length}");
        let (size, start) = (self.dtype().size(), self.layout.pointer(&self.index, sequence));
        self.dtype().decode(&self.tokens[start + range.start * size..start + range.end * size], out);
    }
}

fn map(path: &Path) -> Result<Mmap, IndexedError> {
    let io = |cause| IndexedError::Io { path: path.to_path_buf(), cause };
    let file = File::open(path).map_err(io)?;
    // SAFETY: a map is sound as long as nobody truncates the file while it is open; datasets are written under a
    // temporary name and renamed, never changed in place.
    unsafe { Mmap::map(&file) }.map_err(io)
}
