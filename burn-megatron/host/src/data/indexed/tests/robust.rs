//! Other programs at the same files, while they are written and while they are read.

use std::fs;

use super::{small, write};
use crate::data::indexed::{Dtype, IndexedDataset, IndexedError, IndexedWriter};
use crate::data::{Blend, GptDataConfig, GptSplits, TokenDataset};

#[test]
fn two_writers_of_a_prefix_do_not_mix() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("data");
    let write = |value: i64, count: usize| {
        let mut writer = IndexedWriter::create(&prefix, Dtype::U8)?;
        (0..count).try_for_each(|_| writer.push_sequence(&[value; 100]))?;
        writer.finish()
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|value| scope.spawn(move || write(value, 200 + value as usize))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for outcome in &outcomes {
        match outcome {
            Err(IndexedError::Busy { owner, .. }) => {
                assert!(*owner == format!("process {}", std::process::id()) || owner == "another process", "{owner}");
            }
            written => assert_eq!(written.as_ref().unwrap().bytes % 100, 0),
        }
    }
    assert!(outcomes.iter().any(Result::is_ok));
    let data = IndexedDataset::open(&prefix).unwrap();
    let first = data.sequence(0).unwrap()[0];
    assert_eq!(data.num_sequences(), 200 + first as usize);
    (0..data.num_sequences()).for_each(|i| assert_eq!(data.sequence(i).unwrap(), [first; 100]));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no lock and no temporary file is left");
}

#[test]
fn a_prefix_that_is_being_written_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("data");
    let writer = IndexedWriter::create(&prefix, Dtype::U8).unwrap();
    let refused = IndexedWriter::create(&prefix, Dtype::U8).unwrap_err().to_string();
    let process = std::process::id();
    assert!(refused.contains(&format!("data.bin: process {process} is writing it; wait for its end")), "{refused}");
    IndexedWriter::create(folder.path().join("data.bin.other"), Dtype::U8).unwrap().finish().unwrap();
    writer.finish().unwrap();
    IndexedWriter::create(&prefix, Dtype::U8).unwrap().finish().unwrap();
}

/// Files that a killed program has left are removed, and links are not followed.
#[test]
fn temporary_files_are_new_and_links_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let precious = folder.path().join("precious");
    fs::write(&precious, "precious").unwrap();
    for name in ["data.bin.partial", ".data.bin.abcdef.partial", "data.bin"] {
        std::os::unix::fs::symlink(&precious, folder.path().join(name)).unwrap();
    }
    let prefix = write(&folder, Dtype::U8, &small());
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    assert!(!folder.path().join(".data.bin.abcdef.partial").is_symlink());
    assert_eq!(IndexedDataset::open(prefix).unwrap().sequence(0).unwrap(), [1, 2, 3]);
    std::os::unix::fs::symlink(&precious, folder.path().join(".data.bin.lock")).unwrap();
    assert!(matches!(IndexedWriter::create(folder.path().join("data"), Dtype::U8), Err(IndexedError::Write { .. })));
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
}

#[test]
fn a_file_that_shrinks_under_a_run_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("data");
    let mut writer = IndexedWriter::create(&prefix, Dtype::U16).unwrap();
    writer.push_sequence(&vec![7i64; 50_000]).unwrap();
    writer.finish().unwrap();
    let train = GptSplits::build(&Blend::single(&prefix), &GptDataConfig::new(64)).unwrap().train.unwrap();
    for extension in ["idx", "bin"] {
        let file = fs::OpenOptions::new().write(true).open(prefix.with_extension(extension)).unwrap();
        file.set_len(1000.min(file.metadata().unwrap().len())).unwrap();
    }
    let refused = (0..train.len()).find_map(|index| train.try_sample(index).err()).unwrap().to_string();
    assert!(
        refused.contains("data.bin: ends at byte 1000, byte ") && refused.contains("was truncated since"),
        "{refused}"
    );
    assert!(IndexedDataset::open(&prefix).is_err());
}

#[test]
fn the_hash_of_the_content_tells_datasets_apart() {
    let folder = tempfile::tempdir().unwrap();
    let content = |dtype, change: Option<usize>| {
        let mut tokens: Vec<i64> = (0..100_000).map(|index| index % 251).collect();
        change.into_iter().for_each(|at| tokens[at] += 1);
        let prefix = folder.path().join("data");
        let mut writer = IndexedWriter::create(&prefix, dtype).unwrap();
        tokens.chunks(1000).try_for_each(|document| writer.push_sequence(document)).unwrap();
        let written = writer.finish().unwrap().content;
        (written, IndexedDataset::open(&prefix).unwrap().content().unwrap())
    };
    let (written, read) = content(Dtype::U16, None);
    assert_eq!(content(Dtype::U16, None), (written.clone(), read.clone()));
    assert_eq!(content(Dtype::I32, None).1, read, "the same tokens in another type");
    for at in [0, 43_210, 99_999] {
        let (other_written, other_read) = content(Dtype::U16, Some(at));
        assert!(other_written != written && other_read != read, "{at}");
    }
}

#[test]
fn a_folder_in_the_place_of_a_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("data.idx")).unwrap();
    let refused = IndexedDataset::open(folder.path().join("data")).unwrap_err().to_string();
    assert!(refused.ends_with("data.idx: is a folder; a file is needed"), "{refused}");
}
