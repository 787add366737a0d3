//! Weights that a run reads from folders whenever it begins, because its checkpoints do not have them: the base of
//! adapters, a reference model, the adapter that this has, a teacher. A run that resumes must read the same; that it still
//! names them is what [`RunConfig::check_changes`](crate::config::RunConfig::check_changes) sees to.

use std::collections::BTreeMap;

use backend_dist::launch::BoxError;
use models::lora::Adapter;
use models::{ModelConfig, WeightSource};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::resume::ResumePoint;
use crate::checkpoint::Checkpoint;
use crate::config::Problem;
use crate::hf::HfFolder;

/// The key of a checkpoint's configuration that holds the hashes of such folders.
const KEY: &str = "weights";
/// Tensors of a folder that are looked at, at the most, and the numbers of each.
const SAMPLE: (usize, usize) = (4096, 16);

/// Such folders, by their keys in the configuration.
pub(super) type Folders<'a> = Vec<(&'static str, Weights<'a>)>;

/// What a folder holds.
pub(super) enum Weights<'a> {
    Model(&'a HfFolder),
    Adapter(&'a Adapter),
}

/// Puts the hashes into the configuration that the run's checkpoints keep. The error names key and file.
pub(super) fn keep(config: &mut Value, folders: &Folders) -> Result<(), String> {
    let hash = |(key, weights): &(&'static str, Weights)| {
        Ok((*key, hash(weights).map_err(|error| format!("{key}: {error}"))?))
    };
    let hashes = folders.iter().map(hash).collect::<Result<BTreeMap<_, _>, String>>()?;
    if let Some(config) = config.as_object_mut().filter(|_| !hashes.is_empty()) {
        config.insert(KEY.into(), json!(hashes));
    }
    Ok(())
}

/// What differs from the folders of the run that saved a checkpoint, but for keys or sections in `allowed`.
pub(super) fn problems(start: &ResumePoint, folders: &Folders, allowed: &[String]) -> Vec<Problem> {
    let checkpoint = match Checkpoint::open(&start.path) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return vec![Problem::new(error.to_string())],
    };
    let saved = &checkpoint.state().config[KEY];
    let may_differ = |key: &str| allowed.iter().any(|name| key == name || key.split('.').next() == Some(name));
    let differs = |(key, weights): &(&'static str, Weights)| {
        match (saved[key].as_str(), hash(weights)) {
        (_, Err(error)) => Some(Problem::new(format!("{key}: {error}"))),
        // Older checkpoints do not say it.
        (None, Ok(_)) => None,
        (Some(before), Ok(now)) => (before != now).then(|| {
            Problem::new(format!(
                "{key} has other weights than when {} was saved; name the folder with the old ones, or --allow-change {key}",
                start.path.display()
            ))
        }),
    }
    };
    folders.iter().filter(|(key, _)| !may_differ(key)).filter_map(differs).collect()
}

/// A hash of the first numbers of a folder's tensors, under our names: of all, or if there are very many of some, evenly
/// spread.
fn hash(weights: &Weights) -> Result<String, BoxError> {
    let (source, shapes): (&dyn WeightSource, BTreeMap<String, Vec<usize>>) = match weights {
        Weights::Model(folder) => {
            let names = folder.config().hf_names();
            (*folder, names.iter().map(|(name, tensor)| (name.into(), tensor.our_shape())).collect())
        }
        Weights::Adapter(Adapter { tensors, .. }) => {
            (tensors, tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect())
        }
    };
    let mut hash = Sha256::new();
    for (name, shape) in shapes.iter().step_by(shapes.len().div_ceil(SAMPLE.0).max(1)) {
        let mut ranges: Vec<_> = shape.iter().map(|size| 0..1.min(*size)).collect();
        if let (Some(range), Some(size)) = (ranges.last_mut(), shape.last()) {
            *range = 0..SAMPLE.1.min(*size);
        }
        hash.update(name);
        source.read(name, shape, &ranges)?.iter().for_each(|value| hash.update(value.to_le_bytes()));
    }
    Ok(hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}
