//! Storages by their URLs.

use std::path::Path;
use std::sync::Arc;

use super::super::error::{CheckpointError, Result};
use super::{FolderStorage, SharedStorage};

/// Schemes of object stores.
const OBJECT_STORES: [&str; 3] = ["s3://", "gs://", "az://"];

/// Whether a URL can be one of a storage, in this program or in one with the feature `object-store`; nothing is asked.
///
/// # Errors
/// If the scheme is not known, or a path is not absolute.
pub fn check_storage(url: &str) -> Result<()> {
    let refuse = |what: String| Err(CheckpointError::Option { option: "storage", value: url.into(), what });
    if OBJECT_STORES.iter().any(|scheme| url.starts_with(scheme)) {
        return Ok(());
    }
    let path = url.strip_prefix("file://").unwrap_or(url);
    match path.split_once("://") {
        Some((scheme, _)) => {
            let known = OBJECT_STORES.map(|scheme| scheme.trim_end_matches("://")).join(", ");
            refuse(format!("there is no scheme {scheme}; known are file, {known}"))
        }
        None if !Path::new(path).is_absolute() => {
            refuse("is neither a URL nor an absolute path; s3://BUCKET/FOLDER is one, /FOLDER the other".into())
        }
        None => Ok(()),
    }
}

/// The storage of a URL: `s3://BUCKET/FOLDER`, `gs://…`, `az://…` with the credentials of the environment
/// (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, …), where the crate is built with the feature `object-store`; `file:///FOLDER` or a path.
///
/// # Errors
/// If the scheme is not known, the feature is off, or the environment has no credentials.
pub fn open_storage(url: &str) -> Result<SharedStorage> {
    check_storage(url)?;
    if OBJECT_STORES.iter().any(|scheme| url.starts_with(scheme)) {
        #[cfg(feature = "object-store")]
        return super::ObjectStorage::open(url).map(|storage| SharedStorage(Arc::new(storage)));
        #[cfg(not(feature = "object-store"))]
        return Err(CheckpointError::Option {
            option: "storage",
            value: url.into(),
            what: "object stores need a build with `--features object-store`; a folder that is mounted needs none"
                .into(),
        });
    }
    Ok(SharedStorage(Arc::new(FolderStorage::new(url.strip_prefix("file://").unwrap_or(url)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheme_is_known_or_refused() {
        assert_eq!(open_storage("/mnt/copies").unwrap().0.name(), "/mnt/copies");
        assert_eq!(open_storage("file:///mnt/copies").unwrap().0.name(), "/mnt/copies");
        let refusal = |url: &str| open_storage(url).unwrap_err().to_string();
        assert!(
            refusal("ftp://host/x").starts_with("storage ftp://host/x: there is no scheme ftp; known are file, s3, gs")
        );
        assert!(refusal("copies").contains("neither a URL nor an absolute path"));
        #[cfg(not(feature = "object-store"))]
        assert!(refusal("s3://bucket/run").contains("--features object-store"));
    }
}
