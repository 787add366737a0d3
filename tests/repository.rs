//! The repository's own text, for the tests that read it.

use std::fs;
use std::path::Path;

use walkdir::{DirEntry, WalkDir};

/// The folder with the workspace's `Cargo.toml`.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is one folder up")
}

/// All files whose name ends like this, as paths from the root, in order; without what builds and runs have written.
pub fn files(ending: &str) -> Vec<String> {
    let hidden = |entry: &DirEntry| entry.depth() > 0 && entry.file_name().to_string_lossy().starts_with('.');
    let written = |entry: &DirEntry| {
        entry.depth() == 1 && ["target", "runs", "shared"].map(Some).contains(&entry.file_name().to_str())
    };
    WalkDir::new(root())
        .sort_by_file_name()
        .into_iter()
        .filter_entry(|entry| !hidden(entry) && !written(entry))
        .map(|entry| entry.expect("the repository can be read"))
        .filter(|entry| entry.file_type().is_file())
        .filter_map(|entry| entry.path().strip_prefix(root()).ok()?.to_str().map(str::to_owned))
        .filter(|path| path.ends_with(ending))
        .collect()
}

/// The text of a file of the repository.
///
/// # Panics
/// If there is no such file.
pub fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}
