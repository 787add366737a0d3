//! `manifest.json`: what a checkpoint contains.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::boxes::{self, Flaw};
use super::error::{CheckpointError, Result};
use super::hashes::PIECE;
use super::slice::Slice;
use super::{Kind, RunState, names};

/// More than the largest run counts, and far from where sums overflow.
const MOST_STEPS: u64 = 1 << 48;
const MOST_SAMPLES: u64 = 1 << 56;

/// Says what the file is.
const FORMAT: &str = "burn-megatron checkpoint";
/// The version that is written; older ones can be read.
const VERSION: u64 = 1;

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFile {
    /// Name in the checkpoint's folder.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// Hash of the contents, as `sha256sum` prints it.
    pub sha256: String,
    /// The same of every 64 MiB of the contents, so that all cores can check a file; older checkpoints do not have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<String>,
}

/// What a writer has written, for the manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Shard {
    /// The file; `None` if there was nothing to write.
    pub file: Option<SavedFile>,
    /// The tensors of which the file holds a slice.
    pub tensors: Vec<SavedTensor>,
}

/// A global tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTensor {
    /// What the values are.
    pub kind: Kind,
    /// Global name.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Shape of the whole tensor.
    pub global_shape: Vec<usize>,
    /// The boxes that make it up, each element once.
    pub slices: Vec<SavedSlice>,
}

/// A box of a global tensor, and where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSlice {
    /// The file it is in.
    pub file: String,
    /// Its key in that file.
    pub key: String,
    /// The box, one range per dimension; `[start, end]` in JSON.
    #[serde(with = "pairs")]
    pub ranges: Vec<Range<usize>>,
}

impl SavedTensor {
    /// The tensor that a slice is a part of, with it as the only one, in a file.
    pub(super) fn of_slice(slice: &Slice, file: &str) -> Self {
        Self {
            kind: slice.kind,
            name: slice.name.clone(),
            dtype: slice.dtype,
            global_shape: slice.global_shape.clone(),
            slices: vec![SavedSlice { file: file.into(), key: slice.key(), ranges: slice.ranges.clone() }],
        }
    }

    /// Kind and name, as in the keys of files.
    pub fn key(&self) -> String {
        format!("{}/{}", self.kind, self.name)
    }

    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        (boxes::checked_len(&self.global_shape).unwrap_or(usize::MAX) as u64)
            .saturating_mul(self.dtype.bitsize() as u64)
            / 8
    }
}

/// The contents of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub format: String,
    pub version: u64,
    pub state: RunState,
    pub tokenizer: Option<SavedFile>,
    pub files: Vec<SavedFile>,
    pub tensors: Vec<SavedTensor>,
}

impl Manifest {
    /// Puts together what the writers have written. Fails if writers disagree about a tensor, or their slices overlap
    /// or leave something out. `folder` is named then.
    pub fn new(folder: &Path, state: RunState, tokenizer: Option<SavedFile>, shards: Vec<Shard>) -> Result<Self> {
        let mut files = Vec::new();
        let mut tensors: BTreeMap<(Kind, String), SavedTensor> = BTreeMap::new();
        for shard in shards {
            files.extend(shard.file);
            for mut tensor in shard.tensors {
                let Some(known) = tensors.get_mut(&(tensor.kind, tensor.name.clone())) else {
                    tensors.insert((tensor.kind, tensor.name.clone()), tensor);
                    continue;
                };
                if (known.dtype, &known.global_shape) != (tensor.dtype, &tensor.global_shape) {
                    let (a, b) = (&known.global_shape, &tensor.global_shape);
                    let what = format!("writers disagree: {} {a:?} and {} {b:?}", known.dtype, tensor.dtype);
                    return Err(CheckpointError::Cover { path: folder.to_path_buf(), key: tensor.key(), what });
                }
                known.slices.append(&mut tensor.slices);
            }
        }
        let tensors = tensors.into_values().collect();
        let manifest = Self { format: FORMAT.into(), version: VERSION, state, tokenizer, files, tensors };
        manifest.check(&folder.join(names::MANIFEST))?;
        manifest.check_cover(folder)?;
        Ok(manifest)
    }

    /// Checks that the slices of every tensor hold each element once.
    pub fn check_cover(&self, folder: &Path) -> Result<()> {
        for tensor in &self.tensors {
            let fail = |what| CheckpointError::Cover { path: folder.to_path_buf(), key: tensor.key(), what };
            let Some(expected) = boxes::checked_len(&tensor.global_shape) else {
                return Err(fail(format!("the shape {:?} is beyond all memory", tensor.global_shape)));
            };
            if let Some(slice) = tensor.slices.iter().find(|slice| !boxes::fits(&slice.ranges, &tensor.global_shape)) {
                let range = boxes::text(&slice.ranges);
                return Err(fail(format!("the slice {range} is not inside the shape {:?}", tensor.global_shape)));
            }
            let slices: Vec<&[Range<usize>]> = tensor.slices.iter().map(|slice| &slice.ranges[..]).collect();
            boxes::check_cover(&tensor.global_shape, &slices).map_err(|flaw| match flaw {
                Flaw::Overlap(a, b) => {
                    let name = |i: usize| format!("{} in {}", boxes::text(slices[i]), tensor.slices[i].file);
                    fail(format!("the slices {} and {} overlap; each element is saved once", name(a), name(b)))
                }
                Flaw::Missing(have) => fail(format!("the slices hold {have} of {expected} elements; some are missing")),
            })?;
        }
        Ok(())
    }

    /// The contents of the file: one line per file and tensor.
    pub fn to_json(&self) -> serde_json::Result<String> {
        let lines = |lines: serde_json::Result<Vec<String>>| {
            Ok::<_, serde_json::Error>(format!("[\n    {}\n  ]", lines?.join(",\n    ")))
        };
        let state = serde_json::to_string_pretty(&self.state)?.replace('\n', "\n  ");
        Ok(format!(
            "{{\n  \"format\": {},\n  \"version\": {},\n  \"state\": {state},\n  \"tokenizer\": {},\n  \"files\": {},\n  \
             \"tensors\": {}\n}}\n",
            serde_json::to_string(&self.format)?,
            self.version,
            serde_json::to_string(&self.tokenizer)?,
            lines(self.files.iter().map(serde_json::to_string).collect())?,
            lines(self.tensors.iter().map(serde_json::to_string).collect())?,
        ))
    }

    /// Reads the file at `path`. Fails if it is not a manifest, or of a newer version.
    pub fn from_json(path: &Path, json: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let refuse = |what: String| CheckpointError::file(path, what);
        let head: Head = serde_json::from_slice(json)
            .map_err(|error| refuse(format!("is not the manifest of a checkpoint: {error}")))?;
        if head.format != FORMAT {
            return Err(refuse(format!("format `{}` is not `{FORMAT}`", head.format)));
        }
        if head.version > VERSION {
            let found = head.version;
            return Err(refuse(format!(
                "version {found} was written by a newer program; this one reads versions up to {VERSION}, use that one"
            )));
        }
        let manifest: Self =
            serde_json::from_slice(json).map_err(|error| refuse(format!("is not a whole manifest: {error}")))?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Refuses names that lead out of the checkpoint's folder or stand for two tensors, and counts that no run has. `path`
    /// is the manifest's.
    fn check(&self, path: &Path) -> Result<()> {
        let refuse = |what: String| Err(CheckpointError::file(path, what));
        let files = self.files.iter().chain(&self.tokenizer).map(|file| &file.name);
        let mut names = files.chain(self.tensors.iter().flat_map(|tensor| &tensor.slices).map(|slice| &slice.file));
        if let Some(name) = names.find(|name| !names::is_file_name(name)) {
            return refuse(format!(
                "names the file `{}`; the files of a checkpoint lie in its own folder: do not use this checkpoint, \
                 restore it from where it comes from",
                name.escape_default()
            ));
        }
        let whole = |file: &SavedFile| file.pieces.len() as u64 == file.bytes.div_ceil(PIECE as u64);
        if let Some(file) = self.files.iter().find(|file| !file.pieces.is_empty() && !whole(file)) {
            let (name, count) = (file.name.escape_default(), file.pieces.len());
            return refuse(format!("has {count} hashes of pieces of `{name}`, not one for every 64 MiB; restore it"));
        }
        let mut seen = HashSet::new();
        if let Some(tensor) = self.tensors.iter().find(|tensor| !seen.insert((tensor.kind, &tensor.name))) {
            return refuse(format!("has the tensor `{}` twice; restore it", tensor.key().escape_default()));
        }
        let RunState { step, consumed_samples, updates, skipped_samples, .. } = self.state;
        let skipped = skipped_samples.unwrap_or(0);
        let counts = [
            ("step", step, MOST_STEPS),
            ("updates", updates, step),
            ("consumed_samples", consumed_samples, MOST_SAMPLES),
            ("skipped_samples", skipped, consumed_samples),
        ];
        match counts.into_iter().find(|(_, count, most)| count > most) {
            Some((name, count, most)) => refuse(format!("`{name}` is {count}, it can be {most} at most; restore it")),
            None => Ok(()),
        }
    }
}

/// Ranges as `[start, end]`.
mod pairs {
    use std::ops::Range;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(ranges: &[Range<usize>], serializer: S) -> Result<S::Ok, S::Error> {
        ranges.iter().map(|range| [range.start, range.end]).collect::<Vec<_>>().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Range<usize>>, D::Error> {
        let pairs = Vec::<[usize; 2]>::deserialize(deserializer)?;
        Ok(pairs.into_iter().map(|[start, end]| start..end).collect())
    }
}
