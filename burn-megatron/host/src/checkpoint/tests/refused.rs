//! What the system refuses: each refusal names the file and what to do, and harms nothing.

use std::path::Path;

use super::super::disk::{Fault, Files, SimDisk};
use super::super::{Saver, SaverOptions};
use super::round_trip::{slices, state};
use super::saving::{ROOT, background, saver, says, steps, submit};

#[test]
fn a_save_without_a_thread_of_its_own_is_written_by_who_submits_it() {
    let disk = SimDisk::new();
    let saver = saver(&disk, background()).spawning(|_, _| Err(std::io::ErrorKind::WouldBlock.into()));
    saver.submit(0, slices(0, 1), &state(1)).unwrap();
    saver.submit(1, slices(1, 1), &state(1)).unwrap();
    assert_eq!((saver.finished()[0].as_ref().unwrap().step, steps(&disk)), (1, vec![1]), "nobody has waited");
    let saver = saver.spawning(|name, work| std::thread::Builder::new().name(name).spawn(work));
    submit(&saver, 2);
    assert_eq!((saver.wait().unwrap()[0].step, steps(&disk)), (2, vec![1, 2]));
}

#[test]
fn a_disk_that_has_space_but_no_inodes_is_not_called_full() {
    // The first refusal of a file with contents, on a disk that says that it has this much space.
    let refused = |free: u64| {
        let failing = |at| {
            let disk = SimDisk::new();
            let saver = saver(&disk, SaverOptions::default());
            disk.set_free_space(free);
            disk.set_fault(Some(Fault::Fail(at, std::io::ErrorKind::StorageFull)));
            saver.rehearse(1 << 20, None).unwrap_err().to_string()
        };
        (0..).map(failing).find(|error| error.contains(".safetensors")).unwrap()
    };
    let error = refused(1 << 40);
    assert!(error.starts_with("cannot create ") && error.contains("some inodes (`df -i`)"), "{error}");
    let error = refused(100);
    assert!(error.contains("the disk is full; the file needs 1.00 MiB, 100 B are free"), "{error}");
}

#[test]
fn a_folder_that_cannot_be_written_to_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    for root in [file.clone(), file.join("below")] {
        let error = Saver::new(&root, 1, SaverOptions::default()).err().unwrap();
        says(&error, &[file.to_str().unwrap(), "a part of the path is a file"]);
    }
    for (kind, advice) in [
        (std::io::ErrorKind::PermissionDenied, "permission to write"),
        (std::io::ErrorKind::ReadOnlyFilesystem, "read-only"),
    ] {
        let disk = SimDisk::new().fork(Some(Fault::Fail(1, kind)));
        let error = Saver::on(Files::new(disk), Path::new(ROOT), 1, SaverOptions::default()).err().unwrap();
        says(&error, &["cannot", ROOT, advice]);
    }
}
