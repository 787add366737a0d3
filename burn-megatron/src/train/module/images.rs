//! Lists of images as the samples of a run.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{DType, Device};
use indicatif::HumanCount;
use rayon::prelude::*;
use serde_json::Value;

use super::family::ModuleData;
use crate::config::{ModuleConfig, Precision};
use crate::console::warn;
use crate::data::images::{ImageError, ImageProcessor, ImageSet, Target};
use crate::data::numpy::epochs;
use crate::learner::ReadBatch;
use crate::train::TrainError;

/// How pixels are made of images.
#[derive(Clone)]
pub(super) struct Pixels {
    processor: ImageProcessor,
    json: Value,
    /// In words, where it comes from.
    source: String,
    /// Channels, and height and width.
    pub image: [usize; 2],
    pub dtype: DType,
}

impl Pixels {
    /// As `images.processor` says, or the folder of the model, or else `default`, for a model that takes images of these channels
    /// and this height and width.
    pub fn of(config: &ModuleConfig, image: [usize; 2], default: &Value) -> Result<Self, TrainError> {
        let of_folder = || ImageProcessor::file_of(config.model.hf.as_deref()?).ok();
        let file = config.images.processor.clone().or_else(of_folder);
        let refused = |what: String| TrainError::Module(format!("images.processor: {what}"));
        let (json, processor) = match &file {
            Some(file) => {
                ImageProcessor::read(file).map_err(|error| refused(format!("{}: {error}", file.display())))?
            }
            None => {
                let processor = ImageProcessor::from_json(default).map_err(|error| refused(error.to_string()))?;
                (default.clone(), processor)
            }
        };
        let name = default["image_processor_type"].as_str().unwrap_or_default();
        let source = file.map_or_else(|| format!("{name} of transformers"), |file| file.display().to_string());
        let [channels, size] = image;
        if channels != 3 {
            let what = format!("num-channels = {channels}: images have 3; nearest legal: 3");
            return Err(TrainError::Module(format!("model: {what}")));
        }
        if processor.output() != Some([size; 2]) {
            let made = match processor.output() {
                Some([height, width]) => format!("{height} x {width} pixels"),
                None => "images of any size".into(),
            };
            return Err(refused(format!("{source} makes {made}, the model takes {size} x {size}")));
        }
        let dtype = if config.training.dtype == Precision::F64 { DType::F64 } else { DType::F32 };
        Ok(Self { processor, json, source, image, dtype })
    }

    /// Writes the processor next to exported weights, unless it came from the same folder.
    pub fn export(&self, config: &ModuleConfig, exported: &Path) -> Result<(), TrainError> {
        if config.images.processor.is_none() && ImageProcessor::file_of(exported).is_ok() {
            return Ok(());
        }
        let path = exported.join("preprocessor_config.json");
        std::fs::write(&path, format!("{:#}\n", self.json)).map_err(|cause| TrainError::Io { path, cause })
    }
}

/// Samples of `[images]`: `learned` makes of what a list says of an image what is learned, `batch` a batch of these and of
/// pixels, one image after the other.
pub(super) fn images<T: Send + Sync + 'static, B: 'static>(
    config: &ModuleConfig,
    pixels: Pixels,
    learned: impl Fn(&Target) -> Result<T, String> + Sync,
    batch: impl Fn(&[&T], Vec<f32>, &Device) -> B + Clone + Send + Sync + 'static,
) -> Result<ModuleData<B>, TrainError> {
    let (lists, evaluates) = (&config.images, config.evaluation.batches > 0);
    let open = |paths: &[PathBuf], part: &str| {
        let set = Arc::new(ImageSet::open(paths, lists.skip_bad_rows, &learned).map_err(refused)?);
        let note = describe(part, &set);
        Ok::<_, TrainError>((set, note))
    };
    let (set, note) = open(&lists.train, "training")?;
    let (mut notes, mut digest) = (vec![format!("pixels by {}", pixels.source), note], set.digest());
    // Lists are often sorted by class.
    let all = epochs(set.len(), set.len(), config.data.seed);
    let (train, valid) = match evaluates {
        false => (all, None),
        true if lists.validation.is_empty() => {
            let [train, valid, _] = config.data.split.ranges(all.len());
            let of = |range: Option<Range<usize>>| range.map_or(Vec::new(), |range| all[range].to_vec());
            (of(train), Some((set.clone(), of(valid))))
        }
        true => {
            let (apart, note) = open(&lists.validation, "validation")?;
            notes.push(note);
            digest += &format!(" {}", apart.digest());
            let order = (0..apart.len() as u32).collect();
            (all, Some((apart, order)))
        }
    };
    if train.is_empty() {
        return Err(TrainError::Module("data.split leaves no image for training; give it a larger share".into()));
    }
    let count = config.training.steps * config.training.global_batch;
    let order = epochs(train.len(), count, config.data.seed).into_iter().map(|index| train[index as usize]).collect();
    let train = reader(set, order, &pixels, &batch);
    let (held_out, valid) = match valid {
        Some((set, order)) => (held_out(config, order.len())?, reader(set, order, &pixels, &batch)),
        None => (0, train.clone()),
    };
    Ok(ModuleData { train, valid, held_out, notes, digest: Some(digest) })
}

/// Samples of an evaluation: whole global batches, each image at most once.
fn held_out(config: &ModuleConfig, images: usize) -> Result<usize, TrainError> {
    let batch = config.training.global_batch;
    match config.evaluation.batches.min(images / batch) {
        0 => Err(TrainError::Module(format!(
            "{images} images for validation, fewer than training.global-batch = {batch}; nearest legal: evaluation.batches = 0, \
             a larger share in data.split, or images.validation"
        ))),
        batches => Ok(batches * batch),
    }
}

/// Batches of the samples of a set in an order.
fn reader<T: Send + Sync + 'static, B: 'static>(
    set: Arc<ImageSet<T>>,
    order: Vec<u32>,
    pixels: &Pixels,
    batch: &(impl Fn(&[&T], Vec<f32>, &Device) -> B + Clone + Send + Sync + 'static),
) -> ReadBatch<B> {
    let (processor, batch) = (pixels.processor.clone(), batch.clone());
    Arc::new(move |numbers, device| {
        let left_out =
            |error: &ImageError| warn(format_args!("note: {error}; it is left out, as images.skip-bad-rows says"));
        let read = |number: usize| {
            let (image, learned) = set.sample(order[number] as usize, &left_out)?;
            Ok((processor.process(&image), learned))
        };
        let samples: Result<Vec<_>, ImageError> = numbers.into_par_iter().map(read).collect();
        let (pixels, learned): (Vec<Vec<f32>>, Vec<&T>) =
            samples.map_err(|error| error.to_string())?.into_iter().unzip();
        Ok(batch(&learned, pixels.concat(), device))
    })
}

/// What a part of the data is.
fn describe<T: Send>(part: &str, set: &ImageSet<T>) -> String {
    let count = |number: usize| HumanCount(number as u64);
    let mut line = format!("{part}: {} images", count(set.len()));
    if let [first, ..] = set.skipped() {
        line += &format!("; {} bad rows left out, the first: {first}", count(set.skipped().len()));
    }
    line
}

fn refused(error: ImageError) -> TrainError {
    let way_out = match error {
        ImageError::Unusable { .. } => ": images.skip-bad-rows = true",
        _ => "",
    };
    TrainError::Module(format!("[images]: {error}{way_out}"))
}
