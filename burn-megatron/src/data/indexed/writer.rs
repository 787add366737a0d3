//! Writing `.bin`/`.idx`, byte for byte as Megatron's builder does.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::layout::{MAGIC, VERSION};
use super::{Dtype, IndexedError, paths, with_suffix};

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
}

/// Writes sequences and documents to a `.bin`/`.idx` pair.
///
/// Both files appear under their names only in [`finish`](Self::finish), so a run that is cut off leaves no dataset
/// that looks whole.
#[derive(Debug)]
pub struct IndexedWriter {
    bin: PathBuf,
    idx: PathBuf,
    dtype: Dtype,
    file: BufWriter<File>,
    lengths: Vec<i32>,
    boundaries: Vec<i64>,
    buffer: Vec<u8>,
    bytes: usize,
}

impl IndexedWriter {
    /// Starts `PREFIX.bin` and `PREFIX.idx`; missing folders are created.
    pub fn create(prefix: impl AsRef<Path>, dtype: Dtype) -> Result<Self, IndexedError> {
        let (bin, idx) = paths(prefix.as_ref());
        if let Some(folder) = bin.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(|cause| IndexedError::Io { path: folder.to_path_buf(), cause })?;
        }
        let partial = partial(&bin);
        let file = File::create(&partial).map_err(|cause| IndexedError::Io { path: partial, cause })?;
        Ok(Self {
            bin,
            idx,
            dtype,
            file: BufWriter::with_capacity(1 << 20, file),
            lengths: Vec::new(),
            boundaries: vec![0],
            buffer: Vec::new(),
            bytes: 0,
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
        let Ok(length) = i32::try_from(tokens.len()) else {
            return Err(IndexedError::TooLong { path: self.bin.clone(), length: tokens.len() });
        };
        self.buffer.clear();
        for &token in tokens {
            let value = token.into();
            if !self.dtype.holds(value) {
                return Err(IndexedError::Value { path: self.bin.clone(), value, dtype: self.dtype });
            }
            self.dtype.encode(value, &mut self.buffer);
        }
        self.file.write_all(&self.buffer).map_err(|cause| self.io(&self.bin, cause))?;
        self.bytes += self.buffer.len();
        self.lengths.push(length);
        Ok(())
    }

    /// Ends the current document; one without sequences becomes an empty document.
    pub fn end_document(&mut self) {
        self.boundaries.push(self.lengths.len() as i64);
    }

    /// Writes the index and gives both files their names. Sequences after the last
    /// [`end_document`](Self::end_document) become a last document.
    pub fn finish(mut self) -> Result<IndexedSummary, IndexedError> {
        if self.boundaries.last() != Some(&(self.lengths.len() as i64)) {
            self.end_document();
        }
        // After a power failure a file that has its name has its contents too.
        self.file.flush().and_then(|()| self.file.get_ref().sync_all()).map_err(|cause| self.io(&self.bin, cause))?;
        let index = partial(&self.idx);
        self.write_index(&index).map_err(|cause| self.io(&index, cause))?;
        for path in [&self.bin, &self.idx] {
            fs::rename(partial(path), path).map_err(|cause| self.io(path, cause))?;
        }
        Ok(IndexedSummary {
            sequences: self.lengths.len(),
            documents: self.boundaries.len() - 1,
            tokens: self.bytes / self.dtype.size(),
            bytes: self.bytes,
        })
    }

    fn write_index(&self, path: &Path) -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
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
        file.flush()?;
        file.get_ref().sync_all()
    }

    fn io(&self, path: &Path, cause: std::io::Error) -> IndexedError {
        IndexedError::Io { path: path.to_path_buf(), cause }
    }
}

impl Drop for IndexedWriter {
    fn drop(&mut self) {
        // After `finish` these are gone; otherwise nobody can use them.
        for path in [&self.bin, &self.idx] {
            let _ = fs::remove_file(partial(path));
        }
    }
}

fn partial(path: &Path) -> PathBuf {
    with_suffix(path, ".partial")
}
