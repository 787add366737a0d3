//! When a run saves, and what its log says of it.

use std::io;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::resume::{run_of, run_with};
use super::*;
use crate::checkpoint::{FolderStorage, SharedStorage, Storage, stored_steps};

#[test]
fn the_line_of_a_step_is_written_before_the_step_is_saved() {
    for background in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let run = run_of("DP2", FloatDType::F32, folder.path(), None);
        succeeds(&run.checkpoints(saving(folder.path(), Some(2), background)), "DP2");
        let lines = log(&folder.path().join("run"));
        let at = |kind: &str, step: u64| lines.iter().position(|line| line["kind"] == kind && line["step"] == step);
        for step in [2, 4, 6, 8, 10, 12] {
            let (trained, saved) = (at("train", step).unwrap(), at("checkpoint", step).unwrap());
            assert!(trained < saved, "step {step}, background {background}");
            let number = |key: &str| lines[saved][key].as_f64().unwrap();
            assert!(number("stall") > 0.0 && number("bytes") > 0.0 && (0.0..1.0).contains(&number("share")));
        }
    }
}

#[test]
fn a_run_that_is_not_told_when_saves_what_is_worth_it() {
    let folder = tempfile::tempdir().unwrap();
    // Training takes as long as its data. Sample 40 is in the sixth batch of 8.
    let data = Arc::new(Through(data(900, 1), |index, sample| {
        if index == 40 {
            std::thread::sleep(Duration::from_millis(6000));
        }
        sample
    }));
    let run = run_with("TP2 DP2", folder.path(), None, data, builder(&llama(), FloatDType::F32));
    succeeds(&run.checkpoints(saving(folder.path(), SaveEvery::Auto, false)), "TP2 DP2");
    // Rank 0 decides before a step: the sixth takes long, so the seventh is saved, and the last one always. On a machine
    // that is busy there may be more.
    let steps: Vec<u64> = Checkpoint::list(folder.path().join("checkpoints")).unwrap().into_keys().collect();
    assert!(steps.contains(&7) && steps.last() == Some(&12), "{steps:?}");
}

/// A folder that waits with what it is to put until the run calls `finish`, but not forever.
#[derive(Clone)]
struct AfterFinish {
    folder: FolderStorage,
    finished: Arc<(Mutex<bool>, Condvar)>,
}

impl Storage for AfterFinish {
    fn name(&self) -> String {
        self.folder.name()
    }

    fn put(&self, key: &str, from: &Path) -> io::Result<()> {
        let (finished, changed) = &*self.finished;
        let mut finished = finished.lock();
        while !*finished {
            if changed.wait_for(&mut finished, Duration::from_secs(60)).timed_out() {
                return Err(io::Error::other("the run waits for its copies before it calls `finish`"));
            }
        }
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
        self.folder.delete(key)
    }
}

#[test]
fn ranks_finish_before_the_copies_do_and_the_run_ends_after_them() {
    let folder = tempfile::tempdir().unwrap();
    let (root, copies) = (folder.path().join("checkpoints"), FolderStorage::new(folder.path().join("copies")));
    let storage = AfterFinish { folder: copies.clone(), finished: Arc::default() };
    let saver = SaverOptions { storage: Some(SharedStorage(Arc::new(storage.clone()))), ..SaverOptions::default() };
    let run = run("DP2", &folder.path().join("run"));
    let run = run.checkpoints(CheckpointOptions { root, every: SaveEvery::Steps(100), saver });
    let run = run.finish(move |_, _| {
        let (finished, changed) = &*storage.finished;
        *finished.lock() = true;
        changed.notify_all();
        Ok(())
    });
    succeeds(&run, "DP2");
    assert_eq!(stored_steps(&copies).unwrap(), [12]);
}
