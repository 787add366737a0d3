//! Files that appear under their names once they are complete.

use std::ffi::OsString;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::NamedTempFile;

/// End of the names of files that are not complete.
pub(crate) const PARTIAL: &str = ".partial";

/// The folder of the file at `path`.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// `.NAME` and an end.
pub(crate) fn hidden(path: &Path, end: &str) -> OsString {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(end);
    name
}

/// A new file in the folder of `path` whose name nobody else has; it is removed unless it is given a name.
///
/// # Errors
/// If the system refuses, or `path` is a folder or a device, which would be replaced.
pub fn partial(path: &Path) -> io::Result<NamedTempFile> {
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let prefix = hidden(path, ".");
    let mut builder = tempfile::Builder::new();
    // As other new files: runs of other users read it.
    builder.permissions(Permissions::from_mode(0o666)).prefix(&prefix).suffix(PARTIAL).tempfile_in(folder_of(path))
}
