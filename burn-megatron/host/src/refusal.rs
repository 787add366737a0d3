//! What a user can do where the file system refuses.

use std::io;

use rustix::io::Errno;

/// What a program wanted of a file or folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read it.
    Read,
    /// To make it, write to it or remove it.
    Write,
}

/// What to do about a refusal, to be put after words that name the file and the cause; nothing where they say it all.
pub fn advice(access: Access, cause: &io::Error) -> &'static str {
    use Access::{Read, Write};
    use io::ErrorKind as Kind;
    let is = |errno: Errno| cause.raw_os_error() == Some(errno.raw_os_error());
    if is(Errno::MFILE) || is(Errno::NFILE) {
        return "; too many files are open: raise the limit (`ulimit -n`)";
    }
    if is(Errno::ISDIR) {
        return "; name a file, not a folder";
    }
    match (access, cause.kind()) {
        (Read, Kind::PermissionDenied) => "; give this user the permission to read it",
        (Write, Kind::PermissionDenied) => "; give this user the permission to write there, or choose another folder",
        (Read, Kind::NotFound) => "; check the path",
        (Read, Kind::NotADirectory) => "; a part of the path is a file, check the path",
        (Write, Kind::NotADirectory) => "; a part of the path is a file, choose another folder",
        (Read, Kind::UnexpectedEof) => "; restore it",
        (Write, Kind::ReadOnlyFilesystem) => "; the file system is read-only, choose another folder",
        (Write, Kind::StorageFull | Kind::QuotaExceeded) => {
            "; free some space (`df`) or some inodes (`df -i`), or choose another folder"
        }
        (Write, Kind::FileTooLarge) => {
            "; a limit of the size of files is reached (`ulimit -f`, or the file system's own)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_say_what_to_do() {
        let of = |access, errno: Errno| advice(access, &io::Error::from_raw_os_error(errno.raw_os_error()));
        for (access, errno, words) in [
            (Access::Read, Errno::ACCESS, "permission to read it"),
            (Access::Write, Errno::ACCESS, "permission to write there"),
            (Access::Read, Errno::NOENT, "check the path"),
            (Access::Read, Errno::NOTDIR, "a part of the path is a file"),
            (Access::Write, Errno::NOTDIR, "a part of the path is a file, choose"),
            (Access::Read, Errno::ISDIR, "name a file, not a folder"),
            (Access::Write, Errno::ROFS, "read-only"),
            (Access::Write, Errno::NOSPC, "free some space (`df`) or some inodes (`df -i`)"),
            (Access::Write, Errno::DQUOT, "free some space"),
            (Access::Write, Errno::FBIG, "ulimit -f"),
            (Access::Read, Errno::MFILE, "ulimit -n"),
            (Access::Write, Errno::NFILE, "ulimit -n"),
        ] {
            let text = of(access, errno);
            assert!(text.starts_with("; ") && text.contains(words), "{access:?} {errno:?}: {text}");
        }
        assert_eq!(of(Access::Read, Errno::IO), "", "a disk that fails is beyond advice");
        assert_eq!(advice(Access::Read, &io::ErrorKind::UnexpectedEof.into()), "; restore it");
    }
}
