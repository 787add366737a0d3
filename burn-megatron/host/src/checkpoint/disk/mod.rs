//! The only way in which a checkpoint changes files: the real disk, and in tests one that fails, is killed or
//! loses power at a chosen operation.

mod files;
mod real;
#[cfg(test)]
mod sim;

use std::io;
use std::path::Path;

pub(super) use files::Files;
pub(super) use real::RealDisk;
#[cfg(test)]
pub(super) use sim::{Fault, Loss, SimDisk, Tree};

/// An entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub name: String,
    pub is_folder: bool,
}

/// The operations that saving needs. What is created, renamed or removed is certain to survive a power cut only after
/// [`Disk::sync_folder`] of the folder it is in, what is written only after [`DiskFile::sync`].
pub(super) trait Disk: Send + Sync {
    /// Creates a folder in one that exists.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Creates an empty file of a name that is free; a symbolic link of that name is not followed.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// Gives a file or folder another name; a file of that name is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
    /// Whether there is a symbolic link of this name.
    fn is_link(&self, path: &Path) -> io::Result<bool>;
    /// What is in a folder. A symbolic link is no folder, wherever it leads.
    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>>;
    /// Size of a file.
    fn size(&self, path: &Path) -> io::Result<u64>;
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Bytes that may still be written to the disk of a folder.
    fn free_space(&self, folder: &Path) -> io::Result<u64>;
    /// Takes an exclusive lock that ends with the value or the process, and writes `text` into the locked file. `None`
    /// if it is taken. A symbolic link is not followed.
    fn lock(&self, path: &Path, text: &str) -> io::Result<Option<Box<dyn Send + Sync>>>;
}

/// A file that is being written.
pub(super) trait DiskFile {
    /// Appends all of `bytes`.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    fn sync(&mut self) -> io::Result<()>;
}
