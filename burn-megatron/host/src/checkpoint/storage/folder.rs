//! A folder as a storage: another disk, or a file system over a network.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::Storage;

/// Keys are paths in a folder, which is made when something is put there.
#[derive(Clone, Debug)]
pub struct FolderStorage {
    root: PathBuf,
}

impl FolderStorage {
    /// The folder.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// A copy of `from` in the folder of this key, under another name.
    fn partial(&self, key: &str, from: &Path) -> io::Result<NamedTempFile> {
        let to = self.root.join(key);
        let folder = to.parent().expect("a key is below the folder");
        fs::create_dir_all(folder)?;
        let partial = NamedTempFile::new_in(folder)?;
        fs::copy(from, partial.path())?;
        partial.as_file().sync_all()?;
        Ok(partial)
    }

    /// Keys below `folder`, whose own key is `key`, that begin with `prefix`.
    fn list_into(folder: &Path, key: &str, prefix: &str, keys: &mut Vec<String>) -> io::Result<()> {
        let entries = match fs::read_dir(folder) {
            // The storage is new, or the folder has been deleted meanwhile: nothing is in it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let key = format!("{key}{name}");
            match entry.file_type()?.is_dir() {
                true if may_hold(&format!("{key}/"), prefix) => {
                    Self::list_into(&entry.path(), &format!("{key}/"), prefix, keys)?;
                }
                // Left by a copy that was interrupted.
                false if key.starts_with(prefix) && !name.starts_with('.') => keys.push(key),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Whether keys in this folder may begin with `prefix`. Other folders are not looked into: they may be another user's.
fn may_hold(folder: &str, prefix: &str) -> bool {
    folder.starts_with(prefix) || prefix.starts_with(folder)
}

impl Storage for FolderStorage {
    fn name(&self) -> String {
        self.root.display().to_string()
    }

    fn put(&self, key: &str, from: &Path) -> io::Result<()> {
        self.partial(key, from)?.persist(self.root.join(key))?;
        Ok(())
    }

    fn create(&self, key: &str, from: &Path) -> io::Result<()> {
        match self.partial(key, from)?.persist_noclobber(self.root.join(key)) {
            Ok(_) => Ok(()),
            Err(refused) if refused.error.kind() == io::ErrorKind::AlreadyExists => Err(refused.error),
            // Object stores that are mounted as folders have neither links nor names that are given to a whole file if free.
            Err(_) => {
                let mut file = fs::File::create_new(self.root.join(key))?;
                file.write_all(&fs::read(from)?)?;
                file.sync_all()
            }
        }
    }

    fn get(&self, key: &str, to: &Path) -> io::Result<()> {
        fs::copy(self.root.join(key), to).map(drop)
    }

    fn list(&self, prefix: &str) -> io::Result<Vec<String>> {
        let mut keys = Vec::new();
        Self::list_into(&self.root, "", prefix, &mut keys)?;
        keys.sort();
        Ok(keys)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        let path = self.root.join(key);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // A key has no folders of its own: the last one that is gone takes them along.
        let folders = path.ancestors().skip(1).take_while(|folder| *folder != self.root);
        folders.take_while(|folder| fs::remove_dir(folder).is_ok()).for_each(drop);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_that_may_hold_the_prefix_are_looked_into() {
        for (folder, prefix, may) in [
            ("lost+found/", "step_", false),
            ("step_00000001/", "step_", true),
            ("step_00000001/", "step_00000001/", true),
            ("step_00000002/", "step_00000001/", false),
            ("a/", "a/b/", true),
            ("a/", "", true),
        ] {
            assert_eq!(may_hold(folder, prefix), may, "{folder} for {prefix}");
        }
        let root = tempfile::tempdir().unwrap();
        let storage = FolderStorage::new(root.path().join("new"));
        assert!(storage.list("").unwrap().is_empty());
        for key in ["a/b/c", "a/d", "e", "step_1/x"] {
            storage.put(key, "Cargo.toml".as_ref()).unwrap();
        }
        assert_eq!(storage.list("").unwrap(), ["a/b/c", "a/d", "e", "step_1/x"]);
        assert_eq!(storage.list("a/b").unwrap(), ["a/b/c"]);
        assert_eq!(storage.list("s").unwrap(), ["step_1/x"]);
    }
}
