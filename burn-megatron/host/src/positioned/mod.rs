//! Files that are read at positions.
//!
//! When another program truncates a file that is mapped into memory, the next access ends the process with SIGBUS. A
//! positioned read of such a file is an error that can be told.

mod runs;

pub use runs::Run;

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A regular file and the size that it had when it was opened.
#[derive(Debug)]
pub struct PositionedFile {
    file: File,
    size: u64,
}

impl PositionedFile {
    /// Opens a file; folders, pipes and devices are refused.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Before it is opened: opening a pipe waits for its writer.
        let about = std::fs::metadata(path)?;
        if about.is_dir() {
            return Err(io::Error::new(ErrorKind::IsADirectory, "is a folder; a file is needed"));
        }
        if !about.is_file() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "is a pipe or a device; a regular file is needed"));
        }
        let file =
            File::open(path).or_else(|error| if allow_more_files(&error) { File::open(path) } else { Err(error) })?;
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }

    /// Bytes of the file when it was opened.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The `length` bytes from `start` on.
    pub fn read(&self, start: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.read_into(start, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `bytes` from `start` on.
    pub fn read_into(&self, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, start).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => self.truncated(start + bytes.len() as u64),
            _ => error,
        })
    }

    /// Reads on from `start`; the end of the file is an error before `size` bytes are read.
    pub fn reader(&self, start: u64) -> impl Read + '_ {
        Reader { file: self, next: start }
    }

    fn truncated(&self, needed: u64) -> io::Error {
        let now = self.file.metadata().map_or(0, |about| about.len());
        let what = format!(
            "ends at byte {now}, byte {needed} is needed: the file had {} bytes when it was opened and was truncated since",
            self.size
        );
        io::Error::new(ErrorKind::UnexpectedEof, what)
    }
}

/// Whether a program may open more files than it could when it met this error: most systems let it have as many as it asks for
/// beyond the first 1024, and a checkpoint of many ranks has more.
fn allow_more_files(error: &io::Error) -> bool {
    if error.raw_os_error() != Some(libc::EMFILE) {
        return false;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls get a whole structure, which lives until they return.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0
            && limit.rlim_cur < limit.rlim_max
            && libc::setrlimit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: limit.rlim_max, ..limit }) == 0
    }
}

struct Reader<'a> {
    file: &'a PositionedFile,
    next: u64,
}

impl Read for Reader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.file.read_at(buffer, self.next)?;
        if count == 0 && !buffer.is_empty() && self.next < self.file.size {
            return Err(self.file.truncated(self.next + 1));
        }
        self.next += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    #[test]
    fn a_file_that_is_truncated_while_it_is_open_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 10_000]).unwrap();
        let file = PositionedFile::open(&path).unwrap();
        assert_eq!((file.size(), file.read(9_998, 2).unwrap()), (10_000, vec![7, 7]));
        OpenOptions::new().write(true).open(&path).unwrap().set_len(1000).unwrap();
        assert_eq!(file.read(0, 1000).unwrap().len(), 1000);
        let expected = "ends at byte 1000, byte 1001 is needed: the file had 10000 bytes when it was opened and was \
                        truncated since";
        assert_eq!(file.read(999, 2).unwrap_err().to_string(), expected);
        assert_eq!(file.reader(0).read_to_end(&mut Vec::new()).unwrap_err().to_string(), expected);
    }

    #[test]
    fn folders_and_devices_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(PositionedFile::open(folder.path()).unwrap_err().to_string(), "is a folder; a file is needed");
        let refused = PositionedFile::open(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(refused.to_string(), "is a pipe or a device; a regular file is needed");
    }
}
