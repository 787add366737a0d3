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

pub(super) fn save(saver: &Saver, step: u64) {
    for writer in 0..2 {
        saver.submit(writer, slices(writer, step as u32), &state(step)).unwrap();
    }
}

pub(super) fn saver(root: &Path, keep_last: Option<usize>, storage: impl Storage + 'static) -> Saver {
    let storage = Some(SharedStorage(Arc::new(storage)));
    Saver::new(root, 2, SaverOptions { keep_last, storage, ..SaverOptions::default() }).unwrap()
}

pub(super) fn folders() -> [TempDir; 3] {
    std::array::from_fn(|_| tempfile::tempdir().unwrap())
}

#[test]
fn copies_come_back_as_they_were_and_old_ones_go() {
    let [here, there, back] = folders();
    let storage = FolderStorage::new(there.path());
    let saver = saver(here.path(), Some(2), storage.clone());
    for step in 1..=4 {
        save(&saver, step);
        saver.wait_for_copies().unwrap();
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
    let latest = || Checkpoint::open(back.path()).unwrap().state().step;
    fetch(&storage, Some(3), back.path()).unwrap();
    assert_eq!(latest(), 3);
    fetch(&storage, Some(4), back.path()).unwrap();
    assert_eq!(latest(), 4, "what was fetched last is the latest, if it was there before too");
    // As after a run that went back to step 2.
    upload(here.path(), 3, &storage).unwrap();
    let third = fetch(&storage, None, &back.path().join("third")).unwrap();
    assert_eq!(Checkpoint::open(third).unwrap().state().step, 3, "the newest is the one that was copied last");
    let damaged = back.path().join("step_00000003/rank_00000.safetensors");
    damage(&damaged);
    let error = fetch(&storage, Some(3), back.path()).unwrap_err().to_string();
    assert!(error.contains("step_00000003/rank_00000.safetensors"), "{error}");
    assert_eq!(latest(), 4);
    let permissions = |file: &str| std::fs::metadata(there.path().join(file)).unwrap().permissions();
    assert_eq!(permissions("latest"), permissions("step_00000004/SHA256SUMS"), "whoever reads the one reads the other");
    let error = fetch(&storage, Some(2), back.path()).unwrap_err().to_string();
    assert!(error.contains("none of step 2 is complete; the nearest is 3"), "{error}");
}

/// Changes the last bit of a file.
fn damage(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn a_damaged_copy_is_refused_and_leaves_nothing() {
    let [here, there, back] = folders();
    let storage = FolderStorage::new(there.path());
    save(&saver(here.path(), None, storage.clone()), 7);
    assert_eq!(stored_steps(&storage).unwrap(), [7], "the end of a saver waits for its copies");
    damage(&there.path().join("step_00000007/rank_00001.safetensors"));
    let error = fetch(&storage, None, back.path()).unwrap_err().to_string();
    assert!(error.contains("rank_00001.safetensors"), "{error}");
    assert!(matches!(Checkpoint::open(back.path()), Err(CheckpointError::NotFound { .. })));
    let left: Vec<_> = std::fs::read_dir(back.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".lock"]);
}

#[test]
fn what_is_retired_goes_from_the_storage_too() {
    let [here, there, _] = folders();
    let storage = FolderStorage::new(there.path());
    let saver = saver(here.path(), None, storage.clone());
    let stored = || {
        saver.wait_for_copies().unwrap();
        stored_steps(&storage).unwrap()
    };
    for step in 1..=3 {
        save(&saver, step);
        assert_eq!(stored().len() as u64, step);
    }
    saver.retire(1).unwrap();
    assert_eq!(stored(), [2, 3]);
    saver.retire(3).unwrap();
    assert_eq!(stored(), [2, 3], "it is the latest");
    save(&saver, 4);
    assert_eq!(stored(), [2, 4]);
    assert_eq!(Checkpoint::list(here.path()).unwrap().into_keys().collect::<Vec<_>>(), [2, 4]);
    save(&saver, 3);
    save(&saver, 5);
    assert!(stored().contains(&5));
    upload(here.path(), 3, &storage).unwrap();
    save(&saver, 6);
    assert!(stored().contains(&3), "it was saved again");
}

/// A folder with something before each operation that changes it.
struct Before<F> {
    folder: FolderStorage,
    change: F,
}

impl<F: Fn() -> io::Result<()> + Send + Sync> Storage for Before<F> {
    fn name(&self) -> String {
        self.folder.name()
    }

    fn put(&self, key: &str, from: &Path) -> io::Result<()> {
        (self.change)()?;
        self.folder.put(key, from)
    }

    fn create(&self, key: &str, from: &Path) -> io::Result<()> {
        self.folder.create(key, from)
    }

    fn get(&self, key: &str, to: &Path) -> io::Result<()> {
        self.folder.get(key, to)
    }

    fn list(&self, prefix: &str) -> io::Result<Vec<String>> {
        self.folder.list(prefix)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        (self.change)()?;
        self.folder.delete(key)
    }
}

#[test]
fn whatever_the_storage_refuses_what_is_there_is_whole_and_the_run_goes_on() {
    let mut refused = 0;
    for (allowed, panics) in (0..40).flat_map(|allowed| [(allowed, false), (allowed, true)]) {
        let [here, there, back] = folders();
        let storage = FolderStorage::new(there.path());
        let why = if panics { "the storage panicked; its message is above" } else { "quota exceeded" };
        let why = format!("{}: {why}", storage.name());
        let allowed = AtomicUsize::new(allowed);
        let change = move || {
            let left = allowed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            assert!(left.is_ok() || !panics, "not a bug: a storage that panics");
            left.map(drop).map_err(|_| io::Error::other("quota exceeded"))
        };
        let saver = saver(here.path(), Some(1), Before { folder: storage.clone(), change });
        for step in [1, 2, 2, 3] {
            save(&saver, step);
            saver.wait_for_copies().unwrap();
        }
        assert!(saver.finished().into_iter().all(|saved| saved.is_ok()));
        let errors: Vec<String> = saver.copied().into_iter().filter_map(|copy| Some(copy.err()?.to_string())).collect();
        refused += usize::from(!errors.is_empty());
        for error in errors {
            assert!(error.ends_with(&why), "{error}");
        }
        let steps = stored_steps(&storage).unwrap();
        for &step in &steps {
            let path = fetch(&storage, Some(step), back.path()).unwrap();
            assert_eq!(Checkpoint::open(path).unwrap().state().step, step);
        }
    }
    assert!((20..80).contains(&refused), "{refused} of 80 runs were refused something");
}

/// A folder that changes nothing until it is opened, and what opens it.
fn slow(root: &Path) -> (impl Storage + 'static, impl Fn()) {
    let is_open: Arc<(Mutex<bool>, Condvar)> = Arc::default();
    let open = is_open.clone();
    let change = move || {
        is_open.1.wait_while(&mut is_open.0.lock(), |is_open| !*is_open);
        Ok(())
    };
    let open = move || {
        *open.0.lock() = true;
        open.1.notify_all();
    };
    (Before { folder: FolderStorage::new(root), change }, open)
}

#[test]
fn copies_that_have_not_begun_can_be_given_up() {
    let [here, there, _] = folders();
    let (storage, open) = slow(there.path());
    let storage = Arc::new(storage);
    let options =
        SaverOptions { keep_every: Some(1), storage: Some(SharedStorage(storage.clone())), ..SaverOptions::default() };
    let saver = Saver::new(here.path(), 2, options).unwrap();
    (1..=3).for_each(|step| save(&saver, step));
    saver.skip_copies();
    open();
    saver.wait_for_copies().unwrap();
    let errors: Vec<String> = saver.copied().into_iter().filter_map(|copy| Some(copy.err()?.to_string())).collect();
    for step in [2, 3] {
        let said = format!("cannot write step_{step:08} in {}: the run begins again first", storage.name());
        assert!(errors.contains(&said), "{errors:?}");
    }
    assert!(!stored_steps(&*storage).unwrap().contains(&3));
    save(&saver, 4);
    saver.wait_for_copies().unwrap();
    assert!(stored_steps(&*storage).unwrap().contains(&4));
}

#[test]
fn a_slow_storage_keeps_what_it_reads_and_skips_what_is_old() {
    let [here, there, _] = folders();
    let (storage, open) = slow(there.path());
    let saver = saver(here.path(), Some(1), storage);
    let present = || Checkpoint::list(here.path()).unwrap().into_keys().collect::<BTreeSet<u64>>();
    save(&saver, 1);
    for step in 2..=5 {
        save(&saver, step);
    }
    assert!(present().contains(&5) && present().len() <= 3, "{:?}", present());
    open();
    saver.wait_for_copies().unwrap();
    let copied: Vec<u64> = saver.copied().into_iter().map(|copy| copy.unwrap().step).collect();
    assert!(copied.ends_with(&[5]) && copied.len() <= 2, "{copied:?}: those in between are skipped");
    assert_eq!(present(), [5].into(), "what was kept for its copy goes after it");
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
