//! One writer's file: the safetensors header and the slices.

use std::fmt::Write;
use std::panic::resume_unwind;
use std::path::Path;
use std::thread;

use safetensors::tensor::{Metadata, TensorInfo};
use sha2::{Digest, Sha256};

use super::disk::Files;
use super::error::CheckpointError;
use super::manifest::{SavedFile, SavedSlice, SavedTensor, Shard};
use super::{Slice, boxes, names};

/// Bytes that are written at a time.
const PIECE: usize = 4 << 20;

/// Writes the file of a writer into `folder` and makes its contents durable. The data is not copied.
pub(super) fn write(
    files: &Files,
    folder: &Path,
    writer: usize,
    mut slices: Vec<Slice>,
) -> Result<Shard, CheckpointError> {
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

    // Hashing takes about as long as handing the data to the system; the two do not wait for each other.
    let sha256 = thread::scope(|scope| {
        let hashing = thread::Builder::new().name("hash".into()).spawn_scoped(scope, || hash(&header, &slices));
        let mut file = files.create_file(&path, bytes)?;
        file.write(&header)?;
        for piece in slices.iter().flat_map(|slice| slice.data.chunks(PIECE)) {
            file.write(piece)?;
        }
        file.sync()?;
        match hashing {
            Ok(hashing) => Ok(hashing.join().unwrap_or_else(|panic| resume_unwind(panic))),
            // The system gives no more threads: one after the other then.
            Err(_) => Ok(hash(&header, &slices)),
        }
    })?;
    let saved = |slice: Slice| SavedTensor {
        slices: vec![SavedSlice { file: name.clone(), key: slice.key(), ranges: slice.ranges }],
        kind: slice.kind,
        name: slice.name,
        dtype: slice.dtype,
        global_shape: slice.global_shape,
    };
    let tensors = slices.into_iter().map(saved).collect();
    Ok(Shard { file: Some(SavedFile { name, bytes, sha256 }), tensors })
}

/// Hash of a file with this header and these slices.
fn hash(header: &[u8], slices: &[Slice]) -> String {
    let mut hash = Sha256::new();
    hash.update(header);
    slices.iter().for_each(|slice| hash.update(&slice.data));
    hex(&hash.finalize())
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

/// Lower-case hexadecimal, as `sha256sum` prints it.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}
