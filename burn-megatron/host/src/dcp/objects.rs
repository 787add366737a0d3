//! What a DCP folder has next to tensors: numbers, words and settings, each in an archive of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::DcpError;
use super::archive::{self, Window};
use super::metadata::{Metadata, Place};
use super::pickle::Pickle;
use crate::positioned::PositionedFile;

/// The objects of a folder.
#[derive(Debug)]
pub struct DcpObjects {
    folder: PathBuf,
    /// Names of everything in the folder, tensors too.
    pub names: BTreeSet<String>,
    places: BTreeMap<String, Place>,
}

impl DcpObjects {
    /// Reads what there is.
    ///
    /// # Errors
    /// If the metadata is damaged.
    pub fn open(folder: &Path) -> Result<Self, DcpError> {
        let metadata = Metadata::read(folder)?;
        let places = metadata.pieces()?;
        let tensors = metadata.names()?;
        let names = tensors.into_iter().map(String::from).chain(places.keys().cloned()).collect();
        Ok(Self { folder: folder.into(), names, places })
    }

    /// What is stored under a name; a tensor of one element is a number.
    ///
    /// # Errors
    /// If it is not there or damaged.
    pub fn read(&self, name: &str) -> Result<Pickle, DcpError> {
        let wrong = |path: &Path, what: String| DcpError::tensor(path, name, what);
        let place = self.places.get(name);
        let place = place.ok_or_else(|| wrong(&self.folder, "is missing".into()))?;
        let path = self.folder.join(&place.file);
        let file = PositionedFile::open(&path);
        let file = file.map_err(|error| wrong(&path, format!("cannot be read: {error}")))?;
        let window = Window { file: &file, start: place.offset, length: place.length, at: 0 };
        archive::object(window).map_err(|what| wrong(&path, what))
    }

    /// What a file of `torch.save` holds.
    ///
    /// # Errors
    /// If it is not there or damaged.
    pub fn load(path: &Path) -> Result<Pickle, DcpError> {
        let file = PositionedFile::open(path);
        let file = file.map_err(|error| DcpError::file(path, format!("cannot be read: {error}")))?;
        let window = Window { file: &file, start: 0, length: file.size(), at: 0 };
        archive::object(window).map_err(|what| DcpError::file(path, what))
    }
}
