//! The real disk.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::{Disk, DiskFile, Entry};

pub(in super::super) struct RealDisk;

impl Disk for RealDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(OpenOptions::new().write(true).create_new(true).open(path)?))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn is_link(&self, path: &Path) -> io::Result<bool> {
        Ok(fs::symlink_metadata(path)?.is_symlink())
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>> {
        let entry = |entry: io::Result<fs::DirEntry>| {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            Ok(Entry { name, is_folder: entry.file_type()?.is_dir() })
        };
        fs::read_dir(folder)?.map(entry).collect()
    }

    fn size(&self, path: &Path) -> io::Result<u64> {
        Ok(fs::metadata(path)?.len())
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    fn free_space(&self, folder: &Path) -> io::Result<u64> {
        let space = rustix::fs::statvfs(folder)?;
        Ok(space.f_bavail * space.f_frsize)
    }

    fn lock(&self, path: &Path, text: &str) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        let mut file = options.open(path).map_err(|error| match error.raw_os_error() {
            Some(number) if number == Errno::LOOP.raw_os_error() => io::Error::other("is a symbolic link; remove it"),
            _ => error,
        })?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            // Some network file systems have no locks; there the user sees to it that one run writes to a folder.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        file.set_len(0)?;
        file.write_all(text.as_bytes())?;
        Ok(Some(Box::new(file)))
    }
}

impl DiskFile for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
