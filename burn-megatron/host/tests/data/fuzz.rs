//! Damaged inputs are errors that name their file, or are read as something else; never a panic.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use host::data::chat::rows;
use host::data::indexed::{Dtype, IndexedDataset, IndexedWriter};
use host::data::preprocess::{PreprocessOptions, TokenizerChoice, prepare};
use host::data::{Blend, GptDataConfig, GptSplits, TokenDataset};
use proptest::prelude::*;

use crate::damage::{Damage, apply, cases, damage};

/// Pairs of the corpus: Megatron's own, several sequences in a document, an empty document, modes, no document.
fn pairs(folder: &Path) -> Vec<PathBuf> {
    let golden = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/indexed").join(name);
    let megatron = folder.join("megatron");
    fs::copy(golden("corpus_uint16.bin"), folder.join("megatron.bin")).unwrap();
    fs::copy(golden("corpus_uint16.idx"), folder.join("megatron.idx")).unwrap();
    let write = |name: &str, dtype, documents: &[&[usize]]| {
        let prefix = folder.join(name);
        let mut writer = IndexedWriter::create(&prefix, dtype).unwrap();
        for lengths in documents {
            lengths.iter().for_each(|&length| writer.push_sequence(&vec![7i64; length]).unwrap());
            writer.end_document();
        }
        writer.finish().unwrap();
        prefix
    };
    let several = write("several", Dtype::I32, &[&[9, 1], &[], &[40], &[3, 3, 3]]);
    let modes = write("modes", Dtype::U8, &[&[5], &[60]]);
    let mut index = fs::read(folder.join("modes.idx")).unwrap();
    index.extend([0, 1]);
    fs::write(folder.join("modes.idx"), index).unwrap();
    vec![megatron, several, modes, write("floats", Dtype::F64, &[&[30]]), write("none", Dtype::U16, &[])]
}

/// Whatever is accepted is read to its end.
fn read_all(prefix: &Path) {
    let Ok(data) = IndexedDataset::open(prefix) else { return };
    let tokens: usize = (0..data.num_sequences()).map(|index| data.sequence(index).unwrap().len()).sum();
    assert_eq!(tokens, data.num_tokens());
    let sequences: usize = (0..data.num_documents()).map(|index| data.document(index).len()).sum();
    assert_eq!(sequences, data.num_sequences());
    data.content().unwrap();
    let config = GptDataConfig { split: "80,20".parse().unwrap(), ..GptDataConfig::new(8) };
    if let Ok(splits) = GptSplits::from_datasets(&[Arc::new(data)], &Blend::single(prefix), &config) {
        for split in [splits.train, splits.valid].into_iter().flatten() {
            (0..split.len()).for_each(|index| assert_eq!(split.try_sample(index).unwrap().tokens.len(), 8));
        }
    }
}

const LINES: &[&str] = &[
    "{\"text\": \"Naïve cafés, 123 and more.\", \"ids\": [1, 2, 3]}\n",
    "{\"ids\": [], \"text\": \"\\u00e9\\n\\ud83d\\ude00 <|endoftext|> end\"}\n",
    "[\"an array\", \"of documents\"]\n",
    "[7, 8, 9]\n{\"text\": [300, -1]}\n\n",
    "{\"text\": {\"nested\": [[[[1]]]]}}\n{\"text\": null}\n",
];

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn damaged_pairs_are_refused_or_read(pair in 0usize..5, bin: bool, damage in damage()) {
        let folder = tempfile::tempdir().unwrap();
        let prefix = &pairs(folder.path())[pair];
        let path = prefix.with_extension(if bin { "bin" } else { "idx" });
        let mut bytes = fs::read(&path).unwrap();
        apply(&mut bytes, &damage);
        fs::write(&path, bytes).unwrap();
        read_all(prefix);
    }

    #[test]
    fn damaged_documents_are_named_or_counted(
        lines in prop::collection::vec(prop::sample::select(LINES.to_vec()), 1..5),
        damage in damage(),
        tokenizer in prop::sample::select(vec![
            TokenizerChoice::Bytes, TokenizerChoice::Characters, TokenizerChoice::TrainBpe(300), TokenizerChoice::None,
        ]),
        extension in prop::sample::select(vec!["jsonl", "json", "txt"]),
        keys in prop::sample::select(vec![vec!["text"], vec!["text", "ids"]]),
        skip_bad_lines: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("input").with_extension(extension);
        let mut bytes = lines.concat().into_bytes();
        // Half of the cases are files of valid documents.
        let damage: &[Damage] = if skip_bad_lines { &damage } else { &[] };
        apply(&mut bytes, damage);
        fs::write(&input, bytes).unwrap();
        let mut options = PreprocessOptions::new(vec![input.clone()], folder.path().join("out"), tokenizer);
        options.json_keys = keys.iter().map(|key| key.to_string()).collect();
        (options.workers, options.skip_bad_lines, options.append_eod) = (1, skip_bad_lines, false);
        match prepare(&options, &mut |_| {}) {
            Ok(report) => {
                prop_assert!(skip_bad_lines || report.skipped == 0);
                for output in &report.outputs {
                    let data = IndexedDataset::open(&output.prefix).unwrap();
                    prop_assert_eq!(data.num_documents() as u64, report.documents);
                    prop_assert_eq!(data.num_tokens(), output.summary.tokens);
                }
            }
            Err(error) => {
                let left = fs::read_dir(folder.path()).unwrap().count();
                prop_assert_eq!(left, 1, "a failed run leaves nothing: {}", error);
            }
        }
    }

    /// Pages of Parquet are compressed, so that few bytes say nothing.
    #[test]
    fn damaged_tables_are_named_or_read(
        name in prop::sample::select(vec!["messages", "completions", "turns", "alpaca", "sharegpt", "bad"]),
        footer: bool,
        damage in damage(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.parquet");
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/parquet").join(name);
        let mut bytes = fs::read(golden.with_extension("parquet")).unwrap();
        // The end of a file says where everything is.
        if footer {
            let tail = u32::from_le_bytes(bytes[bytes.len() - 8..bytes.len() - 4].try_into().unwrap()) as usize;
            let mut end = bytes.split_off(bytes.len() - 8 - tail);
            apply(&mut end, &damage);
            bytes.extend(end);
        } else {
            apply(&mut bytes, &damage);
        }
        fs::write(&path, bytes).unwrap();
        let error = match rows(&path) {
            Ok(rows) => rows.take(10_000).find_map(Result::err),
            Err(error) => Some(error),
        };
        prop_assert!(error.is_none_or(|error| error.to_string().contains("table.parquet")));
    }
}
