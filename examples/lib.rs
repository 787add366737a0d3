//! What the examples share: text to learn from, and how they end.

pub mod machine;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use backend_dist::memory::RankAllocator;
use backend_dist::shard::stable_hash;

pub use text::Text;

/// The log line tells the memory of CPU ranks one by one.
#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator;

/// The exit code of a program, after its error, if there is one, is printed in one line.
pub fn report(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", burn_megatron::cli::describe(&error));
            ExitCode::FAILURE
        }
    }
}

/// Folders that hold no text of the repository's own.
const SKIPPED: [&str; 3] = ["target", "runs", "golden"];

/// The repository's own sources and documents (`.rs`, `.md`, `.toml`).
///
/// Files come in an order that looks random but is the same everywhere, so that a part held out for validation is of
/// the same kind as the rest.
///
/// # Errors
/// If the repository that the example was built from is not there any more.
pub fn repository_text() -> Result<Vec<PathBuf>, String> {
    // `cargo run` names the checkout it runs in; the folder of the build may be another one's when checkouts share a
    // target folder.
    let package =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let root = package.parent().expect("the crate lies in the repository");
    let mut files = Vec::new();
    walk(root, &mut files).map_err(|error| {
        format!("cannot read the repository at {} ({error}): name a text with --data FILE", root.display())
    })?;
    files.sort_by_key(|file| stable_hash(&file.strip_prefix(root).unwrap_or(file).to_string_lossy()));
    Ok(files)
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if entry.file_type()?.is_dir() {
            if !name.starts_with('.') && !SKIPPED.contains(&name.as_str()) {
                walk(&path, files)?;
            }
        } else if ["rs", "md", "toml"].iter().any(|kind| path.extension().is_some_and(|extension| extension == *kind)) {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_this_file_once_and_nothing_built() {
        let files = repository_text().unwrap();
        assert_eq!(files.iter().filter(|file| file.ends_with("examples/lib.rs")).count(), 1);
        assert!(!files.iter().any(|file| file.components().any(|part| part.as_os_str() == "target")));
    }
}
