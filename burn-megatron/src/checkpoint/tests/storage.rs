//! Copies of checkpoints in a storage: whole or not there, whatever fails, and never in the way of the run.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use tempfile::TempDir;

use super::super::{
    Checkpoint, CheckpointError, FolderStorage, Saver, SaverOptions, SharedStorage, Storage, fetch, stored_steps,
    upload,
};
use super::round_trip::{contents, slices, state};

fn save(saver: &Saver, step: u64) {
    for writer in 0..2 {
        saver.submit(writer, slices(writer, step as u32), &state(step)).unwrap();
    }
}

fn saver(root: &Path, keep_last: Option<usize>, storage: impl Storage + 'static) -> Saver {
    let storage = Some(SharedStorage(Arc::new(storage)));
    Saver::new(root, 2, SaverOptions { keep_last, storage, ..SaverOptions::default() }).unwrap()
}

fn folders() -> [TempDir; 3] {
    std::array::from_fn(|_| tempfile::tempdir().unwrap())
}

#[test]
fn copies_come_back_as_they_were_and_old_ones_go() {
    let [here, there, back] = folders();
    let storage = FolderStorage::new(there.path());
    let saver = saver(here.path(), Some(2), storage.clone());
    for step in 1..=4 {
        save(&saver, step);
        saver.wait_for_copies();
    }
    let copied: Vec<_> = saver.copied().into_iter().map(Result::unwrap).collect();
    assert_eq!(copied.iter().map(|copy| copy.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!((copied[2].deleted.as_slice(), copied[3].deleted.as_slice()), ([1].as_slice(), [2].as_slice()));
    assert_eq!(stored_steps(&storage).unwrap(), [3, 4]);
    assert!(saver.copied().is_empty());

    let newest = fetch(&storage, None, back.path()).unwrap();
    let saved = Checkpoint::open(here.path()).unwrap();
    assert_eq!(contents(&Checkpoint::open(back.path()).unwrap()), contents(&saved));
    assert_eq!(newest.file_name(), saved.path().file_name());
    fetch(&storage, Some(3), back.path()).unwrap();
    // As after a run that went back to step 2.
    upload(here.path(), 3, &storage).unwrap();
    let third = fetch(&storage, None, &back.path().join("third")).unwrap();
    assert_eq!(Checkpoint::open(third).unwrap().state().step, 3, "the newest is the one that was copied last");
    assert_eq!(Checkpoint::open(back.path()).unwrap().state().step, 3, "what was fetched last is the latest");
    let error = fetch(&storage, Some(2), back.path()).unwrap_err().to_string();
    assert!(error.contains("none of step 2 is complete; the nearest is 3"), "{error}");
}

#[test]
fn a_damaged_copy_is_refused_and_leaves_nothing() {
    let [here, there, back] = folders();
    let storage = FolderStorage::new(there.path());
    save(&saver(here.path(), None, storage.clone()), 7);
    assert_eq!(stored_steps(&storage).unwrap(), [7], "the end of a saver waits for its copies");
    let file = there.path().join("step_00000007/rank_00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let error = fetch(&storage, None, back.path()).unwrap_err().to_string();
    assert!(error.contains("rank_00001.safetensors"), "{error}");
    assert!(matches!(Checkpoint::open(back.path()), Err(CheckpointError::NotFound { .. })));
}

/// A folder that refuses all operations that change it after the first few.
struct Refusing {
    folder: FolderStorage,
    allowed: AtomicUsize,
}

impl Refusing {
    fn count(&self) -> io::Result<()> {
        let left = self.allowed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| io::Error::other("quota exceeded"))
    }
}

impl Storage for Refusing {
    fn name(&self) -> String {
        "a bucket".into()
    }

    fn put(&self, key: &str, from: &Path) -> io::Result<()> {
        self.count()?;
        self.folder.put(key, from)
    }

    fn get(&self, key: &str, to: &Path) -> io::Result<()> {
        self.folder.get(key, to)
    }

    fn list(&self, prefix: &str) -> io::Result<Vec<String>> {
        self.folder.list(prefix)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.count()?;
        self.folder.delete(key)
    }
}

#[test]
fn whatever_the_storage_refuses_what_is_there_is_whole_and_the_run_goes_on() {
    let mut refused = 0;
    for allowed in 0..40 {
        let [here, there, back] = folders();
        let storage = FolderStorage::new(there.path());
        let saver = saver(here.path(), Some(1), Refusing { folder: storage.clone(), allowed: allowed.into() });
        for step in [1, 2, 2, 3] {
            save(&saver, step);
            saver.wait_for_copies();
        }
        assert!(saver.finished().into_iter().all(|saved| saved.is_ok()));
        let errors: Vec<String> = saver.copied().into_iter().filter_map(|copy| Some(copy.err()?.to_string())).collect();
        refused += usize::from(!errors.is_empty());
        for error in errors {
            assert!(error.ends_with("in a bucket: quota exceeded"), "{error}");
        }
        let steps = stored_steps(&storage).unwrap();
        for &step in &steps {
            let path = fetch(&storage, Some(step), back.path()).unwrap();
            assert_eq!(Checkpoint::open(path).unwrap().state().step, step);
        }
    }
    assert!((10..40).contains(&refused), "{refused} of 40 runs were refused something");
}

/// A folder that puts nothing while it is closed.
#[derive(Clone)]
struct Slow {
    folder: FolderStorage,
    is_open: Arc<(Mutex<bool>, Condvar)>,
}

impl Storage for Slow {
    fn name(&self) -> String {
        self.folder.name()
    }

    fn put(&self, key: &str, from: &Path) -> io::Result<()> {
        let (is_open, changed) = &*self.is_open;
        let mut guard = is_open.lock();
        while !*guard {
            changed.wait(&mut guard);
        }
        drop(guard);
        self.folder.put(key, from)
    }

    fn get(&self, key: &str, to: &Path) -> io::Result<()> {
        self.folder.get(key, to)
    }

    fn list(&self, prefix: &str) -> io::Result<Vec<String>> {
        self.folder.list(prefix)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.folder.delete(key)
    }
}

#[test]
fn a_slow_storage_keeps_what_it_reads_and_skips_what_is_old() {
    let [here, there, _] = folders();
    let storage = Slow { folder: FolderStorage::new(there.path()), is_open: Arc::default() };
    let saver = saver(here.path(), Some(1), storage.clone());
    let present = || Checkpoint::list(here.path()).unwrap().into_keys().collect::<BTreeSet<u64>>();
    save(&saver, 1);
    for step in 2..=5 {
        save(&saver, step);
    }
    assert!(present().contains(&5) && present().len() <= 3, "{:?}", present());
    *storage.is_open.0.lock() = true;
    storage.is_open.1.notify_all();
    saver.wait_for_copies();
    let copied: Vec<u64> = saver.copied().into_iter().map(|copy| copy.unwrap().step).collect();
    assert!(copied.ends_with(&[5]) && copied.len() <= 2, "{copied:?}: those in between are skipped");
    save(&saver, 6);
    assert!(present().is_subset(&[5, 6].into()), "{:?}", present());
}

#[test]
fn an_upload_by_hand_is_a_copy_too() {
    let [here, there, back] = folders();
    let (saver, storage) =
        (Saver::new(here.path(), 2, SaverOptions::default()).unwrap(), FolderStorage::new(there.path()));
    save(&saver, 3);
    let bytes = upload(here.path(), 3, &storage).unwrap();
    assert!(bytes > saver.finished().remove(0).unwrap().bytes, "the manifest counts too");
    fetch(&storage, None, back.path()).unwrap();
    assert!(upload(here.path(), 4, &storage).is_err());
}
