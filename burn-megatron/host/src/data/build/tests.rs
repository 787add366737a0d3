use super::*;
use crate::data::indexed::{Dtype, IndexedWriter};

/// Files of one document each, of these lengths.
fn files(folder: &std::path::Path, lengths: &[usize]) -> Vec<PathBuf> {
    let write = |(file, &length): (usize, &usize)| {
        let prefix = folder.join(format!("file{file}"));
        let mut writer = IndexedWriter::create(&prefix, Dtype::U8).unwrap();
        writer.push_sequence(&vec![file as i64; length]).unwrap();
        writer.finish().unwrap();
        prefix
    };
    lengths.iter().enumerate().map(write).collect()
}

fn train(blend: &Blend, samples: usize) -> Arc<GptSplit> {
    let config = GptDataConfig { num_samples: [Some(samples), None, None], ..GptDataConfig::new(4) };
    GptSplits::build(blend, &config).unwrap().train.unwrap()
}

#[test]
fn a_few_samples_of_many_datasets_are_there() {
    let folder = tempfile::tempdir().unwrap();
    // The shares of the rare ones are rounded up to a sample each, and the frequent one keeps its share of the sum.
    let prefixes = files(folder.path(), &[41; 10]);
    let weights = [vec![0.91], vec![0.01; 9]].concat();
    let data = train(&Blend { prefixes, weights: Some(weights) }, 8);
    assert_eq!(data.len(), 8 + 9);
    let frequent = (0..data.len()).filter(|index| data.sample(*index).tokens[0] == 0).count();
    assert!(frequent > 9, "{frequent}");
}

#[test]
fn a_file_without_a_sample_leaves_the_others_theirs() {
    let folder = tempfile::tempdir().unwrap();
    let prefixes = files(folder.path(), &[3, 13, 21]);
    for samples in [1, 7, 8, 20] {
        let data = train(&Blend { prefixes: prefixes.clone(), weights: None }, samples);
        assert_eq!(data.len(), samples.min(8));
        (0..data.len()).for_each(|index| assert_ne!(data.sample(index).tokens[0], 0));
    }
}

/// Each split has the samples of a run whose only data its files are, in their order.
#[test]
fn splits_with_files_of_their_own_have_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let prefixes = files(folder.path(), &[41, 85, 61]);
    let [train, valid, test] = [0, 1, 2].map(|file| Blend::single(&prefixes[file]));
    let config = GptDataConfig { split: "50,50".parse().unwrap(), ..GptDataConfig::new(4) };
    let parts = GptSplits::build_each([Some(&train), Some(&valid), Some(&test)], &config).unwrap();
    for (split, blend, samples) in [(Split::Train, train, 10), (Split::Valid, valid, 21), (Split::Test, test, 15)] {
        let alone = GptSplits::build(&blend, &GptDataConfig::new(4)).unwrap().train.unwrap();
        let part = parts.get(split).unwrap();
        assert_eq!((part.len(), alone.len()), (samples, samples));
        assert!((0..samples).all(|sample| part.sample(sample) == alone.sample(sample)), "{}", split.name());
    }
    let none = GptSplits::build_each([None, Some(&Blend::single(&prefixes[1])), None], &config).unwrap();
    assert!(none.train.is_none() && none.valid.is_some() && none.test.is_none());
}
