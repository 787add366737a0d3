//! Byte- and sample-equality with Megatron's own data files (`golden/indexed/README.md`).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use host::data::indexed::{Dtype, IndexedDataset, IndexedWriter};
use host::data::preprocess::{PreprocessOptions, TokenizerChoice, prepare};
use host::data::{Blend, GptDataConfig, GptDataset, GptOptions, GptSplit, GptSplits, TokenDataset, npy};
use serde::Deserialize;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/indexed").join(name)
}

/// Prepares one of the two corpora and returns the prefix of the result.
fn prepared(folder: &Path, docs: &str, dtype: Dtype) -> PathBuf {
    let mut options = PreprocessOptions::new(vec![golden(docs)], folder.join(docs), TokenizerChoice::None);
    options.append_eod = false;
    options.dtype = Some(dtype);
    options.workers = 2;
    let report = prepare(&options, &mut |_| {}).unwrap();
    report.outputs[0].prefix.clone()
}

/// The matrix rows of an `.npy` of integers and its element type.
fn read_npy(name: &str) -> (String, Vec<Vec<i64>>) {
    let bytes = fs::read(golden(name)).unwrap();
    let length = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = String::from_utf8(bytes[10..10 + length].to_vec()).unwrap();
    let shape = header.split("'shape': (").nth(1).unwrap().split(')').next().unwrap();
    let shape: Vec<usize> = shape.split(',').filter_map(|n| n.trim().parse().ok()).collect();
    let data = &bytes[10 + length..];
    let size = data.len() / shape.iter().product::<usize>();
    let dtype = if size == 2 { Dtype::I16 } else { Dtype::I64 };
    let mut values = Vec::new();
    dtype.decode(data, &mut values);
    let columns = shape.get(1).copied().unwrap_or(1);
    (header, values.chunks(columns).map(<[i64]>::to_vec).collect())
}

#[test]
fn preprocess_writes_megatrons_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let equal = |prefix: &Path, ours: &str, theirs: &str| {
        let ours = fs::read(format!("{}{ours}", prefix.display())).unwrap();
        assert!(ours == fs::read(golden(theirs)).unwrap(), "{theirs} differs");
    };
    let prefix = prepared(folder.path(), "docs.json", Dtype::U16);
    equal(&prefix, ".bin", "corpus_uint16.bin");
    equal(&prefix, ".idx", "corpus_uint16.idx");
    let prefix = prepared(folder.path(), "docs.json", Dtype::I32);
    equal(&prefix, ".idx", "corpus_int32.idx");
    let widened: Vec<u8> = fs::read(golden("corpus_uint16.bin"))
        .unwrap()
        .chunks(2)
        .flat_map(|id| i32::from(u16::from_le_bytes([id[0], id[1]])).to_le_bytes())
        .collect();
    assert!(fs::read(prefix.with_extension("json_text_document.bin")).unwrap() == widened, "int32 .bin differs");
    let prefix = prepared(folder.path(), "docs2.json", Dtype::I32);
    equal(&prefix, ".idx", "second_int32.idx");
}

#[test]
fn reader_gives_back_the_documents() {
    let documents: Vec<Vec<i64>> = serde_json::from_slice(&fs::read(golden("docs.json")).unwrap()).unwrap();
    let data = IndexedDataset::open(golden("corpus_uint16")).unwrap();
    assert_eq!(data.num_documents(), documents.len());
    for (i, document) in documents.iter().enumerate() {
        assert_eq!(data.document(i), i..i + 1);
        assert_eq!(&data.sequence(i).unwrap(), document);
    }
}

#[test]
fn samples_are_megatrons() {
    let folder = tempfile::tempdir().unwrap();
    for (seq_length, seed, file) in
        [(64, 1234, "gpt_seq64_seed1234_train_first64.npy"), (128, 42, "gpt_seq128_seed42_train_first64.npy")]
    {
        let config = GptDataConfig {
            seed,
            split: "90,5,5".parse().unwrap(),
            num_samples: [Some(500), Some(20), Some(20)],
            cache: Some(folder.path().to_path_buf()),
            ..GptDataConfig::new(seq_length)
        };
        let (_, expected) = read_npy(file);
        // Built the first time, from the cache the second time.
        for pass in ["built", "cached"] {
            let train = GptSplits::build(&Blend::single(golden("corpus_uint16")), &config).unwrap().train.unwrap();
            for (i, tokens) in expected.iter().enumerate() {
                assert_eq!(&train.sample(i).tokens, tokens, "{file}, {pass}, sample {i}");
            }
        }
    }
}

#[test]
fn blended_samples_are_megatrons() {
    let folder = tempfile::tempdir().unwrap();
    let blend = Blend {
        prefixes: vec![
            prepared(folder.path(), "docs.json", Dtype::I32),
            prepared(folder.path(), "docs2.json", Dtype::I32),
        ],
        weights: Some(vec![0.3, 0.7]),
    };
    let config = GptDataConfig {
        seed: 77,
        split: "90,10,0".parse().unwrap(),
        num_samples: [Some(400), Some(20), Some(0)],
        ..GptDataConfig::new(64)
    };
    let splits = GptSplits::build(&blend, &config).unwrap();
    assert!(splits.test.is_none());
    let train = splits.train.unwrap();
    let GptSplit::Blended(blended) = &*train else { panic!("a blend of two") };
    let (_, datasets) = read_npy("blend_30_70_dataset_index.npy");
    assert_eq!(blended.index().dataset.iter().map(|&i| vec![i64::from(i)]).collect::<Vec<_>>(), datasets);
    let (header, expected) = read_npy("blend_30_70_seq64_seed77_train_first64.npy");
    let samples: Vec<Vec<i64>> = (0..expected.len()).map(|i| train.sample(i).tokens).collect();
    assert_eq!(samples, expected);

    // And written as numpy writes them, byte for byte.
    let out = folder.path().join("samples.npy");
    npy::write_i64(&out, samples.into_iter().map(Ok), 64).unwrap();
    assert!(
        fs::read(out).unwrap() == fs::read(golden("blend_30_70_seq64_seed77_train_first64.npy")).unwrap(),
        "{header}"
    );
}

#[derive(Deserialize)]
struct Case {
    sizes: Vec<i64>,
    first: usize,
    end: usize,
    seq_length: usize,
    seed: u32,
    drop_last: bool,
    num_samples: Option<usize>,
    #[serde(rename = "rows")]
    samples: Vec<Vec<i64>>,
}

#[test]
fn several_epochs_and_partial_samples_are_as_on_numpy() {
    let cases: Vec<Case> = serde_json::from_slice(&fs::read(golden("numpy_cases.json")).unwrap()).unwrap();
    for (number, case) in cases.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("case");
        let mut writer = IndexedWriter::create(&prefix, Dtype::I32).unwrap();
        let mut next = 0;
        for size in case.sizes {
            writer.push_sequence(&Vec::from_iter(next..next + size)).unwrap();
            writer.end_document();
            next += size;
        }
        writer.finish().unwrap();
        let tokens = Arc::new(IndexedDataset::open(&prefix).unwrap());
        let options = GptOptions {
            seq_length: case.seq_length,
            num_samples: case.num_samples,
            seed: case.seed,
            drop_last: case.drop_last,
            eod_mask_loss: None,
            eod_documents: None,
            cache: None,
        };
        let data = GptDataset::new(tokens, case.first..case.end, &options).unwrap();
        let samples: Vec<Vec<i64>> = (0..data.len()).map(|i| data.tokens(i).unwrap()).collect();
        assert_eq!(samples, case.samples, "case {number}");
    }
}

#[test]
fn a_blend_without_weights_takes_every_sample_once() {
    let folder = tempfile::tempdir().unwrap();
    let blend = Blend {
        prefixes: vec![golden("corpus_uint16"), prepared(folder.path(), "docs2.json", Dtype::I32)],
        weights: None,
    };
    let splits = GptSplits::build(&blend, &GptDataConfig::new(64)).unwrap();
    let data = splits.train.unwrap();
    let mut samples: Vec<_> = (0..data.len()).map(|i| data.sample(i).tokens).collect();
    let mut expected = Vec::new();
    for prefix in blend.prefixes {
        let single = GptSplits::build(&Blend::single(prefix), &GptDataConfig::new(64)).unwrap().train.unwrap();
        expected.extend((0..single.len()).map(|i| single.sample(i).tokens));
    }
    samples.sort_unstable();
    expected.sort_unstable();
    assert_eq!(samples, expected);
    // Weights without a number of samples mean nothing.
    let weighted = Blend { weights: Some(vec![1.0, 1.0]), prefixes: vec![golden("corpus_uint16"); 2] };
    assert!(GptSplits::build(&weighted, &GptDataConfig::new(64)).is_err());
}
