//! The tensors' files of an open checkpoint, read at positions: one that is truncated meanwhile is an error. A checkpoint in
//! memory has slices in their place.

use std::path::{Path, PathBuf};

use super::super::SliceData;
use super::super::error::{CheckpointError, Result};
use super::super::manifest::SavedFile;
use super::open_file;
use crate::positioned::{PositionedFile, Run};

/// Files that stay open. A checkpoint may have more files than a process may have open, often 1,024; the others are
/// opened for each read.
const STAY_OPEN: usize = 128;

/// The files, by index.
pub(super) struct ShardFiles {
    folder: PathBuf,
    shards: Vec<Shard>,
}

enum Shard {
    /// A file, and its handle if it stays open.
    File(SavedFile, Option<PositionedFile>),
    Memory(SliceData),
}

impl ShardFiles {
    /// No files yet, in the folder of a checkpoint.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_path_buf(), shards: Vec::new() }
    }

    /// Adds a file that is open, and returns its index.
    pub fn add(&mut self, file: SavedFile, opened: PositionedFile) -> usize {
        let stays = self.shards.len() < STAY_OPEN;
        self.shards.push(Shard::File(file, stays.then_some(opened)));
        self.shards.len() - 1
    }

    /// Adds a slice in memory, and returns its index.
    pub fn keep(&mut self, bytes: SliceData) -> usize {
        self.shards.push(Shard::Memory(bytes));
        self.shards.len() - 1
    }

    /// Reads runs of the slice that begins at byte `start` of a file to where they belong in `to`. Fails if the file is
    /// no longer there or ends too early.
    pub fn read(&self, index: usize, start: u64, runs: impl Iterator<Item = Run>, to: &mut [u8]) -> Result<()> {
        let mut runs = runs.peekable();
        if runs.peek().is_none() {
            return Ok(());
        }
        let (saved, stays) = match &self.shards[index] {
            Shard::File(saved, stays) => (saved, stays),
            Shard::Memory(bytes) => {
                let bytes = &bytes[start as usize..];
                runs.for_each(|Run { from, to: at, bytes: count }| {
                    to[at..at + count].copy_from_slice(&bytes[from..from + count]);
                });
                return Ok(());
            }
        };
        let opened = match stays {
            Some(_) => None,
            None => Some(open_file(&self.folder, saved)?),
        };
        let file = stays.as_ref().or(opened.as_ref()).expect("it is open from the start or since now");
        file.read_runs(start, runs, to)
            .map_err(|cause| CheckpointError::io("read", &self.folder.join(&saved.name), cause))
    }
}
