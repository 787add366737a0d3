//! The operations of a disk with errors that name what was done to which file.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::super::error::CheckpointError;
use super::{Disk, DiskFile, Entry};

type Result<T> = std::result::Result<T, CheckpointError>;

/// A disk whose errors say which file and what to do.
#[derive(Clone)]
pub(in super::super) struct Files(Arc<dyn Disk>);

impl Files {
    pub fn new(disk: impl Disk + 'static) -> Self {
        Self(Arc::new(disk))
    }

    pub fn create_folder(&self, path: &Path) -> Result<()> {
        self.0.create_folder(path).map_err(|cause| CheckpointError::io("create", path, cause))
    }

    /// Creates a folder and those above it that are missing, each durably.
    pub fn create_folders(&self, path: &Path) -> Result<()> {
        let parent = match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => return Ok(()),
        };
        match self.0.list(path) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => return Err(CheckpointError::io("open", path, cause)),
        }
        self.create_folders(parent)?;
        match self.0.create_folder(path) {
            // Another rank's process may have been faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => result.map_err(|cause| CheckpointError::io("create", path, cause))?,
        }
        self.sync_folder(parent)
    }

    /// Starts a file of `bytes` bytes. What is left of an earlier one, or a link in its place, is removed.
    pub fn create_file<'a>(&'a self, path: &'a Path, bytes: u64) -> Result<NewFile<'a>> {
        let mut file = self.0.create_file(path);
        if file.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
            self.remove_file(path)?;
            file = self.0.create_file(path);
        }
        let file = file.map_err(|cause| self.create_error(path, bytes, cause))?;
        Ok(NewFile { files: self, file, path, bytes })
    }

    /// Writes a whole file durably; its name is durable after [`Files::sync_folder`].
    pub fn write_file(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut file = self.create_file(path, bytes.len() as u64)?;
        file.write(bytes)?;
        file.sync()
    }

    pub fn sync_folder(&self, path: &Path) -> Result<()> {
        self.0.sync_folder(path).map_err(|cause| CheckpointError::io("sync", path, cause))
    }

    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let rename = self.0.rename(from, to);
        rename.map_err(|cause| CheckpointError::io("give its name to", to, cause))
    }

    /// Removes a folder with what is in it, if it exists. Of a symbolic link, also one inside, only the link is removed.
    pub fn remove_folder(&self, path: &Path) -> Result<()> {
        let fail = |cause| CheckpointError::io("remove", path, cause);
        match self.0.is_link(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Ok(true) => return self.remove_file(path),
            is_link => is_link.map_err(fail)?,
        };
        for entry in self.0.list(path).map_err(fail)? {
            let inner = path.join(&entry.name);
            if entry.is_folder { self.remove_folder(&inner)? } else { self.remove_file(&inner)? }
        }
        self.0.remove_folder(path).map_err(fail)
    }

    pub fn remove_file(&self, path: &Path) -> Result<()> {
        self.0.remove_file(path).map_err(|cause| CheckpointError::io("remove", path, cause))
    }

    pub fn list(&self, folder: &Path) -> Result<Vec<Entry>> {
        self.0.list(folder).map_err(|cause| CheckpointError::io("list", folder, cause))
    }

    /// Bytes of the files in a folder.
    pub fn bytes(&self, folder: &Path) -> Result<u64> {
        let size = |entry: &Entry| {
            let path = folder.join(&entry.name);
            self.0.size(&path).map_err(|cause| CheckpointError::io("read", &path, cause))
        };
        self.list(folder)?.iter().filter(|entry| !entry.is_folder).map(size).sum()
    }

    /// The contents of a file, `None` if there is none.
    pub fn read(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        match self.0.read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            result => result.map(Some).map_err(|cause| CheckpointError::io("read", path, cause)),
        }
    }

    pub fn free_space(&self, folder: &Path) -> Result<u64> {
        self.0.free_space(folder).map_err(|cause| CheckpointError::io("ask for the free space of", folder, cause))
    }

    /// See [`Disk::lock`].
    pub fn lock(&self, path: &Path, text: &str) -> Result<Option<Box<dyn Send + Sync>>> {
        self.0.lock(path, text).map_err(|cause| CheckpointError::io("lock", path, cause))
    }

    /// A file that cannot be made. A full disk that has room for its bytes has no inodes left, or a quota.
    fn create_error(&self, path: &Path, needed: u64, cause: io::Error) -> CheckpointError {
        let free = path.parent().and_then(|folder| self.0.free_space(folder).ok());
        match free {
            Some(free) if free >= needed => CheckpointError::io("create", path, cause),
            _ => self.write_error(path, needed, cause),
        }
    }

    /// A failed write; when the disk is full, with the numbers.
    fn write_error(&self, path: &Path, needed: u64, cause: io::Error) -> CheckpointError {
        let full = matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        let free = path.parent().and_then(|folder| self.0.free_space(folder).ok());
        match free {
            Some(free) if full => CheckpointError::Full { path: path.to_path_buf(), needed, free },
            _ => CheckpointError::io("write", path, cause),
        }
    }
}

/// A file that is being written.
pub(in super::super) struct NewFile<'a> {
    files: &'a Files,
    file: Box<dyn DiskFile>,
    path: &'a Path,
    bytes: u64,
}

impl NewFile<'_> {
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write(bytes).map_err(|cause| self.files.write_error(self.path, self.bytes, cause))
    }

    /// A disk may say only now that it is full.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync().map_err(|cause| self.files.write_error(self.path, self.bytes, cause))
    }
}
