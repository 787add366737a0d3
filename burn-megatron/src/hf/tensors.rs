//! The tensors of a folder's safetensors files, mapped into memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;

use super::error::HfFolderError;

/// Name of the file of a checkpoint of one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// Name of the file that says which shard holds which tensor.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// One mapped file.
#[derive(Debug)]
struct Mapped {
    path: PathBuf,
    map: Mmap,
    header: Metadata,
    /// Where the tensors begin.
    start: usize,
}

/// One tensor of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored<'a> {
    pub path: &'a Path,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub data: &'a [u8],
}

/// All tensors of a folder.
#[derive(Debug)]
pub(super) struct Tensors {
    files: Vec<Mapped>,
    /// Which of the files holds a tensor.
    places: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Tensors {
    /// Maps the single file or the shards of a folder. Of several shards, each must hold exactly what the index says.
    pub fn open(folder: &Path) -> Result<Self, HfFolderError> {
        let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
        match (index.exists(), single.exists()) {
            (true, false) => Self::sharded(folder, &index),
            (true, true) => {
                let what = format!("holds both {SINGLE} and {INDEX}: remove the one that is not the model");
                Err(HfFolderError::file(folder, what))
            }
            (false, true) => {
                let file = Mapped::open(single)?;
                let places = file.header.offset_keys().into_iter().map(|name| (name, 0)).collect();
                Ok(Self { files: vec![file], places })
            }
            (false, false) => {
                let what = format!("holds neither {SINGLE} nor {INDEX}: weights must be safetensors files");
                Err(HfFolderError::file(folder, what))
            }
        }
    }

    fn sharded(folder: &Path, index: &Path) -> Result<Self, HfFolderError> {
        let bytes = std::fs::read(index).map_err(HfFolderError::io("read", index))?;
        let Index { weight_map } =
            serde_json::from_slice(&bytes).map_err(|source| HfFolderError::Json { path: index.into(), source })?;
        let (mut files, mut places): (Vec<Mapped>, _) = (Vec::new(), BTreeMap::new());
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
                    files.push(Mapped::open(path)?);
                    files.len() - 1
                }
            };
            if files[at].header.info(tensor).is_none() {
                let what = format!("is missing, although {INDEX} says that it is here");
                return Err(HfFolderError::tensor(&files[at].path, tensor, what));
            }
            places.insert(tensor.clone(), at);
        }
        let stray = |file: &Mapped| {
            let name = file.header.offset_keys().into_iter().find(|name| !weight_map.contains_key(name))?;
            Some(HfFolderError::tensor(&file.path, &name, format!("is not in {INDEX}")))
        };
        files.iter().find_map(stray).map_or(Ok(Self { files, places }), Err)
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<Stored<'_>> {
        let file = &self.files[*self.places.get(name)?];
        let info = file.header.info(name)?;
        let (from, to) = info.data_offsets;
        let data = &file.map[file.start + from..file.start + to];
        Some(Stored { path: &file.path, dtype: info.dtype, shape: &info.shape, data })
    }

    /// A file to name where a tensor is in none.
    pub fn any_path(&self, folder: &Path) -> PathBuf {
        if self.files.len() == 1 { self.files[0].path.clone() } else { folder.join(INDEX) }
    }
}

impl Mapped {
    fn open(path: PathBuf) -> Result<Self, HfFolderError> {
        let file = File::open(&path).map_err(HfFolderError::io("open", &path))?;
        // SAFETY: the folder is not written to while a model is read from it.
        let map = unsafe { Mmap::map(&file) }.map_err(HfFolderError::io("map", &path))?;
        let (length, header) = SafeTensors::read_metadata(&map).map_err(|error| damage(&path, &map, &error))?;
        Ok(Self { path, map, header, start: 8 + length })
    }
}

/// What a file that cannot be read is: cut off, and then at which tensor, or no safetensors file at all.
fn damage(path: &Path, map: &[u8], error: &SafeTensorError) -> HfFolderError {
    use SafeTensorError::{HeaderTooSmall, InvalidHeaderLength, MetadataIncompleteBuffer};
    if !matches!(error, HeaderTooSmall | InvalidHeaderLength | MetadataIncompleteBuffer) {
        return HfFolderError::file(path, format!("is no safetensors file: {error}"));
    }
    let what = format!("is not complete: the file has {} bytes; download it again", map.len());
    match first_beyond(map) {
        Some(tensor) => HfFolderError::tensor(path, &tensor, what),
        None => HfFolderError::file(path, what),
    }
}

/// The first tensor of a file's header that lies beyond its end.
fn first_beyond(map: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Entry {
        data_offsets: Option<[u64; 2]>,
    }
    let length = u64::from_le_bytes(*map.first_chunk()?);
    let header = map.get(8..usize::try_from(length).ok()?.checked_add(8)?)?;
    let header: BTreeMap<String, Entry> = serde_json::from_slice(header).ok()?;
    let end = (map.len() - 8) as u64 - length;
    let beyond = header.into_iter().filter_map(|(name, entry)| Some((entry.data_offsets?[1], name)));
    beyond.filter(|(last, _)| *last > end).min().map(|(_, name)| name)
}
