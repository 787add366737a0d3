//! `.metadata`: which boxes every tensor has, and where they are (`torch/distributed/checkpoint/metadata.py`).

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use safetensors::Dtype;

use super::DcpError;
use super::pickle::{Pickle, Value};
use crate::boxes::{Flaw, check_cover, fits, text};

/// Name of the file.
pub const METADATA: &str = ".metadata";

const CLASSES: [&str; 46] = [
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "torch.distributed.checkpoint.planner.BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "torch.serialization._get_layout",
    "torch.Size",
    "torch.device",
    "torch.float64",
    "torch.float32",
    "torch.float16",
    "torch.bfloat16",
    "torch.float8_e4m3fn",
    "torch.float8_e5m2",
    "torch.float8_e4m3fnuz",
    "torch.float8_e5m2fnuz",
    "torch.float8_e8m0fnu",
    "torch.complex64",
    "torch.complex128",
    "torch.int64",
    "torch.int32",
    "torch.int16",
    "torch.int8",
    "torch.uint64",
    "torch.uint32",
    "torch.uint16",
    "torch.uint8",
    "torch.bool",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "collections.OrderedDict",
    "builtins.set",
];

/// A box of a tensor, and the archive that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub ranges: Vec<Range<usize>>,
    /// Path in the folder.
    pub file: String,
    /// First byte of the archive in its file.
    pub offset: u64,
    /// Its bytes.
    pub length: u64,
}

/// A tensor whose elements have a type of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub places: Vec<Place>,
}

/// What `torch` calls a type of elements, without the module.
pub(super) fn dtype(class: &str) -> Option<Dtype> {
    Some(match class {
        "torch.float64" => Dtype::F64,
        "torch.float32" => Dtype::F32,
        "torch.float16" => Dtype::F16,
        "torch.bfloat16" => Dtype::BF16,
        "torch.float8_e4m3fn" => Dtype::F8_E4M3,
        "torch.float8_e5m2" => Dtype::F8_E5M2,
        "torch.int64" => Dtype::I64,
        "torch.int32" => Dtype::I32,
        "torch.int16" => Dtype::I16,
        "torch.int8" => Dtype::I8,
        "torch.uint8" => Dtype::U8,
        "torch.bool" => Dtype::BOOL,
        _ => return None,
    })
}

/// The numbers of a `torch.Size` or a tuple.
pub(super) fn sizes(value: Value) -> Option<Vec<usize>> {
    let inside = if value.class() == Some("torch.Size") { value.arguments()?.first().copied()? } else { value };
    inside.items()?.into_iter().map(|size| usize::try_from(size.integer()?).ok()).collect()
}

/// The metadata of a folder.
#[derive(Debug)]
pub(super) struct Metadata {
    pub path: PathBuf,
    pickle: Pickle,
}

impl Metadata {
    /// Reads the file of a folder. Fails if it is damaged, or has a class that is none of DCP's.
    pub fn read(folder: &Path) -> Result<Self, DcpError> {
        let path = folder.join(METADATA);
        let bytes = std::fs::read(&path).map_err(|error| DcpError::file(&path, format!("cannot be read: {error}")))?;
        let pickle = Pickle::read(&bytes, &CLASSES).map_err(|what| DcpError::file(&path, what))?;
        Ok(Self { path, pickle })
    }

    fn part(&self, name: &str) -> Result<Vec<(Value<'_>, Value<'_>)>, DcpError> {
        let entries = self.pickle.value().attribute(name).and_then(Value::entries);
        entries.ok_or_else(|| DcpError::file(&self.path, format!("has no `{name}`: it is no metadata of DCP")))
    }

    fn tensors(&self) -> Result<Vec<(&str, Value<'_>)>, DcpError> {
        let mut tensors = Vec::new();
        for (name, about) in self.part("state_dict_metadata")? {
            if about.class().is_some_and(|class| class.ends_with(".TensorStorageMetadata")) {
                tensors.extend(name.text().map(|name| (name, about)));
            }
        }
        Ok(tensors)
    }

    /// The names of all tensors. Fails if the file is no metadata.
    pub fn names(&self) -> Result<Vec<&str>, DcpError> {
        Ok(self.tensors()?.into_iter().map(|(name, _)| name).collect())
    }

    /// Where everything is that is in one piece: what is no tensor, and tensors of one element. Fails if the file is no
    /// metadata.
    pub fn pieces(&self) -> Result<BTreeMap<String, Place>, DcpError> {
        let stored = places(self.part("storage_data")?);
        let stored = stored.ok_or_else(|| DcpError::file(&self.path, "`storage_data` is none of DCP"))?;
        let whole =
            stored.into_iter().filter(|((_, at), (file, _, _, plain))| at.is_empty() && *plain && is_inside(file));
        let place = |((name, _), (file, offset, length, _)): ((&str, _), (&str, u64, u64, bool))| {
            (name.to_string(), Place { ranges: Vec::new(), file: file.to_string(), offset, length })
        };
        Ok(whole.map(place).collect())
    }

    /// The shapes of tensors that Megatron-Core has stored as flat arrays of boxes
    /// (`megatron/core/dist_checkpointing/strategies/torch.py` up to 0.15).
    pub fn flattened<'a>(&'a self) -> HashMap<&'a str, Vec<usize>> {
        let entries = self.pickle.value().attribute("mcore_data").and_then(Value::entries).unwrap_or_default();
        let shape = |(name, about): (Value<'a>, Value<'a>)| {
            Some((name.text()?, sizes(about.get("nd_reformulated_orig_global_shape")?)?))
        };
        entries.into_iter().filter_map(shape).collect()
    }

    /// The tensors that `wanted` names, but for those with elements of types that are not ours. Fails if the file does
    /// not say where all elements of a tensor are.
    pub fn entries(&self, wanted: impl Fn(&str) -> bool) -> Result<BTreeMap<String, Entry>, DcpError> {
        let stored = places(self.part("storage_data")?);
        let stored = stored.ok_or_else(|| DcpError::file(&self.path, "`storage_data` is none of DCP"))?;
        let mut entries = BTreeMap::new();
        for (name, about) in self.tensors()?.into_iter().filter(|(name, _)| wanted(name)) {
            let found = entry(name, about, &stored).map_err(|what| DcpError::tensor(&self.path, name, what))?;
            entries.extend(found.map(|entry| (name.to_string(), entry)));
        }
        Ok(entries)
    }
}

/// By name and first index of the box: file, offset and length, and whether the bytes are as `torch.save` has them.
type Stored<'a> = HashMap<(&'a str, Vec<usize>), (&'a str, u64, u64, bool)>;

fn places<'a>(entries: Vec<(Value<'a>, Value<'a>)>) -> Option<Stored<'a>> {
    let number = |value: Option<Value>| u64::try_from(value?.integer()?).ok();
    let place = |(index, info): (Value<'a>, Value<'a>)| {
        let offsets = index.attribute("offset").filter(|offset| !offset.is_none());
        let key = (index.attribute("fqn")?.text()?, offsets.map_or(Some(Vec::new()), sizes)?);
        let descriptors = info.attribute("transform_descriptors").and_then(Value::items);
        let plain = descriptors.is_none_or(|descriptors| descriptors.is_empty());
        let file = info.attribute("relative_path")?.text()?;
        Some((key, (file, number(info.attribute("offset"))?, number(info.attribute("length"))?, plain)))
    };
    entries.into_iter().map(place).collect()
}

/// Whether a path leads nowhere but into the folder.
fn is_inside(file: &str) -> bool {
    Path::new(file).components().all(|part| matches!(part, Component::Normal(_)))
}

fn entry(name: &str, about: Value, stored: &Stored) -> Result<Option<Entry>, String> {
    let strange = || "is described in another form than DCP's".to_string();
    let properties = about.attribute("properties").and_then(Value::state).and_then(Value::items).ok_or_else(strange)?;
    let class = properties.first().and_then(|dtype| dtype.class()).ok_or_else(strange)?;
    let Some(dtype) = dtype(class) else { return Ok(None) };
    let shape = about.attribute("size").and_then(sizes).ok_or_else(strange)?;
    let chunks = about.attribute("chunks").and_then(Value::items).ok_or_else(strange)?;
    let place = |chunk: Value| {
        let (offsets, sizes) = (chunk.attribute("offsets").and_then(sizes), chunk.attribute("sizes").and_then(sizes));
        let (offsets, sizes) = offsets.zip(sizes).ok_or_else(strange)?;
        let end = |(start, size): (&usize, &usize)| Some(*start..start.checked_add(*size)?);
        let ranges = offsets.iter().zip(&sizes).map(end).collect::<Option<Vec<_>>>().ok_or_else(strange)?;
        if offsets.len() != sizes.len() || !fits(&ranges, &shape) {
            return Err(format!("has a box {} outside its shape {shape:?}", text(&ranges)));
        }
        let Some((file, offset, length, plain)) = stored.get(&(name, offsets)) else {
            return Err(format!("has a box {} that is in no file", text(&ranges)));
        };
        if !plain {
            return Err("is compressed or encrypted; save it without extensions of the storage".into());
        }
        // A path in the folder: others could lead anywhere.
        if !is_inside(file) {
            return Err(format!("is said to be in {file:?}, which is no file of this folder"));
        }
        Ok(Place { ranges, file: file.to_string(), offset: *offset, length: *length })
    };
    let places = chunks.into_iter().map(place).collect::<Result<Vec<Place>, String>>()?;
    let elements = shape.iter().try_fold(dtype.bitsize() / 8, |count: usize, size| count.checked_mul(*size));
    elements.ok_or_else(|| format!("has shape {shape:?}, more than there can be"))?;
    let boxes: Vec<&[Range<usize>]> = places.iter().map(|place| &place.ranges[..]).collect();
    match check_cover(&shape, &boxes) {
        Ok(()) => Ok(Some(Entry { dtype, shape, places })),
        Err(Flaw::Overlap(a, b)) => {
            Err(format!("has boxes {} and {} that share elements", text(boxes[a]), text(boxes[b])))
        }
        Err(Flaw::Missing(have)) => Err(format!("has {have} elements in its boxes; shape {shape:?} needs all of them")),
    }
}
