//! Several lists as one, with what a model learns of each sample.

use std::collections::BTreeSet;
use std::path::Path;

use parking_lot::Mutex;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::dataset::ImageDataset;
use super::decode::RgbImage;
use super::error::ImageError;
use super::sample::Target;

/// Samples of several lists, each with a `T` that a model learns of its image.
///
/// ```
/// use host::data::images::{ImageSet, Target};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let png = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/images/small.png"));
/// # std::fs::write(folder.path().join("cat.png"), png)?;
/// let list = folder.path().join("train.jsonl");
/// std::fs::write(&list, "{\"image\": \"cat.png\", \"label\": 3}\n{\"image\": \"cat.png\", \"label\": 12}\n")?;
/// let class = |target: &Target| match target {
///     Target::Label(class @ 0..10) => Ok(*class),
///     other => Err(format!("{other:?} is none of ten classes")),
/// };
/// let refused = ImageSet::open(&[&list], false, class).unwrap_err().to_string();
/// assert!(refused.contains("1 of 2") && refused.contains("train.jsonl:2: image cat.png: Label(12) is none"), "{refused}");
/// let set = ImageSet::open(&[&list], true, class)?;
/// let (image, class) = set.sample(0, &|_| ())?;
/// assert_eq!((set.len(), set.skipped().len(), image.width, *class), (1, 1, 13, 3));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ImageSet<T> {
    lists: Vec<ImageDataset>,
    samples: Vec<Sample<T>>,
    skips: bool,
    skipped: Vec<String>,
    /// Images that do not decode, of those that were read.
    damaged: Mutex<BTreeSet<usize>>,
}

#[derive(Debug)]
struct Sample<T> {
    list: usize,
    index: usize,
    learned: T,
}

impl<T: Send> ImageSet<T> {
    /// Opens the lists; `learned` makes of what a sample says of its image what is learned, or says what is wrong with it.
    ///
    /// # Errors
    /// As [`ImageDataset::open`], also for samples that `learned` refuses.
    pub fn open(
        paths: &[impl AsRef<Path>],
        skip: bool,
        learned: impl Fn(&Target) -> Result<T, String> + Sync,
    ) -> Result<Self, ImageError> {
        let lists: Vec<ImageDataset> =
            paths.iter().map(|path| ImageDataset::open(path, skip)).collect::<Result<_, _>>()?;
        let mut skipped: Vec<String> = lists.iter().flat_map(|list| list.skipped().to_vec()).collect();
        let (mut samples, mut all) = (Vec::new(), skipped.len());
        for (number, list) in lists.iter().enumerate() {
            all += list.len();
            let read: Vec<_> = (0..list.len()).into_par_iter().map(|index| learned(list.target(index))).collect();
            for (index, read) in read.into_iter().enumerate() {
                match read {
                    Ok(learned) => samples.push(Sample { list: number, index, learned }),
                    Err(what) => skipped.push(format!("{}: {what}", list.place(index))),
                }
            }
        }
        match paths.first() {
            _ if !skip && !skipped.is_empty() => Err(ImageError::Unusable { unusable: skipped, samples: all }),
            Some(path) if samples.is_empty() => Err(ImageError::Empty { path: path.as_ref().into() }),
            _ => Ok(Self { lists, samples, skips: skip, skipped, damaged: Mutex::default() }),
        }
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// What tells these samples from others: a hash of their places and of what they say, not of pixels.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for Sample { list, index, .. } in &self.samples {
            let list = &self.lists[*list];
            hash.update(format!("{}: {:?}\n", list.place(*index), list.target(*index)));
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// What was skipped, each with its place and the reason.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Sample `number`. If its image is damaged and such samples are skipped, the next one whose image is not: the same one
    /// whenever and wherever it is asked for. `note` hears once of each damaged image.
    ///
    /// # Errors
    /// If the image cannot be read.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn sample(&self, number: usize, note: &dyn Fn(&ImageError)) -> Result<(RgbImage, &T), ImageError> {
        let count = self.len();
        let mut next = number;
        loop {
            let Sample { list, index, learned } = &self.samples[next];
            let error = match self.lists[*list].image(*index) {
                Ok(image) => return Ok((image, learned)),
                Err(error) => error,
            };
            if !self.skips || (next + 1) % count == number {
                return Err(error);
            }
            if self.damaged.lock().insert(next) {
                note(&error);
            }
            next = (next + 1) % count;
        }
    }
}
