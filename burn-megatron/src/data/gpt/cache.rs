//! Sample orders on disk, shared by runs and processes.
//!
//! A file is named after a hash of everything that decides its content, written under a temporary name and renamed, so
//! several processes may build the same one at once: the last rename wins and all are equal.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use memmap2::Mmap;
use sha2::{Digest, Sha256};

use super::super::error::DataError;
use super::indices::{GptIndices, Words, word_count};
use super::{EpochPlan, GptOptions};

/// Written as a number of this machine's byte order, so that a file from another one is not taken.
const MAGIC: u64 = u64::from_be_bytes(*b"bmGPTix1");
const HEADER: usize = 64;

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

/// Takes the orders from `folder`, or builds and leaves them there; a file that is not whole is built anew.
/// `documents` is the length of the document order.
pub(super) fn load_or_build(
    folder: &Path,
    key: &Key,
    plan: &EpochPlan,
    documents: usize,
    build: impl FnOnce() -> GptIndices,
) -> Result<GptIndices, DataError> {
    let name: String = key[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let path = folder.join(format!("gpt-{name}.indices"));
    if let Some(indices) = load(&path, key, plan, documents) {
        return Ok(indices);
    }
    let indices = build();
    store(folder, &path, key, indices.words(), plan).map_err(|cause| DataError::Cache { path: path.clone(), cause })?;
    Ok(indices)
}

fn header(key: &Key, plan: &EpochPlan) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC.to_ne_bytes());
    header[8..16].copy_from_slice(&plan.epochs.to_ne_bytes());
    header[16..24].copy_from_slice(&(plan.samples as u64).to_ne_bytes());
    header[32..].copy_from_slice(key);
    header
}

fn load(path: &Path, key: &Key, plan: &EpochPlan, documents: usize) -> Option<GptIndices> {
    let file = File::open(path).ok()?;
    // SAFETY: cache files are renamed into place and never changed afterwards.
    let map = unsafe { Mmap::map(&file) }.ok()?;
    let size = HEADER + 4 * word_count(documents, plan.samples);
    if map.len() != size || map[..HEADER] != header(key, plan) {
        return None;
    }
    Some(GptIndices::new(Words::File(map, HEADER), documents, plan.samples))
}

fn store(folder: &Path, path: &Path, key: &Key, words: &[u32], plan: &EpochPlan) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    // As other new files: runs of other users read it.
    let mut file = tempfile::Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(folder)?;
    file.write_all(&header(key, plan))?;
    file.write_all(bytemuck::cast_slice(words))?;
    // A name must not outlive a power failure that its contents do not: nothing but the length would tell.
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

    fn load_or_fail(folder: &Path, seed: u32) -> Option<Vec<u32>> {
        let plan = EpochPlan::new(60, &options(seed)).unwrap();
        let path = fs::read_dir(folder).unwrap().next()?.unwrap().path();
        load(&path, &key(0, &LENGTHS, &options(seed)), &plan, 9).map(|indices| indices.words().to_vec())
    }

    #[test]
    fn stored_orders_are_read_back_and_anything_else_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let plan = EpochPlan::new(60, &options(1)).unwrap();
        assert_eq!(plan.epochs, 3);
        let built = load_or_build(folder.path(), &key(0, &LENGTHS, &options(1)), &plan, 9, || {
            build(0, &LENGTHS, &plan, &options(1))
        })
        .unwrap();
        assert_eq!(load_or_fail(folder.path(), 1).unwrap(), built.words());
        assert_eq!(load_or_fail(folder.path(), 2), None, "another seed");

        let path = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 4]).unwrap();
        assert_eq!(load_or_fail(folder.path(), 1), None, "truncated");
    }

    #[test]
    fn many_may_build_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let plan = EpochPlan::new(60, &options(1)).unwrap();
        let one = || {
            let key = key(0, &LENGTHS, &options(1));
            let build = || build(0, &LENGTHS, &plan, &options(1));
            load_or_build(folder.path(), &key, &plan, 9, build).unwrap().words().to_vec()
        };
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
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
