//! From a Hugging Face folder to a checkpoint of ours and back.

use std::ops::Range;
use std::path::{Path, PathBuf};

use backend_dist::launch::BoxError;
use models::{FamilyConfig, ModelConfig};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::companions::Companions;
use super::error::HfFolderError;
use super::folder::HfFolder;
use super::optimizer::OptimizerStates;
use super::outputs::TensorReader;
use super::shards::divide;
use crate::checkpoint::{Checkpoint, Kind, RunState, SaveReport, Saver, SaverOptions, Slice};
use crate::data::read_tokenizer;
use crate::element::Element;

/// The key of a checkpoint's configuration that holds the files that came with the model.
const KEY: &str = "hugging_face";
/// Bytes of a slice; larger tensors are read and written in several.
const SLICE: usize = 64 << 20;
/// Bytes of a file, which is in memory while it is written.
const FILE: u64 = 512 << 20;

/// A box of one of the model's tensors or of its optimizer's, to be copied.
struct Chunk<'a> {
    from: &'a HfFolder,
    kind: Kind,
    name: String,
    shape: Vec<usize>,
    ranges: Vec<Range<usize>>,
    element: Element,
}

impl Chunk<'_> {
    fn bytes(&self) -> u64 {
        (self.ranges.iter().map(ExactSizeIterator::len).product::<usize>() * self.element.size()) as u64
    }
}

/// Writes the weights of a folder as a checkpoint in `root`, in their own element types, with a tokenizer: of step 0, or with
/// the states of an optimizer of their step, from which a run continues. At no time is more than one file of half a gigabyte
/// in memory.
///
/// # Errors
/// If a weight or the tokenizer cannot be read, or the checkpoint cannot be written; there must be none in `root` yet.
pub fn import(
    folder: &HfFolder,
    states: Option<&OptimizerStates>,
    tokenizer: Option<PathBuf>,
    root: &Path,
) -> Result<SaveReport, HfFolderError> {
    if root.exists() && !Checkpoint::list(root)?.is_empty() {
        return Err(HfFolderError::file(root, "holds checkpoints already; give another folder"));
    }
    let mut chunks = chunks(folder, Kind::Weight)?;
    for (kind, from) in states.map_or(&[][..], OptimizerStates::kinds) {
        chunks.extend(self::chunks(from, *kind)?);
    }
    let sizes: Vec<u64> = chunks.iter().map(Chunk::bytes).collect();
    let files = divide(&sizes, FILE);
    let (step, skipped) = states.map_or((0, 0), OptimizerStates::counts);
    let mut config = states.map_or(json!({}), |states| states.config().clone());
    keep_companions(&mut config, folder.companions());
    let state = RunState {
        step,
        consumed_samples: states.map_or(0, OptimizerStates::consumed),
        updates: states.map_or(0, OptimizerStates::updates),
        skipped_samples: states.map(|_| skipped),
        world_size: 1,
        model: json!(folder.config()),
        config,
        ..RunState::default()
    };
    if let Some(path) = &tokenizer {
        read_tokenizer(path).map_err(|error| HfFolderError::file(path, format!("is no tokenizer: {error}")))?;
    }
    let options = SaverOptions { tokenizer, ..SaverOptions::default() };
    let saver = Saver::new(root, files.len(), options)?;
    saver.rehearse(sizes.iter().sum(), Some(1))?;
    for (writer, file) in files.into_iter().enumerate() {
        let slices = chunks[file].iter().map(slice).collect::<Result<_, _>>()?;
        saver.submit(writer, slices, &state)?;
    }
    let report = saver.wait()?.pop();
    report.ok_or_else(|| HfFolderError::file(root, "the checkpoint was not completed"))
}

fn weight(name: &str) -> impl FnOnce(BoxError) -> HfFolderError {
    move |source| HfFolderError::Weight { name: name.into(), source }
}

/// All tensors, the large ones in chunks of rows.
fn chunks(from: &HfFolder, kind: Kind) -> Result<Vec<Chunk<'_>>, HfFolderError> {
    let mut chunks = Vec::new();
    for (name, foreign) in from.config().hf_names().iter().filter(|(name, _)| from.has(name)) {
        let shape = foreign.our_shape();
        let element = from.element(name, &shape).map_err(weight(name))?;
        let row = shape[1..].iter().product::<usize>() * element.size();
        let rows = (SLICE / row.max(1)).max(1);
        for first in (0..shape[0]).step_by(rows) {
            let mut ranges: Vec<Range<usize>> = shape.iter().map(|size| 0..*size).collect();
            ranges[0] = first..(first + rows).min(shape[0]);
            chunks.push(Chunk { from, kind, name: name.into(), shape: shape.clone(), ranges, element });
        }
    }
    Ok(chunks)
}

fn slice(chunk: &Chunk) -> Result<Slice, HfFolderError> {
    let data = chunk.from.read_bytes(&chunk.name, &chunk.shape, &chunk.ranges).map_err(weight(&chunk.name))?;
    Ok(Slice {
        kind: chunk.kind,
        name: chunk.name.clone(),
        global_shape: chunk.shape.clone(),
        ranges: chunk.ranges.clone(),
        dtype: chunk.element.dtype(),
        data: data.into(),
    })
}

/// The weights of a checkpoint.
pub struct CheckpointWeights<'a> {
    checkpoint: &'a Checkpoint,
    kinds: [Kind; 2],
    /// Each in the type of the weight that the model computed with.
    rounded: bool,
}

impl<'a> CheckpointWeights<'a> {
    /// The weights that the model computed with.
    pub fn of(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, kinds: [Kind::Weight, Kind::Master], rounded: false }
    }

    /// The most precise ones that there are, to be converted.
    pub fn most_precise(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, kinds: [Kind::Master, Kind::Weight], rounded: false }
    }

    /// Their moving average, and weights that have none because they are frozen.
    pub fn average(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, kinds: [Kind::Average, Kind::Weight], rounded: false }
    }

    /// The same, each in the type of its weight.
    pub fn rounded_average(checkpoint: &'a Checkpoint) -> Self {
        Self { rounded: true, ..Self::average(checkpoint) }
    }

    fn kind(&self, name: &str) -> Kind {
        let [first, second] = self.kinds;
        if self.checkpoint.holds(first, name) { first } else { second }
    }
}

impl TensorReader for CheckpointWeights<'_> {
    fn element(&self, name: &str, shape: &[usize]) -> Result<Element, BoxError> {
        let none: Vec<Range<usize>> = shape.iter().map(|_| 0..0).collect();
        let of_weight = self.rounded && self.checkpoint.holds(Kind::Weight, name);
        let kind = if of_weight { Kind::Weight } else { self.kind(name) };
        float(self.checkpoint.read(kind, name, shape, &none)?.0)
    }

    fn read_bytes(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError> {
        let (dtype, bytes) = self.checkpoint.read(self.kind(name), name, shape, ranges)?;
        let (stored, element) = (float(dtype)?, self.element(name, shape)?);
        if stored == element {
            return Ok(bytes);
        }
        let mut rounded = Vec::new();
        element.encode_finite(&stored.decode(&bytes), &mut rounded)?;
        Ok(rounded)
    }
}

fn float(dtype: Dtype) -> Result<Element, BoxError> {
    Element::of(dtype).ok_or_else(|| format!("its elements are {dtype}, not F64, F32, BF16 or F16").into())
}

/// The model of a checkpoint.
///
/// # Errors
/// If the checkpoint does not say, or has another kind of model than ours.
pub fn model_of(checkpoint: &Checkpoint) -> Result<FamilyConfig, HfFolderError> {
    let path = checkpoint.path().join("manifest.json");
    let config: FamilyConfig = serde_json::from_value(checkpoint.state().model.clone())
        .map_err(|error| HfFolderError::file(&path, format!("`model` is none of our models: {error}")))?;
    config.check().map_err(|error| HfFolderError::file(&path, format!("`model`: {error}")))?;
    Ok(config)
}

/// Puts the files that came with a model into the configuration that its checkpoints keep, so that [`companions_of`]
/// finds them.
pub fn keep_companions(config: &mut Value, companions: &Companions) {
    if let Some(config) = config.as_object_mut() {
        config.insert(KEY.into(), json!(companions));
    }
}

/// The files that came with the model of a checkpoint, if it was imported or trained from a Hugging Face folder.
///
/// # Errors
/// If the manifest names a file that does not come with a model.
pub fn companions_of(checkpoint: &Checkpoint) -> Result<Companions, HfFolderError> {
    let Some(files) = checkpoint.state().config.get(KEY) else { return Ok(Companions::default()) };
    serde_json::from_value(files.clone()).map_err(|error| {
        let path = checkpoint.path().join("manifest.json");
        HfFolderError::file(&path, format!("`state.config.{KEY}`: {error}; the checkpoint is not to be trusted"))
    })
}
