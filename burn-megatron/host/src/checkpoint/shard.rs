//! One writer's file: the safetensors header and the slices.

use std::panic::resume_unwind;
use std::path::Path;
use std::thread::{self, ScopedJoinHandle};

use safetensors::tensor::{Metadata, TensorInfo};

use super::disk::Files;
use super::error::{CheckpointError, Result};
use super::manifest::{SavedFile, SavedTensor, Shard};
use super::{Slice, boxes, hashes, names};

/// Bytes that are written at a time.
const PIECE: usize = 4 << 20;

/// Writes the file of a writer into `folder` and makes its contents durable. The data is not copied.
pub(super) fn write(files: &Files, folder: &Path, writer: usize, mut slices: Vec<Slice>) -> Result<Shard> {
    slices.retain(|slice| !slice.data.is_empty());
    if slices.is_empty() {
        return Ok(Shard { file: None, tensors: Vec::new() });
    }
    // The order that safetensors itself writes: wide elements first, so that all are aligned, then by name.
    slices.sort_by_cached_key(|slice| (std::cmp::Reverse(slice.dtype), slice.key()));
    let name = names::shard_name(writer);
    let path = folder.join(&name);
    let header = header(&slices).map_err(|error| CheckpointError::file(&path, error.to_string()))?;
    let bytes = (header.len() + slices.iter().map(|slice| slice.data.len()).sum::<usize>()) as u64;

    let arrived = slices.iter().try_for_each(|slice| slice.data.wait());
    arrived.map_err(|what| CheckpointError::file(&path, format!("cannot be written: {what}")))?;
    let parts = || [&header[..]].into_iter().chain(slices.iter().map(|slice| &*slice.data));
    // Hashing takes about as long as handing the data to the system; they do not wait for each other.
    let (sha256, pieces) = thread::scope(|scope| {
        let whole = thread::Builder::new().name("hash".into()).spawn_scoped(scope, || hashes::whole(parts()));
        let pieces = thread::Builder::new().name("hash pieces".into()).spawn_scoped(scope, || hashes::pieces(parts()));
        let mut file = files.create_file(&path, bytes)?;
        for piece in parts().flat_map(|part| part.chunks(PIECE)) {
            file.write(piece)?;
        }
        file.sync()?;
        // Where the system gives no more threads: one after the other.
        let whole = whole.map_or_else(|_| hashes::whole(parts()), joined);
        Ok((whole, pieces.map_or_else(|_| hashes::pieces(parts()), joined)))
    })?;
    let tensors = slices.iter().map(|slice| SavedTensor::of_slice(slice, &name)).collect();
    Ok(Shard { file: Some(SavedFile { name, bytes, sha256, pieces }), tensors })
}

/// What a thread returns; its panic is the caller's.
fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Length and header of a safetensors file (<https://github.com/huggingface/safetensors#format>).
fn header(slices: &[Slice]) -> Result<Vec<u8>, safetensors::SafeTensorError> {
    let mut end = 0;
    let entry = |slice: &Slice| {
        let start = end;
        end += slice.data.len();
        let (dtype, shape) = (slice.dtype, boxes::shape(&slice.ranges));
        (slice.key(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    };
    let metadata = Metadata::new(None, slices.iter().map(entry).collect())?;
    let mut json = serde_json::to_vec(&metadata)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}
