//! Sample orders on disk, shared by runs and processes.
//!
//! A file is named after a hash of everything that decides its content, written under a temporary name and renamed, so
//! several processes may build the same one at once: the last rename wins and all are equal.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::super::error::DataError;
use super::super::indexed::hex;
use super::indices::{GptIndices, word_count};
use super::{EpochPlan, GptOptions};
use crate::positioned::PositionedFile;

/// Written as a number of this machine's byte order, so that a file from another one is not taken.
const MAGIC: u64 = u64::from_be_bytes(*b"bmGPTix2");
const HEADER: usize = 96;

type Key = [u8; 32];

/// Hash of what the orders depend on. The lengths stand for the text: a dataset that was rebuilt in place gets new
/// orders, one that was moved keeps them.
pub(super) fn key(first: u32, lengths: &[u32], options: &GptOptions) -> Key {
    let mut hash = Sha256::new();
    hash.update(MAGIC.to_le_bytes());
    hash.update(first.to_le_bytes());
    hash.update((options.seq_length as u64).to_le_bytes());
    hash.update(options.num_samples.map_or(u64::MAX, |samples| samples as u64).to_le_bytes());
    hash.update(options.seed.to_le_bytes());
    hash.update([u8::from(options.drop_last)]);
    hash.update(bytemuck::cast_slice(lengths));
    hash.finalize().into()
}

/// Takes the orders from `folder`, or builds and leaves them there. A file that is damaged is named in a warning and
/// built again. `documents` is the length of the document order, `words` is empty and has room for the orders.
pub(super) fn load_or_build(
    folder: &Path,
    key: &Key,
    plan: &EpochPlan,
    documents: usize,
    mut words: Vec<u32>,
    build: impl FnOnce(Vec<u32>) -> GptIndices,
) -> Result<GptIndices, DataError> {
    let path = folder.join(format!("gpt-{}.indices", hex(&key[..16])));
    match load(&path, key, plan, documents, &mut words) {
        Ok(true) => return Ok(GptIndices::new(words, documents, plan.samples)),
        Ok(false) => {}
        Err(what) => {
            let _ = writeln!(io::stderr(), "warning: {}: {what}; the sample order is built again", path.display());
        }
    }
    words.clear();
    let indices = build(words);
    store(folder, &path, key, indices.words(), plan).map_err(|cause| DataError::Cache { path: path.clone(), cause })?;
    Ok(indices)
}

/// What decides the orders, and the hash of the orders themselves.
fn header(key: &Key, plan: &EpochPlan, words: &[u32]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC.to_ne_bytes());
    header[8..16].copy_from_slice(&plan.epochs.to_ne_bytes());
    header[16..24].copy_from_slice(&(plan.samples as u64).to_ne_bytes());
    header[32..64].copy_from_slice(key);
    header[64..].copy_from_slice(&Sha256::digest(bytemuck::cast_slice(words)));
    header
}

/// Reads the orders into `words`. False where there is no file; an error where it is not as it was written.
fn load(path: &Path, key: &Key, plan: &EpochPlan, documents: usize, words: &mut Vec<u32>) -> Result<bool, String> {
    let file = match PositionedFile::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        opened => opened.map_err(|error| error.to_string())?,
    };
    let count = word_count(documents, plan.samples);
    let expected = (HEADER + 4 * count) as u64;
    if file.size() != expected {
        return Err(format!("has {} bytes instead of {expected}", file.size()));
    }
    words.resize(count, 0);
    let mut found = [0; HEADER];
    file.read_into(0, &mut found).map_err(|error| error.to_string())?;
    file.read_into(HEADER as u64, bytemuck::cast_slice_mut(words)).map_err(|error| error.to_string())?;
    match found == header(key, plan, words) {
        true => Ok(true),
        false => Err("does not have the hash that was written with it".into()),
    }
}

fn store(folder: &Path, path: &Path, key: &Key, words: &[u32], plan: &EpochPlan) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    // As other new files: runs of other users read it.
    let mut file = tempfile::Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(folder)?;
    file.write_all(&header(key, plan, words))?;
    file.write_all(bytemuck::cast_slice(words))?;
    // A name must not outlive a power failure that its contents do not.
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::indices::build;
    use super::*;

    const LENGTHS: [u32; 3] = [10, 20, 30];

    fn options(seed: u32) -> GptOptions {
        GptOptions {
            seq_length: 4,
            num_samples: Some(30),
            seed,
            drop_last: true,
            eod_mask_loss: None,
            eod_documents: None,
            cache: None,
        }
    }

    fn orders(folder: &Path, seed: u32) -> Vec<u32> {
        let plan = EpochPlan::new(60, &options(seed)).unwrap();
        assert_eq!(plan.epochs, 3);
        let key = key(0, &LENGTHS, &options(seed));
        let build = |words| build(words, 0, &LENGTHS, &plan, &options(seed));
        load_or_build(folder, &key, &plan, 9, Vec::new(), build).unwrap().words().to_vec()
    }

    fn load_cached(folder: &Path, seed: u32) -> Result<Option<Vec<u32>>, String> {
        let plan = EpochPlan::new(60, &options(seed)).unwrap();
        let path = fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
        let mut words = Vec::new();
        let found = load(&path, &key(0, &LENGTHS, &options(seed)), &plan, 9, &mut words)?;
        Ok(found.then_some(words))
    }

    #[test]
    fn stored_orders_are_read_back_and_anything_else_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let built = orders(folder.path(), 1);
        assert_eq!(load_cached(folder.path(), 1), Ok(Some(built)));
        assert!(load_cached(folder.path(), 2).is_err(), "another seed");
    }

    /// Every bit of the file counts: none of the damaged orders is used, and each is built again.
    #[test]
    fn a_damaged_order_is_built_again() {
        let folder = tempfile::tempdir().unwrap();
        let built = orders(folder.path(), 1);
        let path = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let whole = fs::read(&path).unwrap();
        for byte in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1 << (byte % 8);
            fs::write(&path, damaged).unwrap();
            assert!(load_cached(folder.path(), 1).is_err(), "byte {byte}");
        }
        for damaged in [&whole[..whole.len() - 4], &whole[..20], &[]] {
            fs::write(&path, damaged).unwrap();
            assert!(load_cached(folder.path(), 1).unwrap_err().contains("bytes instead of"), "{} bytes", damaged.len());
            assert_eq!(orders(folder.path(), 1), built);
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
    }

    #[test]
    fn many_may_build_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| orders(folder.path(), 1))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|words| *words == all[0]));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn everything_that_matters_changes_the_key() {
        let base = key(0, &LENGTHS, &options(1));
        let mut changed = vec![key(1, &LENGTHS, &options(1)), key(0, &[10, 20, 31], &options(1))];
        changed.push(key(0, &LENGTHS, &options(2)));
        changed.push(key(0, &LENGTHS, &GptOptions { seq_length: 5, ..options(1) }));
        changed.push(key(0, &LENGTHS, &GptOptions { num_samples: None, ..options(1) }));
        changed.push(key(0, &LENGTHS, &GptOptions { drop_last: false, ..options(1) }));
        assert!(changed.iter().all(|key| *key != base));
    }
}
