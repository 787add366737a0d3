//! Where a program keeps what makes its next start quicker: compiled kernels, algorithms of matrix products. Nothing
//! there is needed; all of it can be deleted at any time.

#[cfg(any(test, feature = "cuda"))]
pub(crate) mod choices;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The variable that names another folder; empty, nothing is kept.
pub const VARIABLE: &str = "BURN_MEGATRON_CACHE";

/// The folder, made if it is missing: `$BURN_MEGATRON_CACHE`, else `$XDG_CACHE_HOME/burn-megatron`, else
/// `~/.cache/burn-megatron`. `None` where there is none, or it cannot be made, which is said once.
pub fn folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = || {
        let path = choose(|name| std::env::var(name).ok())?;
        match fs::create_dir_all(&path) {
            Ok(()) => Some(path),
            Err(error) => {
                warn(&format!("{}: {error}; the next start is no quicker (see {VARIABLE})", path.display()));
                None
            }
        }
    };
    FOLDER.get_or_init(made).as_deref()
}

fn choose(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    match variable(VARIABLE) {
        Some(path) if path.is_empty() => None,
        Some(path) => Some(path.into()),
        None => {
            let set = |name| variable(name).filter(|path| Path::new(path).is_absolute()).map(PathBuf::from);
            let caches = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
            caches.map(|caches| caches.join("burn-megatron"))
        }
    }
}

/// Whether matrix products on GPUs take the algorithm that is quickest by measurement, kept in [`folder`] for later
/// runs, instead of the first that the library suggests. For products of sizes not used before.
pub fn tune_products(on: bool) {
    #[cfg(feature = "cuda")]
    crate::cuda::tune_products(on);
    #[cfg(not(feature = "cuda"))]
    let _ = on;
}

/// What is wrong with the cache, which is no failure of the run.
pub(crate) fn warn(what: &str) {
    eprintln!("warning: cache: {what}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_the_users_cache_unless_told_otherwise() {
        let chosen = |set: &[(&str, &str)]| {
            choose(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
        };
        let home = ("HOME", "/home/a");
        assert_eq!(chosen(&[home]), Some("/home/a/.cache/burn-megatron".into()));
        assert_eq!(chosen(&[home, ("XDG_CACHE_HOME", "/fast")]), Some("/fast/burn-megatron".into()));
        // The XDG specification: a relative path is to be ignored.
        assert_eq!(chosen(&[home, ("XDG_CACHE_HOME", "fast")]), Some("/home/a/.cache/burn-megatron".into()));
        assert_eq!(chosen(&[home, (VARIABLE, "near/here")]), Some("near/here".into()));
        assert_eq!(chosen(&[home, (VARIABLE, "")]), None);
        assert_eq!(chosen(&[]), None);
    }
}
