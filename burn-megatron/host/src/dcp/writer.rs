//! Writes a DCP folder, box by box, as `torch.distributed.checkpoint` reads it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Cursor, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::METADATA;
use super::metadata::{Entry, Place};
use super::pickler::Pickler;

const MODULE: &str = "torch.distributed.checkpoint.metadata";

/// A folder that is being written.
pub struct DcpWriter {
    folder: PathBuf,
    /// Bytes after which another file begins.
    most: u64,
    file: Option<(String, BufWriter<File>)>,
    /// Bytes of that file.
    written: u64,
    files: usize,
    tensors: BTreeMap<String, Entry>,
    /// What is no tensor.
    objects: BTreeMap<String, Place>,
}

impl DcpWriter {
    /// Writes into a folder that is there, in files of about `most` bytes.
    pub fn new(folder: &Path, most: u64) -> Self {
        Self {
            folder: folder.into(),
            most,
            file: None,
            written: 0,
            files: 0,
            tensors: BTreeMap::new(),
            objects: BTreeMap::new(),
        }
    }

    /// Writes a box of a tensor of this type and shape.
    ///
    /// # Errors
    /// If the system refuses, or the type has no storage of its own in PyTorch.
    pub fn write(
        &mut self,
        name: &str,
        tensor: (Dtype, &[usize]),
        ranges: Vec<Range<usize>>,
        bytes: &[u8],
    ) -> io::Result<()> {
        let (dtype, shape) = tensor;
        let sizes: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
        let described = described(dtype, &sizes)?;
        let archive = archive("archive", &described, Some(bytes))?;
        let place = self.append(&archive, ranges)?;
        let entry = || Entry { dtype, shape: shape.to_vec(), places: Vec::new() };
        self.tensors.entry(name.into()).or_insert_with(entry).places.push(place);
        Ok(())
    }

    /// Gives the tensor `of` another name too, without a copy of its bytes.
    pub fn tie(&mut self, name: &str, of: &str) {
        if let Some(entry) = self.tensors.get(of).cloned() {
            self.tensors.insert(name.into(), entry);
        }
    }

    /// Writes what is no tensor, which `object` pickles.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn write_object(&mut self, name: String, object: impl FnOnce(&mut Pickler)) -> io::Result<()> {
        let mut pickler = Pickler::new();
        object(&mut pickler);
        let archive = archive("archive", &pickler.finish(), None)?;
        let place = self.append(&archive, Vec::new())?;
        self.objects.insert(name, place);
        Ok(())
    }

    /// Writes an archive behind the others.
    fn append(&mut self, archive: &[u8], ranges: Vec<Range<usize>>) -> io::Result<Place> {
        let length = archive.len() as u64;
        if self.file.is_none() || self.written + length > self.most {
            self.close()?;
            let name = format!("__0_{}.distcp", self.files);
            self.file = Some((name.clone(), BufWriter::new(File::create(self.folder.join(name))?)));
            (self.written, self.files) = (0, self.files + 1);
        }
        let (name, to) = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        to.write_all(archive)?;
        let place = Place { ranges, file: name.clone(), offset: self.written, length };
        self.written += length;
        Ok(place)
    }

    fn close(&mut self) -> io::Result<()> {
        match self.file.take() {
            Some((_, file)) => file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all(),
            None => Ok(()),
        }
    }

    /// Writes `.metadata` and says how many files of tensors there are.
    ///
    /// # Errors
    /// If the system refuses, or a type has no name in PyTorch.
    pub fn finish(mut self) -> io::Result<usize> {
        self.close()?;
        let mut file = File::create(self.folder.join(METADATA))?;
        file.write_all(&metadata(&self.tensors, &self.objects)?)?;
        file.sync_all()?;
        Ok(self.files)
    }

    /// Writes a file as `torch.save` does of what `object` pickles.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn save(path: &Path, object: impl FnOnce(&mut Pickler)) -> io::Result<()> {
        let mut pickler = Pickler::new();
        object(&mut pickler);
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        std::fs::write(path, archive(&name, &pickler.finish(), None)?)
    }
}

/// PyTorch's names of a type and of the storage of such elements.
fn names(dtype: Dtype) -> io::Result<[&'static str; 2]> {
    Ok(match dtype {
        Dtype::F64 => ["float64", "DoubleStorage"],
        Dtype::F32 => ["float32", "FloatStorage"],
        Dtype::F16 => ["float16", "HalfStorage"],
        Dtype::BF16 => ["bfloat16", "BFloat16Storage"],
        other => return Err(io::Error::new(io::ErrorKind::Unsupported, format!("{other:?} is no type of weights"))),
    })
}

/// `data.pkl` of a tensor that is row-major in its storage.
fn described(dtype: Dtype, sizes: &[usize]) -> io::Result<Vec<u8>> {
    let [_, storage] = names(dtype)?;
    let count: usize = sizes.iter().product();
    let strides = (0..sizes.len()).map(|d| sizes[d + 1..].iter().product::<usize>());
    let mut pickler = Pickler::new();
    pickler.call("torch._utils", "_rebuild_tensor_v2", |pickler| {
        pickler.persistent(|pickler| {
            pickler.text("storage");
            pickler.class("torch", storage);
            pickler.text("0");
            pickler.text("cpu");
            pickler.integer(count as u64);
        });
        pickler.integer(0);
        pickler.integers(sizes.iter().copied());
        pickler.integers(strides);
        pickler.boolean(false);
        pickler.call("collections", "OrderedDict", |_| ());
    });
    Ok(pickler.finish())
}

/// An archive of `torch.save`.
fn archive(root: &str, described: &[u8], elements: Option<&[u8]>) -> io::Result<Vec<u8>> {
    let large = elements.is_some_and(|bytes| bytes.len() as u64 >= u64::from(u32::MAX));
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(zip::DateTime::default())
        .large_file(large)
        .with_alignment(64);
    let mut zip = ZipWriter::new(Cursor::new(Vec::with_capacity(elements.map_or(0, <[u8]>::len) + 2048)));
    let elements = elements.map(|bytes| ("data/0", bytes));
    let parts =
        [Some(("data.pkl", described)), Some(("byteorder", &b"little"[..])), elements, Some(("version", b"3\n"))];
    for (name, bytes) in parts.into_iter().flatten() {
        zip.start_file(format!("{root}/{name}"), options)?;
        zip.write_all(bytes)?;
    }
    Ok(zip.finish()?.into_inner())
}

/// `.metadata` (`torch/distributed/checkpoint/metadata.py`).
fn metadata(tensors: &BTreeMap<String, Entry>, objects: &BTreeMap<String, Place>) -> io::Result<Vec<u8>> {
    let types = tensors.values().map(|entry| names(entry.dtype)).collect::<io::Result<Vec<_>>>()?;
    let mut pickler = Pickler::new();
    pickler.object(MODULE, "Metadata", |pickler| {
        pickler.dict(|pickler| {
            pickler.text("state_dict_metadata");
            pickler.dict(|pickler| {
                for ((name, entry), [dtype, _]) in tensors.iter().zip(types) {
                    pickler.text(name);
                    tensor(pickler, entry, dtype);
                }
                for name in objects.keys() {
                    pickler.text(name);
                    pickler.object(MODULE, "BytesStorageMetadata", |pickler| pickler.dict(|_| ()));
                }
            });
            pickler.text("planner_data");
            pickler.dict(|pickler| {
                for name in tensors.keys().chain(objects.keys()) {
                    pickler.text(name);
                    pickler.tuple(|pickler| pickler.text(name));
                }
            });
            pickler.text("storage_data");
            pickler.dict(|pickler| {
                for (name, entry) in tensors {
                    entry.places.iter().for_each(|place| stored(pickler, name, place, true));
                }
                objects.iter().for_each(|(name, place)| stored(pickler, name, place, false));
            });
        });
    });
    Ok(pickler.finish())
}

/// `MetadataIndex` and `_StorageInfo` of a box of a tensor, or of what is no tensor.
fn stored(pickler: &mut Pickler, name: &str, place: &Place, is_tensor: bool) {
    pickler.object(MODULE, "MetadataIndex", |pickler| {
        pickler.dict(|pickler| {
            pickler.text("fqn");
            pickler.text(name);
            pickler.text("index");
            pickler.none();
            pickler.text("offset");
            if is_tensor { pickler.size(place.ranges.iter().map(|range| range.start)) } else { pickler.none() }
        });
    });
    pickler.object("torch.distributed.checkpoint.filesystem", "_StorageInfo", |pickler| {
        pickler.dict(|pickler| {
            pickler.text("relative_path");
            pickler.text(&place.file);
            pickler.text("offset");
            pickler.integer(place.offset);
            pickler.text("length");
            pickler.integer(place.length);
        });
    });
}

/// `TensorStorageMetadata`.
fn tensor(pickler: &mut Pickler, entry: &Entry, dtype: &str) {
    pickler.object(MODULE, "TensorStorageMetadata", |pickler| {
        pickler.dict(|pickler| {
            pickler.text("properties");
            pickler.object(MODULE, "TensorProperties", |pickler| {
                pickler.tuple(|pickler| {
                    pickler.class("torch", dtype);
                    pickler.call("torch.serialization", "_get_layout", |pickler| pickler.text("torch.strided"));
                    pickler.boolean(false);
                    pickler.call(MODULE, "_MEM_FORMAT_ENCODING", |pickler| pickler.integer(0));
                    pickler.boolean(false);
                });
            });
            pickler.text("size");
            pickler.size(entry.shape.iter().copied());
            pickler.text("chunks");
            pickler.list(|pickler| {
                for Place { ranges, .. } in &entry.places {
                    pickler.object(MODULE, "ChunkStorageMetadata", |pickler| {
                        pickler.dict(|pickler| {
                            pickler.text("offsets");
                            pickler.size(ranges.iter().map(|range| range.start));
                            pickler.text("sizes");
                            pickler.size(ranges.iter().map(ExactSizeIterator::len));
                        });
                    });
                }
            });
        });
    });
}
