//! An archive of `torch.save` with one tensor in it: a zip file whose `data.pkl` describes the tensor, and whose `data/0`
//! are the elements, not compressed.

use std::io::{self, Read, Seek, SeekFrom};

use safetensors::Dtype;
use zip::{CompressionMethod, ZipArchive};

use super::metadata::{dtype, sizes};
use super::pickle::{Pickle, Value};
use crate::positioned::PositionedFile;

const CLASSES: [&str; 16] = [
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "collections.OrderedDict",
    "torch.DoubleStorage",
    "torch.FloatStorage",
    "torch.HalfStorage",
    "torch.BFloat16Storage",
    "torch.LongStorage",
    "torch.IntStorage",
    "torch.ShortStorage",
    "torch.CharStorage",
    "torch.ByteStorage",
    "torch.BoolStorage",
    "torch.storage.UntypedStorage",
    "torch.float8_e4m3fn",
    "torch.float8_e5m2",
];
/// Most bytes of a description of one tensor.
const MOST: u64 = 1 << 20;
/// Most bytes of what is no tensor.
const MOST_OF_OBJECT: u64 = 1 << 30;
/// Most bytes of an element.
const MOST_OF_ELEMENT: u64 = 8;

/// Where in `file` the elements of the archive at `offset` begin. They are a tensor of this type and shape, row-major.
/// The error says what the archive is instead.
pub(super) fn elements(
    file: &PositionedFile,
    [offset, length]: [u64; 2],
    shape: &[usize],
    dtype: Dtype,
) -> Result<u64, String> {
    if offset.checked_add(length).is_none_or(|end| end > file.size()) {
        return Err(format!("should be {length} bytes from {offset} on, but the file has {}", file.size()));
    }
    let (mut archive, root) = open(Window { file, start: offset, length, at: 0 })?;
    let described = Pickle::read(&read(&mut archive, &format!("{root}/data.pkl"), MOST)?, &CLASSES)?;
    let view = View::of(described.value()).ok_or("is no plain tensor")?;
    if (view.dtype, &view.shape[..]) != (dtype, shape) {
        return Err(format!("holds {:?} {:?}, {} says {dtype:?} {shape:?}", view.dtype, view.shape, super::METADATA));
    }
    if !view.is_row_major() {
        return Err("is not contiguous; save `tensor.contiguous()`".into());
    }
    let data = archive.by_name(&format!("{root}/data/{}", view.storage));
    let data = data.map_err(|error| format!("is no archive of torch.save: {error}"))?;
    let size = dtype.bitsize() / 8;
    let bytes = (shape.iter().product::<usize>() * size) as u64;
    let skipped = view.offset.checked_mul(size).map(|skipped| skipped as u64);
    let inside = skipped.and_then(|skipped| skipped.checked_add(bytes)).is_some_and(|end| end <= data.size());
    if data.compression() != CompressionMethod::Stored || data.size() != data.compressed_size() || !inside {
        return Err(format!("has a storage of {} bytes, {bytes} are needed", data.size()));
    }
    let start = data.data_start().zip(skipped).and_then(|(start, skipped)| start.checked_add(skipped));
    let start = start.filter(|start| start.checked_add(bytes).is_some_and(|end| end <= length));
    start.map(|start| offset + start).ok_or_else(|| "has its elements outside the archive".into())
}

/// What an archive has that is no tensor. Of tensors in it, those of one element have a number. The error says what the
/// archive is instead.
pub(super) fn object(from: impl Read + Seek) -> Result<Pickle, String> {
    let (mut archive, root) = open(from)?;
    let mut pickle = Pickle::of_any(&read(&mut archive, &format!("{root}/data.pkl"), MOST_OF_OBJECT)?)?;
    let names: Vec<String> = archive.file_names().filter_map(|name| Some(name.ok()?.into_owned())).collect();
    for name in names {
        let Some(storage) = name.strip_prefix(&format!("{root}/data/")) else { continue };
        if !archive.by_name(&name).is_ok_and(|entry| entry.size() > MOST_OF_ELEMENT) {
            pickle.storages.insert(storage.into(), read(&mut archive, &name, MOST_OF_ELEMENT)?);
        }
    }
    Ok(pickle)
}

/// The element of a tensor that has one.
fn element(tensor: Value) -> Option<f64> {
    let view = View::of(tensor)?;
    let (bytes, one) =
        (tensor.storages().get(&view.storage)?, view.offset == 0 && view.shape.iter().all(|size| *size == 1));
    let four = || bytes.first_chunk::<4>().copied();
    let eight = || bytes.first_chunk::<8>().copied();
    let number = match view.dtype {
        Dtype::F32 => f64::from(f32::from_le_bytes(four()?)),
        Dtype::F64 => f64::from_le_bytes(eight()?),
        Dtype::I32 => f64::from(i32::from_le_bytes(four()?)),
        Dtype::I64 => i64::from_le_bytes(eight()?) as f64,
        _ => return None,
    };
    one.then_some(number)
}

/// A number, or the only element of a tensor.
pub fn number(value: Value) -> Option<f64> {
    value.scalar().or_else(|| element(value))
}

/// A whole number that is not negative, also as a float or as the only element of a tensor.
pub fn count(value: Value) -> Option<u64> {
    number(value).filter(|number| (0.0..=2f64.powi(53)).contains(number) && number.fract() == 0.0).map(|n| n as u64)
}

/// The archive, and the folder in it that has everything.
fn open<R: Read + Seek>(from: R) -> Result<(ZipArchive<R>, String), String> {
    let mut archive = ZipArchive::new(from).map_err(|error| format!("is no archive of torch.save: {error}"))?;
    let names: Vec<String> = archive.file_names().filter_map(|name| Some(name.ok()?.into_owned())).collect();
    let root = names.iter().find_map(|name| name.strip_suffix("/data.pkl"));
    let root = root.ok_or("is no archive of torch.save: it has no data.pkl")?;
    if names.iter().any(|name| *name == format!("{root}/byteorder")) {
        let order = read(&mut archive, &format!("{root}/byteorder"), MOST)?;
        if order != b"little" {
            return Err("was written in another order of bytes than little".into());
        }
    }
    Ok((archive, root.into()))
}

/// A part of an archive that has at most so many bytes.
fn read<R: Read + Seek>(archive: &mut ZipArchive<R>, name: &str, most: u64) -> Result<Vec<u8>, String> {
    let wrong = |error: &dyn ToString| format!("is no archive of torch.save: {name}: {}", error.to_string());
    let entry = archive.by_name(name).map_err(|error| wrong(&error))?;
    if entry.size() > most {
        return Err(format!("has {} bytes in {name}, at most {most} are read", entry.size()));
    }
    let mut bytes = Vec::new();
    entry.take(most).read_to_end(&mut bytes).map_err(|error| wrong(&error))?;
    Ok(bytes)
}

/// A tensor as a view of a storage.
struct View {
    storage: String,
    dtype: Dtype,
    /// Elements before it.
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl View {
    /// `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)`; version 3 has a type after them.
    fn of(value: Value) -> Option<Self> {
        let arguments = value.arguments()?;
        let storage = arguments.first()?.persistent()?;
        let [kind, class, key] = [storage.first()?, storage.get(1)?, storage.get(2)?];
        let dtype = match value.class()? {
            "torch._utils._rebuild_tensor_v2" => typed(class.class()?)?,
            "torch._utils._rebuild_tensor_v3" => dtype(arguments.get(6)?.class()?)?,
            _ => return None,
        };
        let offset = usize::try_from(arguments.get(1)?.integer()?).ok()?;
        let [shape, strides] = [sizes(*arguments.get(2)?)?, sizes(*arguments.get(3)?)?];
        let fits = kind.text() == Some("storage") && shape.len() == strides.len();
        fits.then(|| Some(Self { storage: key.text()?.into(), dtype, offset, shape, strides }))?
    }

    fn is_row_major(&self) -> bool {
        let mut expected = 1_usize;
        let empty = self.shape.contains(&0);
        self.shape.iter().zip(&self.strides).rev().all(|(size, stride)| {
            let fits = *size == 1 || *stride == expected;
            expected = expected.saturating_mul(*size);
            fits || empty
        })
    }
}

/// The type of the elements of a storage.
fn typed(storage: &str) -> Option<Dtype> {
    Some(match storage.strip_prefix("torch.")?.strip_suffix("Storage")? {
        "Double" => Dtype::F64,
        "Float" => Dtype::F32,
        "Half" => Dtype::F16,
        "BFloat16" => Dtype::BF16,
        "Long" => Dtype::I64,
        "Int" => Dtype::I32,
        "Short" => Dtype::I16,
        "Char" => Dtype::I8,
        "Byte" => Dtype::U8,
        "Bool" => Dtype::BOOL,
        _ => return None,
    })
}

/// Some bytes of a file as a file of their own.
pub(super) struct Window<'a> {
    pub file: &'a PositionedFile,
    pub start: u64,
    pub length: u64,
    /// Where reading continues.
    pub at: u64,
}

impl Read for Window<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = buffer.len().min(self.length.saturating_sub(self.at) as usize);
        if count == 0 {
            return Ok(0);
        }
        self.file.read_into(self.start + self.at, &mut buffer[..count])?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for Window<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::dcp::DcpWriter;

    /// They were truncated to 1 MiB without an error.
    #[test]
    fn large_objects_are_read_whole_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large.pt");
        let text = "word ".repeat(300_000);
        DcpWriter::save(&path, |pickler| pickler.text(&text)).unwrap();
        let archive = || Cursor::new(std::fs::read(&path).unwrap());
        assert_eq!(object(archive()).unwrap().value().text(), Some(text.as_str()));
        let (mut opened, _) = open(archive()).unwrap();
        let refused = read(&mut opened, "large/data.pkl", MOST).unwrap_err();
        assert!(refused.starts_with("has 1500") && refused.ends_with("at most 1048576 are read"), "{refused}");
    }
}
