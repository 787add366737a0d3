//! Samples by their number.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::super::ending::{JSON_LINES, ending};
use super::decode::RgbImage;
use super::error::ImageError;
use super::sample::{Entry, Found, Location, Target, unreadable};
use super::{lines, shard};

/// Images and what is said of them.
///
/// A list is a file of JSON lines, `{"image": "PATH", "label": CLASS}` with paths relative to the list, or `text` or
/// `messages` in place of `label`; or a shard of WebDataset, a tar file whose members belong together when their names are
/// equal up to the first dot: `NAME.png` or `NAME.jpg`, and `NAME.cls`, `NAME.txt` or `NAME.json`, which is such a line.
/// A `.json` without these keys may be there as metadata, as img2dataset writes it.
#[derive(Debug)]
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
        let found = match &*ending(&path) {
            name if JSON_LINES.contains(&name) => lines::read(&path)?,
            "tar" => shard::read(&path)?,
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

    /// Where sample `index` is: file and line, or file and member.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn place(&self, index: usize) -> &str {
        &self.entries[index].place
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

fn bytes_at(path: &Path, range: &Range<u64>) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    File::open(path)?.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes)
}
