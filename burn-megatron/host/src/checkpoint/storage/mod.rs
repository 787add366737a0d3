//! Where copies of checkpoints go: another folder, or an object store.
//!
//! A run saves to its folder, and a [`Storage`] gets a copy of what is complete there: the folder keeps the promises of a
//! save, and training never waits for a network. [`upload`] and [`fetch`] are the whole protocol:
//!
//! ```text
//! step_00000200/manifest.json   as in the folder of checkpoints, in any order
//! step_00000200/…
//! step_00000200/SHA256SUMS      last: a checkpoint that has it is complete
//! latest                        the newest one: step_00000200
//! owner                         the run whose copies these are
//! ```

mod copier;
mod copy;
mod folder;
#[cfg(feature = "object-store")]
mod object_store;
mod owner;
mod url;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::error::CheckpointError;
pub(super) use copier::Copier;
pub use copier::CopyReport;
pub use copy::{fetch, stored_steps, upload};
pub use folder::FolderStorage;
#[cfg(feature = "object-store")]
pub use object_store::ObjectStorage;
pub(super) use owner::claim;
pub use url::{check_storage, open_storage};

/// A place for copies of checkpoints. Keys are names joined by `/`, without one in front. What is put takes the place of
/// what has the same key, whole or not at all. Errors name what was refused; a key that is not there is
/// [`NotFound`](io::ErrorKind::NotFound).
///
/// ```
/// use host::checkpoint::{FolderStorage, Storage};
///
/// let folder = tempfile::tempdir()?;
/// let storage = FolderStorage::new(folder.path());
/// storage.put("step_00000200/manifest.json", "Cargo.toml".as_ref())?;
/// assert_eq!(storage.list("step_")?, ["step_00000200/manifest.json"]);
/// # Ok::<(), std::io::Error>(())
/// ```
pub trait Storage: Send + Sync {
    /// What people call it: a URL or a path.
    fn name(&self) -> String;

    /// Copies the file `from` to `key`.
    ///
    /// # Errors
    /// If the file cannot be read, or the storage refuses.
    fn put(&self, key: &str, from: &Path) -> io::Result<()>;

    /// Copies the small file `from` to `key`, unless something has this key: of several that do so at the same time one
    /// succeeds.
    ///
    /// # Errors
    /// [`AlreadyExists`](io::ErrorKind::AlreadyExists) if something has it; as [`put`](Self::put).
    fn create(&self, key: &str, from: &Path) -> io::Result<()>;

    /// Copies what has this key to the new file `to`.
    ///
    /// # Errors
    /// If there is no such key, the storage refuses, or the file cannot be written.
    fn get(&self, key: &str, to: &Path) -> io::Result<()>;

    /// All keys that begin with `prefix`, in order.
    ///
    /// # Errors
    /// If the storage refuses.
    fn list(&self, prefix: &str) -> io::Result<Vec<String>>;

    /// Removes what has this key, if there is one.
    ///
    /// # Errors
    /// If the storage refuses.
    fn delete(&self, key: &str) -> io::Result<()>;
}

/// What a storage refuses to do with a key.
fn refused<'a>(
    storage: &'a dyn Storage,
    action: &'static str,
    key: &'a str,
) -> impl Fn(io::Error) -> CheckpointError + 'a {
    move |cause| CheckpointError::Storage {
        action,
        what: format!("{key} {} {}", if action == "read" { "from" } else { "in" }, storage.name()),
        cause: Arc::new(cause),
    }
}

/// A [`Storage`] that several hold. Two are equal if they have one name.
#[derive(Clone)]
pub struct SharedStorage(pub Arc<dyn Storage>);

impl fmt::Debug for SharedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedStorage({:?})", self.0.name())
    }
}

impl PartialEq for SharedStorage {
    fn eq(&self, other: &Self) -> bool {
        self.0.name() == other.0.name()
    }
}

impl Eq for SharedStorage {}
