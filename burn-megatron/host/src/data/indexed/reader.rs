//! Reading `.bin`/`.idx`: the index into memory, tokens at their positions.

use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::layout::{IndexFault, Layout};
use super::{Dtype, IndexedError, hex, paths};
use crate::positioned::PositionedFile;

/// The first token of every so many sequences is remembered; those between are found by adding up lengths.
const STRIDE: usize = 64;
/// Tokens of a block that [`IndexedDataset::content`] hashes, and the most blocks.
const BLOCK: usize = 2048;
const BLOCKS: usize = 4096;

/// An opened and fully checked `.bin`/`.idx` pair.
///
/// Opening reads the index once, to check it and to keep its lengths (4 bytes per sequence). Tokens are read at
/// their positions; a file that is truncated meanwhile is an error.
#[derive(Debug)]
pub struct IndexedDataset {
    bin_path: PathBuf,
    bin: PositionedFile,
    layout: Layout,
    lengths: Vec<u32>,
    /// First token of every [`STRIDE`]th sequence.
    starts: Vec<u64>,
    boundaries: Vec<u64>,
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
        let open = |path: &Path| PositionedFile::open(path).map_err(IndexedError::read(path));
        let refuse = |fault| match fault {
            IndexFault::Io(cause) => IndexedError::read(&idx_path)(cause),
            IndexFault::Defect { byte, what } => IndexedError::Index { path: idx_path.clone(), byte, what },
        };
        let index = open(&idx_path)?;
        let layout = Layout::parse(&index).map_err(refuse)?;
        let entries = layout.read_entries(&index).map_err(refuse)?;
        let bin = open(&bin_path)?;
        let (found, expected) = (bin.size() as usize, entries.tokens * layout.dtype.size());
        if found != expected {
            return Err(IndexedError::Tokens { path: bin_path, found, expected });
        }
        let mut next = 0;
        let starts = entries.lengths.chunks(STRIDE).map(|chunk| {
            let start = next;
            next += chunk.iter().map(|&length| u64::from(length)).sum::<u64>();
            start
        });
        let starts = starts.collect();
        let (lengths, boundaries, num_tokens) = (entries.lengths, entries.boundaries, entries.tokens);
        Ok(Self { bin_path, bin, layout, lengths, starts, boundaries, num_tokens })
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

    /// Tokens in each sequence.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// Tokens in a sequence.
    ///
    /// # Panics
    /// When there is no such sequence.
    pub fn sequence_length(&self, sequence: usize) -> usize {
        assert!(sequence < self.num_sequences(), "sequence {sequence} of {}", self.num_sequences());
        self.lengths[sequence] as usize
    }

    /// The sequences of a document.
    ///
    /// # Panics
    /// When there is no such document.
    pub fn document(&self, document: usize) -> Range<usize> {
        assert!(document < self.num_documents(), "document {document} of {}", self.num_documents());
        match self.boundaries.is_empty() {
            true => document..document + 1,
            false => self.boundaries[document] as usize..self.boundaries[document + 1] as usize,
        }
    }

    /// All tokens of a sequence.
    ///
    /// # Errors
    /// When the `.bin` file can no longer be read.
    ///
    /// # Panics
    /// When there is no such sequence.
    pub fn sequence(&self, sequence: usize) -> Result<Vec<i64>, IndexedError> {
        let length = self.sequence_length(sequence);
        let mut tokens = Vec::with_capacity(length);
        self.read(sequence, 0..length, &mut tokens)?;
        Ok(tokens)
    }

    /// Appends a range of the tokens of a sequence to `out`.
    ///
    /// # Errors
    /// When the `.bin` file can no longer be read.
    ///
    /// # Panics
    /// When the range reaches past the sequence.
    pub fn read(&self, sequence: usize, range: Range<usize>, out: &mut Vec<i64>) -> Result<(), IndexedError> {
        let length = self.sequence_length(sequence);
        assert!(range.end <= length, "tokens {range:?} of sequence {sequence}, which has {length}");
        let start = self.first_token(sequence) + range.start;
        self.read_tokens(start..start + range.len(), out)
    }

    fn first_token(&self, sequence: usize) -> usize {
        let block = sequence / STRIDE;
        let before: u64 = self.lengths[block * STRIDE..sequence].iter().map(|&length| u64::from(length)).sum();
        (self.starts[block] + before) as usize
    }

    fn read_tokens(&self, tokens: Range<usize>, out: &mut Vec<i64>) -> Result<(), IndexedError> {
        let size = self.dtype().size();
        let bytes = self.bin.read((tokens.start * size) as u64, tokens.len() * size);
        self.dtype().decode(&bytes.map_err(IndexedError::read(&self.bin_path))?, out);
        Ok(())
    }

    /// A hash that tells datasets apart: of the lengths of all sequences and of blocks of tokens from all over the
    /// file, which are all tokens of a file of up to eight million.
    ///
    /// # Errors
    /// When the `.bin` file can no longer be read.
    pub fn content(&self) -> Result<String, IndexedError> {
        let mut hash = Sha256::new();
        hash.update(bytemuck::cast_slice(&self.lengths));
        let every = self.num_tokens.div_ceil(BLOCK).div_ceil(BLOCKS).max(1) * BLOCK;
        let mut tokens = Vec::with_capacity(BLOCK);
        for start in (0..self.num_tokens).step_by(every) {
            tokens.clear();
            self.read_tokens(start..(start + BLOCK).min(self.num_tokens), &mut tokens)?;
            hash.update(bytemuck::cast_slice(&tokens));
        }
        Ok(hex(&hash.finalize()[..16]))
    }
}
