//! One run at a time in a folder.

use std::fs;
use std::path::Path;

use super::disk::{Files, RealDisk};
use super::error::{CheckpointError, Result};
use super::names;

/// A lock that ends with this value or the process.
pub type Lock = Box<dyn Send + Sync>;

/// Takes the folder that a run writes its logs and data to, `output.directory`, and creates it if it is missing.
///
/// # Errors
/// Names the process that has it.
pub fn lock_output(folder: &Path) -> Result<Lock> {
    let files = Files::new(RealDisk);
    files.create_folders(folder)?;
    lock(&files, folder, names::RUN_LOCK, "output.directory")
}

/// Takes a folder by the lock file `name` in it; `key` is what chooses another folder.
pub(super) fn lock(files: &Files, root: &Path, name: &str, key: &'static str) -> Result<Lock> {
    let path = root.join(name);
    let holder = format!("process {} on {}", std::process::id(), host_name());
    match files.lock(&path, &holder)? {
        Some(lock) => Ok(lock),
        None => {
            let holder = files.read(&path)?.map(|text| String::from_utf8_lossy(&text).into_owned());
            let holder = holder.filter(|holder| !holder.is_empty()).unwrap_or_else(|| "unknown".into());
            Err(CheckpointError::Locked { root: root.to_path_buf(), holder, key })
        }
    }
}

/// Name of this host.
pub(super) fn host_name() -> String {
    let name =
        ["/proc/sys/kernel/hostname", "/etc/hostname"].into_iter().find_map(|file| fs::read_to_string(file).ok());
    name.map_or("an unnamed host".into(), |name| name.trim().to_string())
}
