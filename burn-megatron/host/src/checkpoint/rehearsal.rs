//! A trial of the whole save path at the start of a run, so that the first real save has nothing left to stumble over.

use std::path::Path;
use std::time::Instant;

use safetensors::Dtype;

use super::disk::Files;
use super::error::{CheckpointError, Result};
use super::names::{self, Folder};
use super::{Kind, Slice, shard};

/// Bytes that are written at most, to see how fast that is.
const PROBE: u64 = 4 << 20;

/// Creates, writes, makes durable, renames, replaces, reads back and deletes in `root`, and compares the free space
/// with what `count` checkpoints of `each` bytes need beyond the `present` bytes of those that are there. Returns the
/// seconds that writing one may take: this file's, times what a checkpoint is larger.
pub(super) fn rehearse(files: &Files, root: &Path, each: u64, count: u64, present: u64) -> Result<f64> {
    let folder = Folder::Rehearsal.path(root);
    files.remove_folder(&folder)?;
    files.create_folder(&folder)?;
    let inner = folder.join(names::step_name(0));
    files.create_folder(&inner)?;
    let size = each.clamp(1, PROBE);
    let slice = Slice {
        kind: Kind::Weight,
        name: "rehearsal".into(),
        global_shape: vec![size as usize],
        ranges: vec![0..size as usize],
        dtype: Dtype::U8,
        // Nothing that a file system stores in less.
        data: (0..size)
            .map(|index| (index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
            .collect::<Vec<u8>>()
            .into(),
    };
    let start = Instant::now();
    shard::write(files, &inner, 0, vec![slice])?;
    files.sync_folder(&inner)?;
    let seconds = start.elapsed().as_secs_f64() * (each.max(size) as f64 / size as f64);
    files.rename(&inner, &folder.join(names::step_name(1)))?;
    // As `latest` is: a file that replaces another.
    let (new, latest) = (folder.join(names::NEW_LATEST), folder.join(names::LATEST));
    for contents in [b"0", b"1"] {
        files.write_file(&new, contents)?;
        files.rename(&new, &latest)?;
    }
    files.sync_folder(&folder)?;
    if files.read(&latest)?.as_deref() != Some(b"1") {
        return Err(CheckpointError::file(&latest, "does not contain what was written; the disk is not to be trusted"));
    }
    files.remove_folder(&folder)?;
    files.sync_folder(root)?;

    let (needed, free) = (each.saturating_mul(count).saturating_sub(present), files.free_space(root)?);
    if needed > free {
        return Err(CheckpointError::Space { root: root.to_path_buf(), count, each, needed, free });
    }
    Ok(seconds)
}
