//! Reading checkpoints.

mod find;
mod masters;
mod memory;
mod moments;
mod resume;
mod shards;
mod verify;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use layouts::shard::{HostFloats, WeightSource};
use safetensors::Dtype;

use super::error::{CheckpointError, Result};
use super::manifest::{Manifest, SavedFile, SavedTensor};
use super::{Kind, RunState, boxes};
use crate::positioned::PositionedFile;
use crate::safetensors_header::{Header, HeaderFault};
use shards::ShardFiles;

/// Any error.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An opened checkpoint. Its files are all there, have their sizes, and hold every tensor of the manifest completely;
/// their contents are checked by [`verify`](Checkpoint::verify).
///
/// It can be shared between ranks: reading takes from the files only what is asked for.
///
/// ```no_run
/// use host::checkpoint::Checkpoint;
///
/// let checkpoint = Checkpoint::open("runs/example/checkpoints")?;
/// println!("{} after step {}", checkpoint.path().display(), checkpoint.state().step);
/// for tensor in checkpoint.tensors() {
///     // The first half along the first dimension, whatever slices it was saved in.
///     let mut ranges: Vec<_> = tensor.global_shape.iter().map(|&size| 0..size).collect();
///     ranges[0].end /= 2;
///     let values = checkpoint.read_f64(tensor.kind, &tensor.name, &tensor.global_shape, &ranges)?;
///     println!("{}: {} values", tensor.name, values.len());
/// }
/// # Ok::<(), host::checkpoint::CheckpointError>(())
/// ```
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    shards: ShardFiles,
    tensors: HashMap<(Kind, String), Located>,
    warning: Option<String>,
}

/// Where a tensor is.
struct Located {
    /// Its index in the manifest.
    index: usize,
    /// Where every slice lies: the file's index, and where in it the slice begins.
    starts: Vec<(usize, u64)>,
}

impl Checkpoint {
    /// Opens a checkpoint's folder, or the latest one in a folder of checkpoints.
    ///
    /// # Errors
    /// If there is none, or something about it is wrong: a file is missing or has another size, the manifest is not
    /// what was written or of a newer version, slices overlap or leave something out.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (path, warning) = find::find(path.as_ref())?;
        Self::open_folder(&path, warning).map_err(|error| find::with_others(error, &path))
    }

    /// What a run has left of checkpoints in a folder, complete or not, by name: `latest` and `step_…`.
    ///
    /// # Errors
    /// If the folder cannot be read.
    #[doc(hidden)]
    pub fn traces(root: &Path) -> Result<Vec<String>> {
        find::traces(root)
    }

    /// The complete checkpoints in a folder, by step: every file is there and has its size.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn list(root: impl AsRef<Path>) -> Result<BTreeMap<u64, PathBuf>> {
        find::list(root.as_ref())
    }

    fn open_folder(path: &Path, warning: Option<String>) -> Result<Self> {
        let manifest = find::manifest(path)?;
        manifest.check_cover(path)?;
        if let Some(tokenizer) = &manifest.tokenizer {
            open_file(path, tokenizer)?;
        }
        let (mut shards, mut located) = (ShardFiles::new(path), HashMap::new());
        for file in &manifest.files {
            let name = path.join(&file.name);
            let opened = open_file(path, file)?;
            let header = Header::read(&opened).map_err(|fault| match fault {
                HeaderFault::Io(cause) => CheckpointError::io("read", &name, cause),
                HeaderFault::Damaged { error, .. } => CheckpointError::file(
                    &name,
                    format!("is not a safetensors file: {error}; it is damaged, restore it"),
                ),
            })?;
            let index = shards.add(file.clone(), opened);
            for (key, info) in header.tensors.tensors() {
                let start = header.start + info.data_offsets.0 as u64;
                located.insert((file.name.clone(), key), (index, info.dtype, info.shape.clone(), start));
            }
        }
        let mut tensors = HashMap::new();
        for (index, tensor) in manifest.tensors.iter().enumerate() {
            let mut found = Vec::new();
            for slice in &tensor.slices {
                let name = path.join(&slice.file);
                let fail = |what: String| CheckpointError::file(&name, what);
                let Some((shard, dtype, shape, start)) = located.get(&(slice.file.clone(), slice.key.clone())) else {
                    return Err(fail(format!("has no tensor `{}`, which the manifest places there", slice.key)));
                };
                let wanted = (tensor.dtype, boxes::shape(&slice.ranges));
                if (*dtype, shape) != (wanted.0, &wanted.1) {
                    let (key, (wanted, size)) = (&slice.key, wanted);
                    return Err(fail(format!(
                        "tensor `{key}` is {dtype} {shape:?}, by the manifest it is {wanted} {size:?}"
                    )));
                }
                found.push((*shard, *start));
            }
            tensors.insert((tensor.kind, tensor.name.clone()), Located { index, starts: found });
        }
        Ok(Self { path: path.to_path_buf(), manifest, shards, tensors, warning })
    }

    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the run stood.
    pub fn state(&self) -> &RunState {
        &self.manifest.state
    }

    /// All tensors, by kind and name.
    pub fn tensors(&self) -> &[SavedTensor] {
        &self.manifest.tensors
    }

    /// The files that hold the tensors.
    pub fn files(&self) -> &[SavedFile] {
        &self.manifest.files
    }

    /// The tokenizer that was saved with the run, or a `tokenizer.json` that was put into the folder since.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        let saved = self.manifest.tokenizer.as_ref().map(|file| self.path.join(&file.name));
        saved.or_else(|| Some(self.path.join("tokenizer.json")).filter(|file| file.is_file()))
    }

    /// What the user should know: `latest` was missing or pointed nowhere, so another checkpoint was opened.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// The tensor of this kind and name.
    pub fn tensor(&self, kind: Kind, name: &str) -> Option<&SavedTensor> {
        let located = self.tensors.get(&(kind, name.to_string()))?;
        Some(&self.manifest.tensors[located.index])
    }

    /// The box `ranges` of a tensor, row-major and little-endian, whatever slices it was saved in. Master weights that were
    /// saved as remainders are in fp32 again, and so are moments that were saved in 8 bits.
    ///
    /// # Errors
    /// If the tensor is not there or has another shape than `shape`, or its files have changed since the checkpoint was
    /// opened and no longer hold it.
    ///
    /// # Panics
    /// If `ranges` is not inside `shape`.
    pub fn read(&self, kind: Kind, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<(Dtype, Vec<u8>)> {
        if self.is_joined(kind, name) {
            return self.joined(name, shape, ranges);
        }
        if let Some(values) = self.decoded(kind, name, shape, ranges)? {
            return Ok((Dtype::F32, bytemuck::pod_collect_to_vec(&values)));
        }
        let located = self.locate(kind, name, shape, ranges)?;
        let dtype = self.manifest.tensors[located.index].dtype;
        Ok((dtype, self.stored(located, ranges)?))
    }

    /// The bytes of a box of a tensor.
    fn stored(&self, located: &Located, ranges: &[Range<usize>]) -> Result<Vec<u8>> {
        let dtype = self.manifest.tensors[located.index].dtype;
        let mut values = vec![0; boxes::len(ranges) * (dtype.bitsize() / 8)];
        self.fill(located, ranges, &mut values)?;
        Ok(values)
    }

    /// Where a tensor is.
    fn locate(&self, kind: Kind, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<&Located> {
        assert!(boxes::fits(ranges, shape), "{kind}/{name}: the box {} in {shape:?}", boxes::text(ranges));
        let Some(located) = self.tensors.get(&(kind, name.to_string())) else {
            let (path, name) = (self.path.clone(), name.to_string());
            return Err(CheckpointError::NoTensor { path, kind, hint: self.hint(kind, &name), name });
        };
        let saved = &self.manifest.tensors[located.index].global_shape;
        if saved != shape {
            let (saved, wanted) = (saved.clone(), shape.to_vec());
            return Err(CheckpointError::Shape { path: self.path.clone(), kind, name: name.into(), saved, wanted });
        }
        Ok(located)
    }

    /// Fills `values` with a box of a tensor.
    fn fill(&self, located: &Located, ranges: &[Range<usize>], values: &mut [u8]) -> Result<()> {
        let tensor = &self.manifest.tensors[located.index];
        let size = tensor.dtype.bitsize() / 8;
        for (slice, &(shard, start)) in tensor.slices.iter().zip(&located.starts) {
            self.shards.read(shard, start, boxes::runs(&slice.ranges, ranges, size), values)?;
        }
        Ok(())
    }

    /// What there is instead of a tensor that is asked for.
    fn hint(&self, kind: Kind, name: &str) -> String {
        let mut kinds: Vec<&str> =
            self.tensors().iter().filter(|tensor| tensor.name == name).map(|tensor| tensor.kind.name()).collect();
        kinds.sort_unstable();
        let of_kind: Vec<&SavedTensor> = self.tensors().iter().filter(|tensor| tensor.kind == kind).collect();
        match (kinds.is_empty(), of_kind.first()) {
            (false, _) => format!("; of this name it holds {}", kinds.join(", ")),
            (true, None) => format!("; it holds no `{kind}` tensors at all"),
            (true, Some(first)) => format!(
                "; it holds {} `{kind}` tensors, for example `{}`: the checkpoint is of another model",
                of_kind.len(),
                first.name
            ),
        }
    }
}

/// Weights for a model: master weights where there are some, otherwise the weights themselves.
impl WeightSource for Checkpoint {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        Ok(self.read_stored(name, shape, ranges)?.into_f64())
    }

    fn read_stored(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<HostFloats, BoxError> {
        let kind = if self.holds(Kind::Master, name) { Kind::Master } else { Kind::Weight };
        Ok(self.read_floats(kind, name, shape, ranges)?)
    }
}

/// Opens a file of a checkpoint if it has its size.
fn open_file(folder: &Path, expected: &SavedFile) -> Result<PositionedFile> {
    let path = folder.join(&expected.name);
    let found = size(&path)?;
    if found != expected.bytes {
        let what = format!("has {found} bytes, {} were written; it is damaged, restore it", expected.bytes);
        return Err(CheckpointError::file(&path, what));
    }
    PositionedFile::open(&path).map_err(|cause| CheckpointError::io("read", &path, cause))
}

/// Size of a file, which must be one that can be read to its end.
fn size(path: &Path) -> Result<u64> {
    let about = fs::metadata(path).map_err(|cause| match cause.kind() {
        io::ErrorKind::NotFound => CheckpointError::file(path, "is missing; restore it"),
        _ => CheckpointError::io("read", path, cause),
    })?;
    if !about.is_file() {
        return Err(CheckpointError::file(path, "is not a file; restore it"));
    }
    Ok(about.len())
}
