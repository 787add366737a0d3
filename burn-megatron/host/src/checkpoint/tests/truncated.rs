//! Files of an open checkpoint that another program truncates: an error, where a memory map would end the process.

use std::fs::{self, OpenOptions};
use std::path::Path;

use safetensors::Dtype;

use super::super::{Checkpoint, Kind, Result, Saver, SaverOptions, Slice};
use super::round_trip::state;

/// `writers` files with 64 KiB each; every tensor is split over all of them.
fn save(root: &Path, writers: usize) {
    let saver = Saver::new(root, writers, SaverOptions::default()).unwrap();
    for writer in 0..writers {
        let slice = Slice {
            kind: Kind::Weight,
            name: "weight".into(),
            global_shape: vec![writers, 1 << 16],
            ranges: vec![writer..writer + 1, 0..1 << 16],
            dtype: Dtype::U8,
            data: vec![writer as u8; 1 << 16].into(),
        };
        saver.submit(writer, vec![slice], &state(1)).unwrap();
    }
}

fn read(checkpoint: &Checkpoint, writers: usize, last: usize) -> Result<Vec<u8>> {
    let read = checkpoint.read(Kind::Weight, "weight", &[writers, 1 << 16], &[0..writers, last - 2..last]);
    read.map(|(_, bytes)| bytes)
}

fn truncate(file: &Path, size: u64) {
    OpenOptions::new().write(true).open(file).unwrap().set_len(size).unwrap();
}

#[test]
fn a_file_that_is_truncated_while_the_checkpoint_is_open_is_named() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(read(&checkpoint, 2, 1 << 16).unwrap(), [0, 0, 1, 1]);
    truncate(&checkpoint.path().join("rank_00001.safetensors"), 1000);
    assert_eq!(read(&checkpoint, 2, 100).unwrap(), [0, 0, 1, 1], "what is still there can be read");
    let error = read(&checkpoint, 2, 1 << 16).unwrap_err().to_string();
    for words in ["cannot read ", "rank_00001.safetensors: ends at byte 1000", "was truncated since; restore it"] {
        assert!(error.contains(words), "`{words}` is missing in: {error}");
    }
    // The long run of a whole slice is read straight to where it belongs.
    let whole = checkpoint.read(Kind::Weight, "weight", &[2, 1 << 16], &[1..2, 0..1 << 16]).unwrap_err().to_string();
    assert!(whole.contains("rank_00001.safetensors: ends at byte 1000"), "{whole}");
    let verified = checkpoint.verify(0, 1).unwrap_err().to_string();
    assert!(verified.contains("rank_00001.safetensors: has changed"), "{verified}");
}

#[test]
fn a_checkpoint_of_many_ranks_does_not_take_all_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    // More than stay open.
    let writers = 140;
    save(folder.path(), writers);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let own = |entry: &fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|file| file.starts_with(folder.path()));
    assert_eq!(fs::read_dir("/proc/self/fd").unwrap().flatten().filter(own).count(), 128);
    let expected: Vec<u8> = (0..writers).flat_map(|writer| [writer as u8; 2]).collect();
    assert_eq!(read(&checkpoint, writers, 77).unwrap(), expected);
    truncate(&checkpoint.path().join("rank_00139.safetensors"), 1000);
    let error = read(&checkpoint, writers, 1 << 16).unwrap_err().to_string();
    assert!(error.contains("rank_00139.safetensors: has 1000 bytes") && error.contains("restore it"), "{error}");
}
