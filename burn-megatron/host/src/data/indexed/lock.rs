//! One writer of a prefix at a time.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::IndexedError;

/// Held by the only program that writes a prefix; the lock file is removed with it. A program that is killed leaves the
/// file, but not the lock.
#[derive(Debug)]
pub(super) struct PrefixLock {
    path: PathBuf,
    file: File,
}

impl PrefixLock {
    /// Takes the lock that the writers of `bin` share.
    pub fn take(path: PathBuf, bin: &Path) -> Result<Self, IndexedError> {
        let io = IndexedError::write(&path);
        match Self::open(&path).map_err(io)? {
            Ok(file) => Ok(Self { path, file }),
            Err(owner) => Err(IndexedError::Busy { path: bin.into(), owner, lock: path }),
        }
    }

    /// The locked file, or what its owner wrote into it.
    fn open(path: &Path) -> io::Result<Result<File, String>> {
        loop {
            let nofollow = OFlags::NOFOLLOW.bits() as i32;
            let mut options = OpenOptions::new();
            let mut file =
                options.create(true).truncate(false).read(true).write(true).custom_flags(nofollow).open(path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut owner = String::new();
                    file.take(100).read_to_string(&mut owner)?;
                    return Ok(Err(if owner.is_empty() { "another process".into() } else { owner }));
                }
                // Some network file systems have no locks; there the user sees to it that one program writes.
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // The owner before may have removed the file between its opening and its locking here.
            let (ours, there) = (file.metadata()?, fs::symlink_metadata(path));
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                file.set_len(0)?;
                // At once: others read it while it is written.
                file.write_all(format!("process {}", std::process::id()).as_bytes())?;
                return Ok(Ok(file));
            }
        }
    }
}

impl Drop for PrefixLock {
    fn drop(&mut self) {
        // While it is still locked. A file that stays does no harm.
        let _ = fs::remove_file(&self.path);
        let _ = self.file.unlock();
    }
}
