//! The tensors of a folder's safetensors files, or of its PyTorch DCP checkpoint, read where they are stored.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use models::names::NameMap;
use models::{FamilyConfig, ModelConfig};
use safetensors::{Dtype, SafeTensorError};
use serde::Deserialize;

use super::distributed;
use super::error::HfFolderError;
use crate::dcp::{DcpFolder, DcpTensor, METADATA};
use crate::positioned::{PositionedFile, Run};
use crate::safetensors_header::{Header, HeaderFault};

/// Name of the file of a checkpoint of one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// Name of the file that says which shard holds which tensor.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Bytes that are compared at a time.
const BLOCK: usize = 1 << 20;

/// One opened file.
#[derive(Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    file: PositionedFile,
    header: Header,
}

/// One tensor of a folder.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored<'a> {
    /// The file, or of several the one that describes it.
    pub path: &'a Path,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    place: Place<'a>,
    /// Bytes of all elements.
    length: usize,
}

/// Where the elements of a tensor are.
#[derive(Clone, Copy, Debug)]
enum Place<'a> {
    /// In a file, from a byte on.
    File(&'a PositionedFile, u64),
    /// In the boxes of a DCP folder.
    Boxes(&'a DcpFolder, &'a DcpTensor),
}

impl Stored<'_> {
    /// A range of the tensor's bytes.
    pub fn read(&self, bytes: Range<usize>) -> io::Result<Vec<u8>> {
        let mut read = vec![0; bytes.len()];
        self.read_runs([Run { from: bytes.start, to: 0, bytes: bytes.len() }].into_iter(), &mut read)?;
        Ok(read)
    }

    /// Reads runs of the tensor's bytes to where they belong in `to`, in ascending order there, on all cores.
    pub fn read_runs(&self, runs: impl Iterator<Item = Run>, to: &mut [u8]) -> io::Result<()> {
        let inside = |run: &Run| {
            let end = run.from + run.bytes;
            assert!(end <= self.length, "bytes {}..{end} of a tensor of {}", run.from, self.length);
        };
        match self.place {
            Place::File(file, start) => file.read_runs(start, runs.inspect(inside), to),
            Place::Boxes(folder, tensor) => folder.read_runs(tensor, runs.inspect(inside), to),
        }
    }

    /// Whether both have the same type, shape and elements.
    pub fn equals(&self, other: &Self) -> io::Result<bool> {
        if (self.dtype, self.shape, self.length) != (other.dtype, other.shape, other.length) {
            return Ok(false);
        }
        for start in (0..self.length).step_by(BLOCK) {
            let range = start..(start + BLOCK).min(self.length);
            if self.read(range.clone())? != other.read(range)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// All tensors of a folder.
#[derive(Debug)]
pub(super) enum Tensors {
    /// In safetensors files.
    Files {
        /// The files.
        files: Vec<TensorFile>,
        /// Which of them holds a tensor, and under which name.
        file_of: BTreeMap<String, (usize, String)>,
    },
    /// In a DCP checkpoint, and whether under Megatron-Core's names.
    Distributed(DcpFolder, bool),
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Tensors {
    /// Opens the single file, the shards or the DCP checkpoint of a folder. Of several shards, each must hold exactly
    /// what the index says. Of a DCP checkpoint, the weights of the model are opened.
    pub fn open(folder: &Path, model: &FamilyConfig) -> Result<Self, HfFolderError> {
        let is_files = [SINGLE, INDEX].iter().any(|name| folder.join(name).exists());
        if !is_files && DcpFolder::is_one(folder) {
            let (folder, is_megatron) = distributed::open(folder, model)?;
            return Ok(Self::Distributed(folder, is_megatron));
        }
        Self::safetensors(folder)
    }

    /// Opens the single file or the shards of a folder.
    pub fn safetensors(folder: &Path) -> Result<Self, HfFolderError> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        match (index.exists(), single.exists()) {
            (true, false) => Self::sharded(folder, &index),
            (true, true) => {
                let what = format!("holds both {SINGLE} and {INDEX}: remove the one that is not the model");
                Err(HfFolderError::file(folder, what))
            }
            (false, true) => {
                let file = TensorFile::open(single)?;
                let names = file.header.tensors.offset_keys().into_iter();
                let file_of = names.map(|name| (name.clone(), (0, name))).collect();
                Ok(Self::Files { files: vec![file], file_of })
            }
            (false, false) => {
                let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
                let what = match pickled.iter().find(|name| folder.join(name).exists()) {
                    Some(name) => format!(
                        "holds {name} in place of {SINGLE}: pickled weights are not read; transformers' `save_pretrained` writes \
                         safetensors files"
                    ),
                    None => format!(
                        "holds neither {SINGLE} nor {INDEX} nor {METADATA}: weights must be safetensors files or a PyTorch DCP checkpoint"
                    ),
                };
                Err(HfFolderError::file(folder, what))
            }
        }
    }

    fn sharded(folder: &Path, index: &Path) -> Result<Self, HfFolderError> {
        let bytes = std::fs::read(index).map_err(HfFolderError::io("read", index))?;
        let Index { weight_map } =
            serde_json::from_slice(&bytes).map_err(|source| HfFolderError::Json { path: index.into(), source })?;
        let (mut files, mut file_of): (Vec<TensorFile>, _) = (Vec::new(), BTreeMap::new());
        for (tensor, shard) in &weight_map {
            let path = folder.join(shard);
            if Path::new(shard).file_name() != Some(shard.as_ref()) {
                return Err(HfFolderError::tensor(index, tensor, format!("is said to be in {shard}, no file name")));
            }
            let known = files.iter().position(|file| file.path == path);
            let at = match known {
                Some(at) => at,
                None if !path.exists() => {
                    let what = format!("should be in {shard}, which is not there; download this file again");
                    return Err(HfFolderError::tensor(index, tensor, what));
                }
                None => {
                    files.push(TensorFile::open(path)?);
                    files.len() - 1
                }
            };
            if files[at].header.tensors.info(tensor).is_none() {
                let what = format!("is missing, although {INDEX} says that it is here");
                return Err(HfFolderError::tensor(&files[at].path, tensor, what));
            }
            file_of.insert(tensor.clone(), (at, tensor.clone()));
        }
        let stray = |file: &TensorFile| {
            let name = file.header.tensors.offset_keys().into_iter().find(|name| !weight_map.contains_key(name))?;
            Some(HfFolderError::tensor(&file.path, &name, format!("is not in {INDEX}")))
        };
        files.iter().find_map(stray).map_or(Ok(Self::Files { files, file_of }), Err)
    }

    /// Gives tensors of files the names that `called` has for them, and forgets those that it has none for: how many.
    pub fn rename(&mut self, called: impl Fn(&str) -> Option<Cow<'_, str>>) -> Result<usize, HfFolderError> {
        let Self::Files { files, file_of } = self else { return Ok(0) };
        let (mut renamed, mut forgotten) = (BTreeMap::new(), 0);
        for (name, place) in std::mem::take(file_of) {
            let Some(called) = called(&name) else {
                forgotten += 1;
                continue;
            };
            if let Some((_, other)) = renamed.insert(called.to_string(), place.clone()) {
                let path = &files[place.0].path;
                return Err(HfFolderError::tensor(path, &name, format!("is there twice, also as `{other}`")));
            }
        }
        *file_of = renamed;
        Ok(forgotten)
    }

    /// All names, sorted.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Files { file_of, .. } => file_of.keys().map(String::as_str).collect(),
            Self::Distributed(folder, _) => folder.tensors.keys().map(String::as_str).collect(),
        }
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<Stored<'_>> {
        match self {
            Self::Files { files, file_of } => {
                let (file, stored) = file_of.get(name)?;
                let file = &files[*file];
                let info = file.header.tensors.info(stored)?;
                let (from, to) = info.data_offsets;
                let place = Place::File(&file.file, file.header.start + from as u64);
                Some(Stored { path: &file.path, dtype: info.dtype, shape: &info.shape, place, length: to - from })
            }
            Self::Distributed(folder, _) => {
                let tensor = folder.tensors.get(name)?;
                let length = tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize() / 8;
                let (path, place) = (&folder.metadata, Place::Boxes(folder, tensor));
                Some(Stored { path, dtype: tensor.dtype, shape: &tensor.shape, place, length })
            }
        }
    }

    /// The model as the files hold it: those under Hugging Face's names may lack parts that its config.json names.
    pub fn present(&self, config: FamilyConfig) -> FamilyConfig {
        match self {
            Self::Distributed(_, true) => config,
            _ => config.hf_present(|name| self.get(name).is_some()),
        }
    }

    /// Where the tensors of a model are in those of the folder.
    pub fn names_of(&self, model: &FamilyConfig) -> NameMap {
        match self {
            Self::Distributed(_, true) => model.megatron_names(),
            Self::Files { .. } | Self::Distributed(_, false) => model.hf_names(),
        }
    }

    /// A file to name where a tensor is in none.
    pub fn any_path(&self, folder: &Path) -> PathBuf {
        match self {
            Self::Files { files, .. } if files.len() == 1 => files[0].path.clone(),
            Self::Files { .. } => folder.join(INDEX),
            Self::Distributed(folder, _) => folder.metadata.clone(),
        }
    }
}

impl TensorFile {
    fn open(path: PathBuf) -> Result<Self, HfFolderError> {
        let file = PositionedFile::open(&path).map_err(HfFolderError::io("open", &path))?;
        match Header::read(&file) {
            Ok(header) => Ok(Self { path, file, header }),
            Err(HeaderFault::Io(cause)) => Err(HfFolderError::io("read", &path)(cause)),
            Err(HeaderFault::Damaged { error, text }) => Err(damage(&path, &file, &text, &error)),
        }
    }
}

/// How a file begins that stands for a large one where Git LFS has not fetched it.
const LFS: &[u8] = b"version https://git-lfs";

/// What a file that cannot be read is: cut off, and then at which tensor, or no safetensors file at all.
fn damage(path: &Path, file: &PositionedFile, header: &[u8], error: &SafeTensorError) -> HfFolderError {
    use SafeTensorError::{HeaderTooSmall, InvalidHeaderLength, MetadataIncompleteBuffer};
    if file.read(0, LFS.len()).is_ok_and(|start| start == LFS) {
        return HfFolderError::file(path, "is a pointer of Git LFS; fetch the file itself: `git lfs pull`");
    }
    if !matches!(error, HeaderTooSmall | InvalidHeaderLength | MetadataIncompleteBuffer) {
        return HfFolderError::file(path, format!("is no safetensors file: {error}"));
    }
    let what = format!("is not complete: the file has {} bytes; download it again", file.size());
    match first_beyond(header, file.size()) {
        Some(tensor) => HfFolderError::tensor(path, &tensor, what),
        None => HfFolderError::file(path, what),
    }
}

/// The first tensor of a header that lies beyond the end of a file of this size.
fn first_beyond(header: &[u8], size: u64) -> Option<String> {
    #[derive(Deserialize)]
    struct Entry {
        data_offsets: Option<[u64; 2]>,
    }
    let entries: BTreeMap<String, Entry> = serde_json::from_slice(header).ok()?;
    let end = size.checked_sub(8 + header.len() as u64)?;
    let beyond = entries.into_iter().filter_map(|(name, entry)| Some((entry.data_offsets?[1], name)));
    beyond.filter(|(last, _)| *last > end).min().map(|(_, name)| name)
}
