//! A folder as a storage: another disk, or a file system over a network.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

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

    /// Keys below `folder`, whose own key is `prefix`.
    fn list_into(folder: &Path, prefix: &str, keys: &mut Vec<String>) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            match entry.file_type()?.is_dir() {
                true => Self::list_into(&entry.path(), &format!("{prefix}{name}/"), keys)?,
                // Left by a copy that was interrupted.
                false if name.starts_with('.') => {}
                false => keys.push(format!("{prefix}{name}")),
            }
        }
        Ok(())
    }
}

impl Storage for FolderStorage {
    fn name(&self) -> String {
        self.root.display().to_string()
    }

    fn put(&self, key: &str, from: &Path) -> io::Result<()> {
        let to = self.root.join(key);
        let folder = to.parent().expect("a key is below the folder");
        fs::create_dir_all(folder)?;
        let partial = tempfile::NamedTempFile::new_in(folder)?;
        fs::copy(from, partial.path())?;
        partial.as_file().sync_all()?;
        partial.persist(to)?;
        Ok(())
    }

    fn get(&self, key: &str, to: &Path) -> io::Result<()> {
        fs::copy(self.root.join(key), to).map(drop)
    }

    fn list(&self, prefix: &str) -> io::Result<Vec<String>> {
        let mut keys = Vec::new();
        match Self::list_into(&self.root, "", &mut keys) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            listed => listed?,
        }
        keys.retain(|key| key.starts_with(prefix));
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
