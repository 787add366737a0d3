//! The tensors' files of an open checkpoint, read at positions: one that is truncated meanwhile is an error.

use std::io;
use std::path::{Path, PathBuf};

use super::super::boxes::Run;
use super::super::error::CheckpointError;
use super::super::manifest::SavedFile;
use super::open_file;
use crate::positioned::PositionedFile;

/// Files that stay open. A checkpoint may have more files than a process may have open, often 1,024; the others are
/// opened for each read.
const STAY_OPEN: usize = 128;
/// Runs of at least so many bytes are read where they belong. Shorter ones are read together and copied.
const LONG: usize = 64 << 10;
/// Bytes between two short runs that are read along with them: no slower than a second call of the system.
const GAP: usize = 16 << 10;
/// Bytes that are read at a time for short runs.
const BLOCK: usize = 1 << 20;

/// The files, by index.
pub(super) struct ShardFiles {
    folder: PathBuf,
    files: Vec<(SavedFile, Option<PositionedFile>)>,
}

impl ShardFiles {
    /// No files yet, in the folder of a checkpoint.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_path_buf(), files: Vec::new() }
    }

    /// Adds a file that is open, and returns its index.
    pub fn add(&mut self, file: SavedFile, opened: PositionedFile) -> usize {
        let stays = self.files.len() < STAY_OPEN;
        self.files.push((file, stays.then_some(opened)));
        self.files.len() - 1
    }

    /// Reads runs of the slice that begins at byte `start` of a file to where they belong in `to`.
    ///
    /// # Errors
    /// If the file is no longer there or ends too early.
    pub fn read(
        &self,
        index: usize,
        start: u64,
        runs: impl Iterator<Item = Run>,
        to: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let mut runs = runs.peekable();
        if runs.peek().is_none() {
            return Ok(());
        }
        let (saved, stays) = &self.files[index];
        let opened = match stays {
            Some(_) => None,
            None => Some(open_file(&self.folder, saved)?),
        };
        let file = stays.as_ref().or(opened.as_ref()).expect("it is open from the start or since now");
        read_runs(file, start, runs, to)
            .map_err(|cause| CheckpointError::io("read", &self.folder.join(&saved.name), cause))
    }
}

fn read_runs(file: &PositionedFile, start: u64, runs: impl Iterator<Item = Run>, to: &mut [u8]) -> io::Result<()> {
    let mut runs = runs.peekable();
    let (mut block, mut together) = (Vec::new(), Vec::new());
    while let Some(first) = runs.next() {
        if first.bytes >= LONG {
            file.read_into(start + first.from as u64, &mut to[first.to..][..first.bytes])?;
            continue;
        }
        together.clear();
        together.push(first);
        let mut end = first.from + first.bytes;
        let near = |end: usize, run: &Run| {
            run.bytes < LONG && run.from <= end + GAP && run.from + run.bytes <= first.from + BLOCK
        };
        while let Some(run) = runs.next_if(|run| near(end, run)) {
            end = run.from + run.bytes;
            together.push(run);
        }
        block.resize(end - first.from, 0);
        file.read_into(start + first.from as u64, &mut block)?;
        for run in &together {
            to[run.to..][..run.bytes].copy_from_slice(&block[run.from - first.from..][..run.bytes]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::super::boxes;
    use super::*;

    /// Short runs in one block, short runs that are too far from each other, runs over blocks, and long ones.
    #[test]
    fn runs_of_any_length_and_distance_arrive_where_they_belong() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let contents: Vec<u8> = (0..3u32 << 20).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect();
        std::fs::write(&path, [&[0; 24], &contents[..]].concat()).unwrap();
        let file = PositionedFile::open(&path).unwrap();
        for (shape, wanted) in [
            ([3, 1 << 20], [0..3, 0..1 << 20]),
            ([3, 1 << 20], [0..3, 77..1 << 19]),
            ([3 << 10, 1 << 10], [5..3000, 100..200]),
            ([48, 1 << 16], [1..47, 9..10]),
            ([48, 1 << 16], [1..47, 9..65000]),
            ([3 << 20, 1], [17..3_000_000, 0..1]),
        ] {
            let whole = boxes::whole(&shape);
            let mut read = vec![0; boxes::len(&wanted)];
            read_runs(&file, 24, boxes::runs(&whole, &wanted, 1), &mut read).unwrap();
            let rows = wanted[0].clone().flat_map(|row| &contents[row * shape[1]..][wanted[1].clone()]);
            assert!(rows.eq(&read), "{shape:?} {wanted:?}");
        }
    }
}
