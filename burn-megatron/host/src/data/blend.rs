//! Several datasets mixed by weight.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::error::DataError;
use super::gpt::GptDataset;
use super::sample::{Sample, SampleError, TokenDataset};

/// Prefixes of indexed datasets and how much of each is wanted: `"0.3 A 0.7 B"`, or `"A B"` for everything there is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Blend {
    /// Prefixes of `.bin`/`.idx` pairs.
    pub prefixes: Vec<PathBuf>,
    /// A weight for each, of any scale; `None` takes every sample of one epoch of each.
    pub weights: Option<Vec<f64>>,
}

impl Blend {
    /// One dataset, unmixed.
    pub fn single(prefix: impl Into<PathBuf>) -> Self {
        Self { prefixes: vec![prefix.into()], weights: None }
    }
}

impl FromStr for Blend {
    type Err = DataError;

    fn from_str(blend: &str) -> Result<Self, DataError> {
        let refuse = |what: String| Err(DataError::Blend { blend: blend.into(), what });
        let words: Vec<&str> = blend.split_whitespace().collect();
        if words.is_empty() {
            return refuse("no dataset".into());
        }
        if words[0].parse::<f64>().is_err() {
            return Ok(Self { prefixes: words.into_iter().map(PathBuf::from).collect(), weights: None });
        }
        let (mut prefixes, mut weights) = (Vec::new(), Vec::new());
        for pair in words.chunks(2) {
            match pair {
                [weight, prefix] => {
                    match weight.parse::<f64>() {
                        Ok(value) if value.is_finite() && value > 0.0 => weights.push(value),
                        _ => return refuse(format!("'{weight}' before '{prefix}' is no positive weight")),
                    }
                    prefixes.push(PathBuf::from(prefix));
                }
                _ => return refuse(format!("no prefix follows the weight '{}'", pair[0])),
            }
        }
        Ok(Self { prefixes, weights: Some(weights) })
    }
}

/// For each sample of a blend, the dataset it comes from and its index there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlendIndex {
    /// Dataset of each sample.
    pub dataset: Vec<u16>,
    /// Index of each sample in its dataset.
    pub sample: Vec<u32>,
}

impl BlendIndex {
    /// The next sample always comes from the dataset that is furthest behind its weight (Megatron's
    /// `build_blending_indices`); `weights` must add up to 1. Nothing is taken from a dataset of weight 0.
    pub fn weighted(weights: &[f64], size: usize) -> Self {
        Self::greedy(weights, size, |_, _| false)
    }

    /// The same, until each dataset is used up (Megatron's `build_exhaustive_blending_indices`).
    pub fn exhaustive(sizes: &[usize]) -> Self {
        let total: usize = sizes.iter().sum();
        let weights: Vec<f64> = sizes.iter().map(|&size| size as f64 / total as f64).collect();
        Self::greedy(&weights, total, |dataset, used| used as usize == sizes[dataset])
    }

    fn greedy(weights: &[f64], size: usize, used_up: impl Fn(usize, u32) -> bool) -> Self {
        let mut used = vec![0u32; weights.len()];
        let mut index = Self { dataset: Vec::with_capacity(size), sample: Vec::with_capacity(size) };
        for i in 0..size {
            let drawn = i.max(1) as f64;
            let mut best = None;
            let there = |(dataset, weight): &(usize, &f64)| **weight > 0.0 && !used_up(*dataset, used[*dataset]);
            for (dataset, weight) in weights.iter().enumerate().filter(there) {
                let behind = weight * drawn - f64::from(used[dataset]);
                if best.is_none_or(|(most, _)| behind > most) {
                    best = Some((behind, dataset));
                }
            }
            let (_, dataset) = best.expect("a dataset that is not used up");
            index.dataset.push(dataset as u16);
            index.sample.push(used[dataset]);
            used[dataset] += 1;
        }
        index
    }
}

impl BlendIndex {
    /// How many samples it takes of a dataset.
    pub(super) fn taken(&self, dataset: usize) -> usize {
        self.dataset.iter().filter(|&&from| usize::from(from) == dataset).count()
    }
}

/// Samples of several datasets, mixed by a [`BlendIndex`].
#[derive(Debug)]
pub struct BlendedDataset {
    datasets: Vec<GptDataset>,
    index: BlendIndex,
    seq_length: usize,
}

impl BlendedDataset {
    /// Mixes `datasets`, which have samples of equal length. Fails when the index asks for more samples of a dataset
    /// than it has.
    pub(super) fn new(datasets: Vec<GptDataset>, index: BlendIndex, seq_length: usize) -> Result<Self, String> {
        for (&dataset, &sample) in index.dataset.iter().zip(&index.sample) {
            let available = datasets[usize::from(dataset)].len();
            if sample as usize >= available {
                return Err(format!("dataset {dataset} has {available} samples, the blend takes more of it"));
            }
        }
        Ok(Self { datasets, index, seq_length })
    }

    /// The datasets that are mixed.
    pub fn datasets(&self) -> &[GptDataset] {
        &self.datasets
    }

    /// Where each sample comes from.
    pub fn index(&self) -> &BlendIndex {
        &self.index
    }
}

impl TokenDataset for BlendedDataset {
    fn len(&self) -> usize {
        self.index.dataset.len()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn sample(&self, index: usize) -> Sample {
        self.try_sample(index).unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_sample(&self, index: usize) -> Result<Sample, SampleError> {
        assert!(index < self.index.dataset.len(), "sample {index} of {}", self.index.dataset.len());
        self.datasets[usize::from(self.index.dataset[index])].try_sample(self.index.sample[index] as usize)
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        self.datasets.iter().map(TokenDataset::content).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_form() {
        let blend: Blend = "0.3 a 7e-1 b/c".parse().unwrap();
        assert_eq!(blend.weights, Some(vec![0.3, 0.7]));
        assert_eq!(blend.prefixes, [PathBuf::from("a"), PathBuf::from("b/c")]);
        assert_eq!("a b".parse::<Blend>().unwrap().weights, None);
        for wrong in ["", "0.3", "0.3 a 0.7", "0.3 a b c", "-1 a", "nan a"] {
            assert!(wrong.parse::<Blend>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn greedy_order_is_megatrons() {
        let index = BlendIndex::weighted(&[0.3, 0.7], 12);
        assert_eq!(index.dataset, [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1]);
        assert_eq!(index.sample, [0, 0, 1, 2, 1, 3, 4, 2, 5, 6, 3, 7]);
    }

    #[test]
    fn nothing_is_taken_from_a_dataset_that_is_empty() {
        assert_eq!(BlendIndex::weighted(&[0.0, 1.0], 3), BlendIndex { dataset: vec![1; 3], sample: vec![0, 1, 2] });
        assert_eq!(BlendIndex::weighted(&[0.5, 0.0, 0.5], 4).taken(1), 0);
    }

    proptest! {
        #[test]
        fn counts_stay_within_one_of_their_share(raw in prop::collection::vec(0.01f64..1.0, 1..6), size in 1usize..500) {
            let total: f64 = raw.iter().sum();
            let weights: Vec<f64> = raw.iter().map(|w| w / total).collect();
            let index = BlendIndex::weighted(&weights, size);
            for (dataset, weight) in weights.iter().enumerate() {
                let count = index.taken(dataset);
                prop_assert!(count as f64 <= weight * size as f64 + 1.0 + 1e-9);
            }
        }

        #[test]
        fn exhaustive_takes_every_sample_once(sizes in prop::collection::vec(0usize..40, 1..6)) {
            let index = BlendIndex::exhaustive(&sizes);
            for (dataset, &size) in sizes.iter().enumerate() {
                let pairs = index.dataset.iter().zip(&index.sample);
                let samples: Vec<_> = pairs.filter(|(d, _)| usize::from(**d) == dataset).map(|(_, s)| *s as usize).collect();
                prop_assert_eq!(samples, (0..size).collect::<Vec<_>>());
            }
        }
    }
}
