//! A storage belongs to one run, also where several begin at the same time.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use parking_lot::Mutex;

use super::super::{Channel, FolderStorage, Peers, Saver, SaverOptions, SharedStorage, Storage, fetch, stored_steps};
use super::round_trip::{slices, state};
use super::storage::{folders, save, saver};

/// A run in `root` that copies to `storage` begins and ends.
fn begins(root: &Path, storage: &Path) -> Result<(), String> {
    let storage = Some(SharedStorage(Arc::new(FolderStorage::new(storage))));
    let saver = Saver::new(root, 2, SaverOptions { storage, ..SaverOptions::default() });
    saver.map(drop).map_err(|error| error.to_string())
}

#[test]
fn of_two_runs_that_begin_at_the_same_time_one_is_refused() {
    for _ in 0..50 {
        let [first, second, there] = folders();
        let start = Barrier::new(2);
        let begun = thread::scope(|scope| {
            let begin = |root| {
                let (start, storage) = (&start, there.path());
                scope.spawn(move || {
                    start.wait();
                    begins(root, storage)
                })
            };
            [first.path(), second.path()].map(begin).map(|run| run.join().unwrap())
        });
        let (winner, loser, said) = match begun {
            [Ok(()), Err(said)] => (first, second, said),
            [Err(said), Ok(())] => (second, first, said),
            both => panic!("{both:?}"),
        };
        let named = format!(
            "checkpoint.storage = {} belongs to another run ({} on ",
            there.path().display(),
            winner.path().display()
        );
        assert!(said.starts_with(&named), "{said}");
        assert!(said.ends_with(&format!("delete {}/owner", there.path().display())), "{said}");

        begins(winner.path(), there.path()).unwrap();
        begins(loser.path(), there.path()).unwrap_err();
        begins(loser.path(), &there.path().join("another")).unwrap();
        begins(loser.path(), there.path()).unwrap_err();
        fs::remove_file(there.path().join("owner")).unwrap();
        begins(loser.path(), there.path()).unwrap();
        begins(loser.path(), &there.path().join("another")).unwrap();
    }
}

/// Whenever it was killed while it made the storage its own.
#[test]
fn a_run_that_was_killed_begins_again() {
    let [here, there, _] = folders();
    let (own, owner) = (here.path().join(".owner"), there.path().join("owner"));
    begins(here.path(), there.path()).unwrap();
    let read = || [&own, &owner].map(|file| fs::read_to_string(file).unwrap());
    let before = read();
    assert_eq!(before[0], format!("[{}]", before[1]));
    fs::remove_file(&owner).unwrap();
    begins(here.path(), there.path()).unwrap();
    assert_eq!(read(), before);
    fs::remove_file(&own).unwrap();
    fs::write(here.path().join(".owner.tmp"), "[{\"id\": \"1").unwrap();
    fs::remove_file(&owner).unwrap();
    begins(here.path(), there.path()).unwrap();
    assert_ne!(read(), before);
    fs::write(&owner, "").unwrap();
    assert!(begins(here.path(), there.path()).unwrap_err().contains("another run (unknown)"));
}

#[test]
fn a_run_continues_where_its_checkpoints_were_fetched_to() {
    let [here, there, back] = folders();
    let storage = FolderStorage::new(there.path());
    save(&saver(here.path(), None, storage.clone()), 1);
    let [one, other] = ["one", "other"].map(|name| back.path().join(name));
    assert!(begins(&one, there.path()).unwrap_err().contains("belongs to another run"));
    for root in [&one, &other] {
        fetch(&storage, None, root).unwrap();
        begins(root, there.path()).unwrap();
    }
    // Two runs from one checkpoint are two in a storage of their own.
    let new = back.path().join("new");
    begins(&one, &new).unwrap();
    begins(&other, &new).unwrap_err();
}

/// A folder that answers from some time on.
struct Late {
    folder: FolderStorage,
    answers: Arc<AtomicBool>,
}

impl Late {
    fn asked(&self) -> io::Result<&FolderStorage> {
        if self.answers.load(Ordering::Relaxed) { Ok(&self.folder) } else { Err(io::Error::other("no route to host")) }
    }
}

impl Storage for Late {
    fn name(&self) -> String {
        self.folder.name()
    }

    fn put(&self, key: &str, from: &Path) -> io::Result<()> {
        self.asked()?.put(key, from)
    }

    fn create(&self, key: &str, from: &Path) -> io::Result<()> {
        self.asked()?.create(key, from)
    }

    fn get(&self, key: &str, to: &Path) -> io::Result<()> {
        self.asked()?.get(key, to)
    }

    fn list(&self, prefix: &str) -> io::Result<Vec<String>> {
        self.asked()?.list(prefix)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.asked()?.delete(key)
    }
}

#[test]
fn a_storage_that_does_not_answer_at_first_is_asked_before_the_first_copy() {
    for is_taken in [false, true] {
        let [here, there, other] = folders();
        let answers = Arc::new(AtomicBool::new(false));
        let folder = FolderStorage::new(there.path());
        let run = saver(here.path(), None, Late { folder: folder.clone(), answers: answers.clone() });
        let copied = |step| {
            save(&run, step);
            run.wait_for_copies().unwrap();
            run.copied().remove(0).map(drop).map_err(|error| error.to_string())
        };
        assert!(copied(1).unwrap_err().ends_with("no route to host"));
        if is_taken {
            begins(other.path(), there.path()).unwrap();
        }
        answers.store(true, Ordering::Relaxed);
        match copied(2) {
            Ok(()) => assert!(!is_taken),
            Err(said) => assert!(is_taken && said.contains("belongs to another run"), "{said}"),
        }
        assert_eq!(stored_steps(&folder).unwrap(), if is_taken { vec![] } else { vec![2] });
    }
}

/// One of two processes, and what both have said.
struct Pair(usize, Arc<(Barrier, Mutex<[String; 2]>)>);

impl Channel for Pair {
    fn is_first(&self) -> bool {
        self.0 == 0
    }

    fn all_gather(&self, text: String) -> Result<Vec<String>, String> {
        let Self(process, shared) = self;
        shared.1.lock()[*process] = text;
        shared.0.wait();
        let all = shared.1.lock().to_vec();
        shared.0.wait();
        Ok(all)
    }
}

#[test]
fn processes_of_one_run_share_its_storage_and_all_hear_that_it_is_anothers() {
    let [here, other, there] = folders();
    let begins_in_two = |root: &Path| {
        let shared = Arc::new((Barrier::new(2), Mutex::default()));
        thread::scope(|scope| {
            let process = |at| {
                let storage = Some(SharedStorage(Arc::new(FolderStorage::new(there.path()))));
                let (peers, options) =
                    (Peers::new(Pair(at, Arc::clone(&shared))), SaverOptions { storage, ..SaverOptions::default() });
                scope.spawn(move || {
                    let saver = Saver::among(peers, root, at..at + 1, options).map_err(|error| error.to_string())?;
                    saver.submit(at, slices(at, 1), &state(1)).map_err(|error| error.to_string())
                })
            };
            [0, 1].map(process).map(|process| process.join().unwrap())
        })
    };
    for _ in 0..2 {
        assert_eq!(begins_in_two(here.path()), [Ok(()), Ok(())]);
        assert_eq!(stored_steps(&FolderStorage::new(there.path())).unwrap(), [1]);
    }
    for said in begins_in_two(other.path()) {
        assert!(said.unwrap_err().contains("belongs to another run"));
    }
}
