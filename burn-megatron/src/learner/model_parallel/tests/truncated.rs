//! A data file that another program truncates ends the run with an error of its own.

use std::fs::OpenOptions;

use super::*;
use crate::data::indexed::{Dtype, IndexedDataset, IndexedWriter};
use crate::data::{GptDataset, GptOptions, SampleError};

/// Truncates its file before a sample is read.
struct Truncating {
    data: GptDataset,
    file: PathBuf,
    before: usize,
}

impl TokenDataset for Truncating {
    fn len(&self) -> usize {
        self.data.len()
    }

    fn seq_length(&self) -> usize {
        self.data.seq_length()
    }

    fn sample(&self, index: usize) -> Sample {
        self.data.sample(index)
    }

    fn try_sample(&self, index: usize) -> Result<Sample, SampleError> {
        if index >= self.before {
            OpenOptions::new().write(true).open(&self.file)?.set_len(6)?;
        }
        TokenDataset::try_sample(&self.data, index)
    }
}

#[test]
fn a_data_file_that_is_truncated_under_a_run_ends_it_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("tokens");
    let mut writer = IndexedWriter::create(&prefix, Dtype::U16).unwrap();
    writer.push_sequence(&Vec::from_iter((0..900i64).map(|i| i * 7 % 33))).unwrap();
    writer.finish().unwrap();
    let options = GptOptions {
        seq_length: SEQ,
        num_samples: None,
        seed: 1,
        drop_last: true,
        eod_mask_loss: None,
        eod_documents: None,
        cache: None,
    };
    let tokens = Arc::new(IndexedDataset::open(&prefix).unwrap());
    let file = tokens.bin_path().to_path_buf();
    let truncating = GptDataset::new(tokens, 0..1, &options).unwrap();
    // The last samples of the fourth batch of 8, which the second rank reads.
    let truncating = Arc::new(Truncating { data: truncating, file: file.clone(), before: 30 });

    let (mesh, build) = (Mesh::new("DP2".parse().unwrap()).unwrap(), builder::<Llama>(&llama(), FloatDType::F32));
    let run = Pretraining::new(mesh, engine(), 12, (truncating, data(200, 2)), llama().dims(), build)
        .directory(folder.path().join("run"));
    let error = launch(&run).error.expect("the failure is the result's error").to_string();
    // The first rank's, if it reads its own samples later.
    for words in ["failed: cannot read", &file.display().to_string(), "ends at byte 6", "truncated", "; restore it"] {
        assert!(error.contains(words), "`{words}` is missing in: {error}");
    }
    assert_eq!(trained_after(folder.path(), 0).len(), 3);
}
