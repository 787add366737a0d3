//! Symbolic links in a folder of checkpoints: what they lead to is never written, emptied or deleted.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::super::{Checkpoint, Saver, SaverOptions};
use super::round_trip::{contents, expected};
use super::saving::submit;

fn save(root: &Path, step: u64) {
    let saver = Saver::new(root, 2, SaverOptions { keep_last: Some(2), ..Default::default() }).unwrap();
    saver.rehearse(1000, None).unwrap();
    submit(&saver, step);
    assert!(saver.wait().unwrap().iter().all(|report| report.not_deleted.is_none()));
}

/// A folder that is none of a run's business.
fn precious(folder: &Path) -> std::path::PathBuf {
    let precious = folder.join("precious");
    fs::create_dir_all(precious.join("below")).unwrap();
    fs::write(precious.join("file"), "precious").unwrap();
    fs::write(precious.join("below/file"), "precious").unwrap();
    precious
}

fn is_whole(precious: &Path) {
    for file in ["file", "below/file"] {
        assert_eq!(fs::read_to_string(precious.join(file)).unwrap(), "precious", "{file}");
    }
}

#[test]
fn leftovers_that_are_links_are_removed_and_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (root, precious) = (folder.path().join("root"), precious(folder.path()));
    fs::create_dir_all(root.join(".step_00000007.tmp")).unwrap();
    let inside = root.join(".step_00000007.tmp/rank_00000.safetensors");
    let links = [".step_00000045.tmp", ".step_00000005.deleted", ".rehearsal.tmp"].map(|name| root.join(name));
    links.iter().chain([&inside]).for_each(|link| symlink(&precious, link).unwrap());
    symlink(precious.join("file"), root.join(".latest.tmp")).unwrap();
    save(&root, 1);
    is_whole(&precious);
    assert!(links.iter().all(|link| fs::symlink_metadata(link).is_err()), "the links are gone");
    assert_eq!(contents(&Checkpoint::open(&root).unwrap()), expected(1, 1));
}

#[test]
fn a_step_that_is_a_link_loses_only_its_name_when_it_is_saved_again() {
    let folder = tempfile::tempdir().unwrap();
    let (root, archive) = (folder.path().join("root"), folder.path().join("archive"));
    save(&root, 40);
    fs::rename(root.join("step_00000040"), &archive).unwrap();
    symlink(&archive, root.join("step_00000040")).unwrap();
    fs::write(root.join("latest"), "step_00000035\n").unwrap();
    save(&root, 40);
    for path in [root.clone(), archive.clone()] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        checkpoint.verify(0, 1).unwrap();
        assert_eq!(contents(&checkpoint), expected(40, 40), "{}", path.display());
    }
    // One that is too old stays: it is somebody's own.
    symlink(&archive, root.join("step_00000001")).unwrap();
    (41..=44).for_each(|step| save(&root, step));
    assert!(root.join("step_00000001").exists() && archive.join("manifest.json").exists());
}

#[test]
fn a_lock_that_is_a_link_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let precious = precious(folder.path());
    symlink(precious.join("file"), folder.path().join(".lock")).unwrap();
    let error = Saver::new(folder.path(), 1, SaverOptions::default()).err().unwrap().to_string();
    assert!(error.contains(".lock: is a symbolic link; remove it"), "{error}");
    is_whole(&precious);
}
