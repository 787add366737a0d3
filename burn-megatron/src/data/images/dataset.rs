//! Samples by their number.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::decode::RgbImage;
use super::error::ImageError;
use super::{lines, shard};

/// What a sample says of its image.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// Its class.
    Label(usize),
    /// A text.
    Text(String),
    /// A conversation: a list of objects with `role` and `content`, as chat templates take it.
    Messages(Value),
}

/// A sample that is there.
pub(super) struct Entry {
    /// File and line, or file and member.
    pub place: String,
    pub image: Location,
    pub target: Target,
}

/// Where the bytes of an image are.
pub(super) enum Location {
    /// In a file of their own.
    File(PathBuf),
    /// In the shard.
    Within(Range<u64>),
}

/// What a list holds: samples, and why others cannot be used.
#[derive(Default)]
pub(super) struct Found {
    pub entries: Vec<Entry>,
    pub unusable: Vec<String>,
}

/// Images and what is said of them.
///
/// A list is a file of JSON lines, `{"image": "PATH", "label": CLASS}` with paths relative to the list, or `text` or
/// `messages` in place of `label`; or a shard of WebDataset, a tar file whose members belong together when their names are
/// equal up to the first dot: `NAME.png` or `NAME.jpg`, and `NAME.cls`, `NAME.txt` or `NAME.json`, which is such a line.
pub struct ImageDataset {
    path: PathBuf,
    entries: Vec<Entry>,
    skipped: Vec<String>,
}

impl ImageDataset {
    /// Reads the list and the first bytes of every image.
    ///
    /// # Errors
    /// If the list cannot be read; if a sample has no image, an image of another kind or no target, or a shard ends within
    /// one, unless `skip`: the message counts them and names the first one's file and line, or member. If none is left.
    pub fn open(path: impl AsRef<Path>, skip: bool) -> Result<Self, ImageError> {
        let path = path.as_ref().to_path_buf();
        let found = match path.extension().and_then(|ending| ending.to_str()) {
            Some("jsonl") => lines::read(&path)?,
            Some("tar") => shard::read(&path)?,
            _ => return Err(ImageError::Kind { path }),
        };
        let Found { entries, unusable } = found;
        if !skip && !unusable.is_empty() {
            return Err(ImageError::Unusable { samples: entries.len() + unusable.len(), unusable });
        }
        if entries.is_empty() {
            return Err(ImageError::Empty { path });
        }
        Ok(Self { path, entries, skipped: unusable })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What was skipped, each with its place and the reason.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// What sample `index` says of its image.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn target(&self, index: usize) -> &Target {
        &self.entries[index].target
    }

    /// The image of sample `index`.
    ///
    /// # Errors
    /// If the file is gone or its image is damaged, with its place.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn image(&self, index: usize) -> Result<RgbImage, ImageError> {
        let entry = &self.entries[index];
        let bytes = match &entry.image {
            Location::File(path) => std::fs::read(path).map_err(unreadable(path))?,
            Location::Within(range) => bytes_at(&self.path, range).map_err(unreadable(&self.path))?,
        };
        RgbImage::decode(&bytes).map_err(|what| ImageError::Image { place: entry.place.clone(), what })
    }
}

pub(super) fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> ImageError {
    move |source| ImageError::Read { path: path.into(), source }
}

fn bytes_at(path: &Path, range: &Range<u64>) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    File::open(path)?.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes)
}

/// The first bytes of a file.
pub(super) fn head(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(super::decode::HEAD as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The target of a JSON line.
pub(super) fn target(object: &Value) -> Result<Target, String> {
    let present = |key: &str| object.get(key).filter(|value| !value.is_null());
    match (present("label"), present("text"), present("messages")) {
        (Some(label), None, None) => match label.as_u64() {
            Some(label) => Ok(Target::Label(label as usize)),
            None => Err(format!("`label` is {label}; legal: the number of a class, from 0")),
        },
        (None, Some(text), None) => match text.as_str() {
            Some(text) => Ok(Target::Text(text.into())),
            None => Err(format!("`text` is {text}; legal: a string")),
        },
        (None, None, Some(messages)) if messages.is_array() => Ok(Target::Messages(messages.clone())),
        (None, None, Some(messages)) => Err(format!("`messages` is {messages}; legal: a list of messages")),
        (None, None, None) => Err("has none of `label`, `text` and `messages`; legal: one of them".into()),
        _ => Err("has more than one of `label`, `text` and `messages`; legal: one of them".into()),
    }
}
