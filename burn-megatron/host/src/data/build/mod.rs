//! From prefixes and a split to the datasets of a run.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::blend::{Blend, BlendIndex, BlendedDataset};
use super::error::DataError;
use super::gpt::{GptDataset, GptOptions};
use super::indexed::IndexedDataset;
use super::numpy;
use super::order::check_samples;
use super::sample::{Sample, SampleError, TokenDataset};
use super::split::{Split, SplitRatios};

/// How much more of each dataset than its share of a blend is indexed, since the blend may take a few more.
const SURPLUS: f64 = 0.005;

/// What decides the samples of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptDataConfig {
    /// Tokens per sample, S.
    pub seq_length: usize,
    /// Seed of document and sample order.
    #[serde(default = "default_seed")]
    pub seed: u32,
    /// Shares of training, validation and test.
    #[serde(default = "default_split")]
    pub split: SplitRatios,
    /// Samples wanted for training, validation and test; `None` is one epoch.
    #[serde(default)]
    pub num_samples: [Option<usize>; 3],
    /// Id of the end-of-document token, if the prediction made at it should not count in the loss.
    pub eod_mask_loss: Option<i64>,
    /// Id of the end-of-document token, if samples should say where their documents start.
    pub eod_documents: Option<i64>,
    /// Whether validation keeps the tokens that do not fill a last sample, padded and masked.
    #[serde(default)]
    pub keep_partial_validation: bool,
    /// Folder that keeps sample orders between runs; without it they are built each time.
    pub cache: Option<PathBuf>,
}

fn default_seed() -> u32 {
    1234
}

fn default_split() -> SplitRatios {
    SplitRatios::TRAIN_ONLY
}

impl GptDataConfig {
    /// One epoch of everything for training, in the order of Megatron's default seed 1234.
    pub fn new(seq_length: usize) -> Self {
        Self {
            seq_length,
            seed: default_seed(),
            split: default_split(),
            num_samples: [None; 3],
            eod_mask_loss: None,
            eod_documents: None,
            keep_partial_validation: false,
            cache: None,
        }
    }

    fn options(&self, split: Split, num_samples: Option<usize>) -> GptOptions {
        GptOptions {
            seq_length: self.seq_length,
            num_samples,
            seed: self.seed,
            drop_last: !(split == Split::Valid && self.keep_partial_validation),
            eod_mask_loss: self.eod_mask_loss,
            eod_documents: self.eod_documents,
            cache: self.cache.clone(),
        }
    }
}

/// The samples of one split: of one dataset, or of a blend.
#[derive(Debug)]
pub enum GptSplit {
    /// Samples of one dataset.
    Single(GptDataset),
    /// Samples of several.
    Blended(BlendedDataset),
}

impl GptSplit {
    fn data(&self) -> &dyn TokenDataset {
        match self {
            Self::Single(data) => data,
            Self::Blended(data) => data,
        }
    }
}

impl TokenDataset for GptSplit {
    fn len(&self) -> usize {
        self.data().len()
    }

    fn seq_length(&self) -> usize {
        self.data().seq_length()
    }

    fn sample(&self, index: usize) -> Sample {
        self.data().sample(index)
    }

    fn try_sample(&self, index: usize) -> Result<Sample, SampleError> {
        self.data().try_sample(index)
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        self.data().content()
    }
}

/// Training, validation and test data; a split whose share is 0 is `None`.
#[derive(Clone, Debug)]
pub struct GptSplits {
    /// To learn from.
    pub train: Option<Arc<GptSplit>>,
    /// To watch while learning.
    pub valid: Option<Arc<GptSplit>>,
    /// To judge at the end.
    pub test: Option<Arc<GptSplit>>,
}

impl GptSplits {
    /// Opens the datasets of a blend and builds the order of their samples, as Megatron's
    /// `BlendedMegatronDatasetBuilder` does.
    ///
    /// # Errors
    /// When a dataset is refused, a split has no tokens though samples are wanted, or a weighted blend is asked for one
    /// epoch (it has none).
    pub fn build(blend: &Blend, config: &GptDataConfig) -> Result<Self, DataError> {
        let datasets = blend
            .prefixes
            .iter()
            .map(|prefix| IndexedDataset::open(prefix).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        Self::from_datasets(&datasets, blend, config)
    }

    /// The same where each of training, validation and test has files of its own, and all of them; `config.split` is not
    /// looked at (`blend_per_split` of Megatron's builder). Without files a split is `None`. Fails as
    /// [`build`](Self::build).
    pub fn build_each(blends: [Option<&Blend>; 3], config: &GptDataConfig) -> Result<Self, DataError> {
        let build = |split: Split| match blends[split as usize] {
            None => Ok(None),
            Some(blend) => {
                let whole = GptDataConfig { split: SplitRatios::only(split), ..config.clone() };
                Self::build(blend, &whole).map(|parts| parts.get(split).cloned())
            }
        };
        Ok(Self { train: build(Split::Train)?, valid: build(Split::Valid)?, test: build(Split::Test)? })
    }

    /// [`build`](Self::build) for datasets that are open already, in the order of the blend's prefixes.
    pub fn from_datasets(
        datasets: &[Arc<IndexedDataset>],
        blend: &Blend,
        config: &GptDataConfig,
    ) -> Result<Self, DataError> {
        let build = |split| build_split(datasets, blend, config, split).map(|data| data.map(Arc::new));
        Ok(Self { train: build(Split::Train)?, valid: build(Split::Valid)?, test: build(Split::Test)? })
    }

    /// The data of a split.
    pub fn get(&self, split: Split) -> Option<&Arc<GptSplit>> {
        match split {
            Split::Train => self.train.as_ref(),
            Split::Valid => self.valid.as_ref(),
            Split::Test => self.test.as_ref(),
        }
    }
}

fn build_split(
    datasets: &[Arc<IndexedDataset>],
    blend: &Blend,
    config: &GptDataConfig,
    split: Split,
) -> Result<Option<GptSplit>, DataError> {
    let refuse = |what: String| {
        let names: Vec<_> = blend.prefixes.iter().map(|prefix| prefix.display().to_string()).collect();
        DataError::Blend { blend: names.join(" "), what: format!("{}: {what}", split.name()) }
    };
    if config.split.ranges(1)[split as usize].is_none() {
        return Ok(None);
    }
    let wanted = config.num_samples[split as usize];
    let open = |data: &Arc<IndexedDataset>, num_samples| {
        let range = config.split.ranges(data.num_sequences())[split as usize].clone().expect("checked above");
        GptDataset::new(data.clone(), range, &config.options(split, num_samples)).map_err(|error| match error {
            DataError::Samples { path, what } => {
                let share = format!("its share by split {} of {} sequences", config.split, data.num_sequences());
                DataError::Samples { path, what: format!("{what} for {}; {share}", split.name()) }
            }
            other => other,
        })
    };
    // Before the order of a blend is made: it has 6 bytes for a sample, its datasets have more.
    let fits = |samples: usize| {
        let too_large = |(bytes, available, nearest)| {
            let path = datasets[0].bin_path().to_path_buf();
            DataError::Order { path, samples, bytes, available, nearest }
        };
        check_samples(samples).map_err(too_large)
    };
    if let ([data], None) = (datasets, &blend.weights) {
        return open(data, wanted).map(|data| Some(GptSplit::Single(data)));
    }
    let (components, index) = match (&blend.weights, wanted) {
        (Some(_), None) => return Err(refuse("a weighted blend has no epochs, give the number of samples".into())),
        (Some(weights), Some(wanted)) => {
            let weights = numpy::normalize(weights);
            let shares: Vec<f64> = weights.iter().map(|weight| (wanted as f64 * weight).ceil()).collect();
            let size = shares.iter().map(|share| *share as usize).sum();
            fits(size)?;
            // Megatron normalises a second time, which can change the last bit.
            let index = BlendIndex::weighted(&numpy::normalize(&weights), size);
            let component = |(dataset, share): (usize, &f64)| {
                let component = open(&datasets[dataset], Some((share * (1.0 + SURPLUS)).ceil() as usize))?;
                // Shares are rounded up one by one, so a few samples of many datasets are more than a surplus covers.
                let taken = index.taken(dataset);
                if taken > component.len() { open(&datasets[dataset], Some(taken)) } else { Ok(component) }
            };
            (shares.iter().enumerate().map(component).collect::<Result<Vec<_>, _>>()?, index)
        }
        (None, wanted) => {
            let components = datasets.iter().map(|data| open(data, None)).collect::<Result<Vec<_>, _>>()?;
            let sizes: Vec<usize> = components.iter().map(TokenDataset::len).collect();
            let index = match wanted {
                None => BlendIndex::exhaustive(&sizes),
                Some(wanted) => {
                    let weights: Vec<f64> = sizes.iter().map(|&size| size as f64).collect();
                    BlendIndex::weighted(&numpy::normalize(&weights), wanted.min(sizes.iter().sum()))
                }
            };
            (components, index)
        }
    };
    BlendedDataset::new(components, index, config.seq_length).map(|data| Some(GptSplit::Blended(data))).map_err(refuse)
}

#[cfg(test)]
mod tests;
