//! Writing `.bin`/`.idx`, byte for byte as Megatron's builder does.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::layout::{MAGIC, VERSION};
use super::lock::PrefixLock;
use super::{Dtype, IndexedError, hex, paths};
use crate::partial_file::{PARTIAL, folder_of, hidden, partial};

/// What a finished writer wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedSummary {
    /// Sequences written.
    pub sequences: usize,
    /// Documents written, empty ones included.
    pub documents: usize,
    /// Tokens written.
    pub tokens: usize,
    /// Bytes of the `.bin` file.
    pub bytes: usize,
    /// Hash of all tokens and of the lengths of the sequences.
    pub content: String,
}

/// Writes sequences and documents to a `.bin`/`.idx` pair.
///
/// Both files appear under their names only in [`finish`](Self::finish), so a run that is cut off leaves no dataset
/// that looks whole. Until then the prefix is locked: another writer of it is refused.
#[derive(Debug)]
pub struct IndexedWriter {
    bin: PathBuf,
    idx: PathBuf,
    dtype: Dtype,
    file: BufWriter<NamedTempFile>,
    lengths: Vec<i32>,
    boundaries: Vec<i64>,
    buffer: Vec<u8>,
    bytes: usize,
    hash: Sha256,
    lock: PrefixLock,
}

impl IndexedWriter {
    /// Starts `PREFIX.bin` and `PREFIX.idx`; missing folders are created.
    ///
    /// # Errors
    /// When the disk refuses, or another program writes the same prefix.
    pub fn create(prefix: impl AsRef<Path>, dtype: Dtype) -> Result<Self, IndexedError> {
        let (bin, idx) = paths(prefix.as_ref());
        let folder = folder_of(&bin);
        fs::create_dir_all(folder).map_err(IndexedError::write(folder))?;
        let lock = PrefixLock::take(folder.join(hidden(&bin, ".lock")), &bin)?;
        // Only programs that were killed have left any: a living one would hold the lock.
        for path in [&bin, &idx] {
            remove_partial(path).map_err(IndexedError::write(folder))?;
        }
        let file = partial(&bin).map_err(IndexedError::write(&bin))?;
        Ok(Self {
            bin,
            idx,
            dtype,
            file: BufWriter::with_capacity(1 << 20, file),
            lengths: Vec::new(),
            boundaries: vec![0],
            buffer: Vec::new(),
            bytes: 0,
            hash: Sha256::new(),
            lock,
        })
    }

    /// Element type of the `.bin` file.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Appends a sequence to the current document.
    ///
    /// # Errors
    /// When a token id does not fit into the element type, or the disk refuses.
    pub fn push_sequence<T: Copy + Into<i64>>(&mut self, tokens: &[T]) -> Result<(), IndexedError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        for &token in tokens {
            let value = token.into();
            if !self.dtype.holds(value) {
                return Err(IndexedError::Value { path: self.bin.clone(), value, dtype: self.dtype });
            }
            self.dtype.encode(value, &mut buffer);
        }
        self.push_encoded(&buffer)?;
        self.buffer = buffer;
        Ok(())
    }

    /// Appends a sequence whose tokens have the element type already.
    pub(in crate::data) fn push_encoded(&mut self, tokens: &[u8]) -> Result<(), IndexedError> {
        let length = tokens.len() / self.dtype.size();
        let Ok(length) = i32::try_from(length) else {
            return Err(IndexedError::TooLong { path: self.bin.clone(), length });
        };
        self.file.write_all(tokens).map_err(IndexedError::write(&self.bin))?;
        self.hash.update(tokens);
        self.bytes += tokens.len();
        self.lengths.push(length);
        Ok(())
    }

    /// Ends the current document; one without sequences becomes an empty document.
    pub fn end_document(&mut self) {
        self.boundaries.push(self.lengths.len() as i64);
    }

    /// Writes the index and gives both files their names. Sequences after the last
    /// [`end_document`](Self::end_document) become a last document.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn finish(self) -> Result<IndexedSummary, IndexedError> {
        self.complete()?.publish()
    }

    /// Writes everything that belongs to the pair, under temporary names.
    pub(in crate::data) fn complete(mut self) -> Result<CompletePair, IndexedError> {
        if self.boundaries.last() != Some(&(self.lengths.len() as i64)) {
            self.end_document();
        }
        let index = self.write_index().map_err(IndexedError::write(&self.idx))?;
        let Self { bin, idx, dtype, file, lengths, boundaries, bytes, mut hash, lock, .. } = self;
        let file = file.into_inner().map_err(|error| IndexedError::write(&bin)(error.into_error()))?;
        // After a power failure a file that has its name has its contents too.
        file.as_file().sync_all().map_err(IndexedError::write(&bin))?;
        hash.update(bytemuck::cast_slice(&lengths));
        let summary = IndexedSummary {
            sequences: lengths.len(),
            documents: boundaries.len() - 1,
            tokens: bytes / dtype.size(),
            bytes,
            content: hex(&hash.finalize()[..16]),
        };
        Ok(CompletePair { files: [(bin, file), (idx, index)], summary, _lock: lock })
    }

    fn write_index(&self) -> io::Result<NamedTempFile> {
        let mut file = BufWriter::new(partial(&self.idx)?);
        file.write_all(MAGIC)?;
        file.write_all(&VERSION.to_le_bytes())?;
        file.write_all(&[self.dtype.code()])?;
        file.write_all(&(self.lengths.len() as u64).to_le_bytes())?;
        file.write_all(&(self.boundaries.len() as u64).to_le_bytes())?;
        for length in &self.lengths {
            file.write_all(&length.to_le_bytes())?;
        }
        let mut pointer = 0i64;
        for &length in &self.lengths {
            file.write_all(&pointer.to_le_bytes())?;
            pointer += i64::from(length) * self.dtype.size() as i64;
        }
        for boundary in &self.boundaries {
            file.write_all(&boundary.to_le_bytes())?;
        }
        let file = file.into_inner().map_err(|error| error.into_error())?;
        file.as_file().sync_all()?;
        Ok(file)
    }
}

/// A pair that is on disk, but not under its names yet.
pub(in crate::data) struct CompletePair {
    files: [(PathBuf, NamedTempFile); 2],
    summary: IndexedSummary,
    /// Released after both files have their names.
    _lock: PrefixLock,
}

impl CompletePair {
    /// Gives both files their names.
    pub fn publish(self) -> Result<IndexedSummary, IndexedError> {
        for (path, file) in self.files {
            file.persist(&path).map_err(|error| IndexedError::write(&path)(error.error))?;
        }
        Ok(self.summary)
    }
}

/// Removes what writers of `path` have left that were killed; a link is removed, not what it points to.
fn remove_partial(path: &Path) -> io::Result<()> {
    let start = hidden(path, ".");
    for entry in fs::read_dir(folder_of(path))? {
        let entry = entry?;
        let name = entry.file_name();
        let bytes = name.as_encoded_bytes();
        let random =
            bytes.strip_prefix(start.as_encoded_bytes()).and_then(|rest| rest.strip_suffix(PARTIAL.as_bytes()));
        // With a point it belongs to a longer prefix.
        if random.is_some_and(|random| !random.contains(&b'.')) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
