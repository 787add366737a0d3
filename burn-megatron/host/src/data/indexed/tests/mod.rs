//! Round trips, and what damaged files are told.

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use tempfile::TempDir;

use super::layout::{MAGIC, VERSION};
use super::{Dtype, IndexedDataset, IndexedError, IndexedWriter, paths};
use crate::data::{Blend, GptDataConfig, GptSplits, TokenDataset};

mod robust;

/// Writes documents of sequences and returns the prefix.
fn write(folder: &TempDir, dtype: Dtype, documents: &[Vec<Vec<i64>>]) -> PathBuf {
    let prefix = folder.path().join("data");
    let mut writer = IndexedWriter::create(&prefix, dtype).unwrap();
    for document in documents {
        for sequence in document {
            writer.push_sequence(sequence).unwrap();
        }
        writer.end_document();
    }
    let summary = writer.finish().unwrap();
    assert_eq!(summary.documents, documents.len());
    prefix
}

fn small() -> Vec<Vec<Vec<i64>>> {
    vec![vec![vec![1, 2, 3], vec![4]], vec![], vec![vec![5, 6]]]
}

/// Opens `data` after its index was changed and returns byte and message of the refusal.
fn refusal(change: impl FnOnce(&mut Vec<u8>)) -> (usize, String) {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder, Dtype::U16, &small());
    let idx = prefix.with_extension("idx");
    let mut bytes = fs::read(&idx).unwrap();
    change(&mut bytes);
    fs::write(&idx, bytes).unwrap();
    match IndexedDataset::open(&prefix) {
        Err(IndexedError::Index { byte, what, .. }) => (byte, what),
        other => panic!("not refused for its index: {other:?}"),
    }
}

fn put(at: usize, new: &[u8]) -> impl FnOnce(&mut Vec<u8>) {
    move |bytes| bytes[at..at + new.len()].copy_from_slice(new)
}

#[test]
fn every_truncation_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder, Dtype::I32, &small());
    for (extension, kind) in [("idx", "index"), ("bin", "tokens")] {
        let path = prefix.with_extension(extension);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let refused = match IndexedDataset::open(&prefix) {
                Err(IndexedError::Index { byte, .. }) => kind == "index" && byte <= length.max(26),
                Err(IndexedError::Tokens { found, .. }) => kind == "tokens" && found == length,
                _ => false,
            };
            assert!(refused, "{length} bytes of the .{extension}");
        }
        fs::write(&path, &whole).unwrap();
    }
    assert!(IndexedDataset::open(&prefix).is_ok());
}

#[test]
fn defects_are_named_with_their_byte() {
    // 3 sequences (lengths at 34, pointers at 46) and 4 boundaries (at 70), 102 bytes.
    assert_eq!(refusal(put(0, b"PK")).0, 0);
    assert_eq!(refusal(put(9, &[2])), (9, "version 2, only version 1 is known".into()));
    assert_eq!(refusal(put(17, &[9])), (17, "element type code 9, known are 1 to 8".into()));
    assert_eq!(refusal(put(18, &[0xff; 8])).0, 18);
    assert_eq!(refusal(put(26, &[0xff; 8])).0, 26);
    assert_eq!(refusal(put(26, &[0; 8])).0, 26);
    assert_eq!(refusal(put(38, &(-1i32).to_le_bytes())), (38, "sequence 1 has length -1".into()));
    assert_eq!(
        refusal(put(54, &7u64.to_le_bytes())),
        (54, "sequence 1 starts at byte 7 of the .bin, by the lengths it is byte 6".into())
    );
    assert_eq!(refusal(put(70, &[1])), (70, "the first document starts at sequence 1 instead of 0".into()));
    assert_eq!(refusal(put(78, &[9])), (86, "document 2 starts at sequence 2, before 9".into()));
    assert_eq!(refusal(put(94, &[2])), (94, "the last document ends at sequence 2 of 3".into()));
    assert_eq!(refusal(|bytes| bytes.push(0)), (102, "1 bytes follow after the last document boundary".into()));
    assert_eq!(refusal(|bytes| bytes.truncate(50)).0, 50);
}

#[test]
fn modes_of_multimodal_files_are_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder, Dtype::U8, &small());
    let idx = prefix.with_extension("idx");
    let mut bytes = fs::read(&idx).unwrap();
    bytes.extend([0, 1, 0]);
    fs::write(&idx, bytes).unwrap();
    let data = IndexedDataset::open(&prefix).unwrap();
    assert!(data.is_multimodal());
    assert_eq!(data.sequence(0).unwrap(), [1, 2, 3]);
}

/// A file with a hole: no disk holds so much.
#[test]
fn tokens_are_counted_beyond_32_bits() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("large");
    let lengths = [i32::MAX, i32::MAX, i32::MAX, 100];
    let starts = [0i64, 1, 2, 3].map(|sequence| sequence * i64::from(i32::MAX) * 2);
    let mut index = [&MAGIC[..], &VERSION.to_le_bytes(), &[Dtype::U16.code()]].concat();
    index.extend([4u64, 5].map(u64::to_le_bytes).concat());
    index.extend(lengths.map(i32::to_le_bytes).concat());
    index.extend(starts.map(i64::to_le_bytes).concat());
    index.extend([0i64, 1, 2, 3, 4].map(i64::to_le_bytes).concat());
    fs::write(prefix.with_extension("idx"), index).unwrap();
    let bytes = starts[3] as u64 + 200;
    let mut bin = fs::File::create(prefix.with_extension("bin")).unwrap();
    bin.seek(SeekFrom::Start(bytes - 2)).unwrap();
    bin.write_all(&[7, 1]).unwrap();
    drop(bin);

    let data = Arc::new(IndexedDataset::open(&prefix).unwrap());
    assert_eq!(data.num_tokens() as u64, bytes / 2);
    assert_eq!(data.sequence(3).unwrap()[98..], [0, 263]);
    let config = GptDataConfig::new(1 << 20);
    let train = GptSplits::from_datasets(&[data], &Blend::single(&prefix), &config).unwrap().train.unwrap();
    assert_eq!(train.len() as u64, (bytes / 2 - 1) >> 20);
    assert_eq!(train.sample(train.len() - 1).tokens.len(), 1 << 20);
}

#[test]
fn an_abandoned_writer_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = IndexedWriter::create(folder.path().join("data"), Dtype::U8).unwrap();
    writer.push_sequence(&[1i64]).unwrap();
    assert!(matches!(writer.push_sequence(&[256i64]), Err(IndexedError::Value { value: 256, .. })));
    drop(writer);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn prefixes_keep_their_dots() {
    let (bin, idx) = paths(Path::new("a/corpus.v1"));
    assert_eq!((bin, idx), ("a/corpus.v1.bin".into(), "a/corpus.v1.idx".into()));
    assert_eq!(paths(Path::new("corpus.idx")).0, PathBuf::from("corpus.bin"));
}

#[test]
fn no_documents_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let data = IndexedDataset::open(write(&folder, Dtype::U16, &[])).unwrap();
    assert_eq!((data.num_documents(), data.num_sequences(), data.num_tokens()), (0, 0, 0));
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL.to_vec())
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        dtype in dtype(),
        documents in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<i64>(), 1..20), 0..4), 0..10),
    ) {
        // Truncate the values to what the type holds.
        let fit = |value: i64| {
            let mut bytes = Vec::new();
            let value = if matches!(dtype, Dtype::F32 | Dtype::F64) { value >> 40 } else { value };
            dtype.encode(value, &mut bytes);
            let mut fitted = Vec::new();
            dtype.decode(&bytes, &mut fitted);
            fitted[0]
        };
        let documents: Vec<Vec<Vec<i64>>> = documents.into_iter()
            .map(|d| d.into_iter().map(|s| s.into_iter().map(fit).collect()).collect())
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let data = IndexedDataset::open(write(&folder, dtype, &documents)).unwrap();
        prop_assert_eq!(data.dtype(), dtype);
        prop_assert_eq!(data.num_documents(), documents.len());
        for (i, document) in documents.iter().enumerate() {
            let read: Vec<Vec<i64>> = data.document(i).map(|sequence| data.sequence(sequence).unwrap()).collect();
            prop_assert_eq!(&read, document);
            for (sequence, tokens) in data.document(i).zip(document) {
                let middle = tokens.len() / 2;
                let mut tail = Vec::new();
                data.read(sequence, middle..tokens.len(), &mut tail).unwrap();
                prop_assert_eq!(&tail[..], &tokens[middle..]);
            }
        }
    }

    /// Any change of one byte of the index is refused, or leaves every read in bounds.
    #[test]
    fn damage_never_panics(at in 0usize..102, value: u8) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = write(&folder, Dtype::U16, &small());
        let idx = prefix.with_extension("idx");
        let mut bytes = fs::read(&idx).unwrap();
        bytes[at] = value;
        fs::write(&idx, bytes).unwrap();
        if let Ok(data) = IndexedDataset::open(&prefix) {
            let tokens: usize = (0..data.num_sequences()).map(|i| data.sequence(i).unwrap().len()).sum();
            prop_assert_eq!(tokens, data.num_tokens());
            let sequences: usize = (0..data.num_documents()).map(|i| data.document(i).len()).sum();
            prop_assert_eq!(sequences, data.num_sequences());
        }
    }
}
