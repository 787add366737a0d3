//! Files and folders, as they are and as they are certain to stay.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::Fault;

#[derive(Clone)]
pub(super) struct World {
    pub(super) nodes: Vec<Node>,
    pub(super) fault: Option<Fault>,
    pub(super) operations: usize,
    pub(super) locked: bool,
    pub(super) free: u64,
}

#[derive(Clone)]
pub(super) enum Node {
    File { now: Vec<u8>, safe: Vec<u8> },
    Folder { now: Names, safe: Names, pending: Vec<Change> },
}

pub(super) type Names = BTreeMap<String, usize>;

/// A change of the names in a folder; each is durable as a whole or not at all.
#[derive(Clone)]
pub(super) enum Change {
    Add(String, usize),
    Remove(String),
    Rename(String, String, usize),
}

impl Change {
    pub(super) fn apply(&self, names: &mut Names) {
        match self {
            Self::Add(name, node) => drop(names.insert(name.clone(), *node)),
            Self::Remove(name) => drop(names.remove(name)),
            Self::Rename(from, to, node) => {
                names.remove(from);
                names.insert(to.clone(), *node);
            }
        }
    }
}

impl Node {
    pub(super) fn folder(names: Names) -> Self {
        Self::Folder { now: names.clone(), safe: names, pending: Vec::new() }
    }
}

impl World {
    pub(super) fn find(&self, path: &Path) -> io::Result<usize> {
        path.iter().filter(|name| *name != "/" && *name != ".").try_fold(0, |node, name| match &self.nodes[node] {
            Node::Folder { now, .. } => now.get(name.to_str().unwrap()).copied().ok_or(io::ErrorKind::NotFound.into()),
            Node::File { .. } => Err(io::ErrorKind::NotADirectory.into()),
        })
    }

    /// The node of the folder that `path` is in, and the last name of `path`.
    pub(super) fn place(&self, path: &Path) -> io::Result<(usize, String)> {
        Ok((self.find(path.parent().unwrap())?, path.file_name().unwrap().to_str().unwrap().to_string()))
    }

    /// Adds an empty file and returns its node.
    pub(super) fn create_file(&mut self, path: &Path) -> io::Result<usize> {
        let (folder, name) = self.place(path)?;
        self.nodes.push(Node::File { now: Vec::new(), safe: Vec::new() });
        let node = self.nodes.len() - 1;
        self.change(folder, Change::Add(name, node));
        Ok(node)
    }

    pub(super) fn change(&mut self, folder: usize, change: Change) {
        let Node::Folder { now, pending, .. } = &mut self.nodes[folder] else { panic!("not a folder") };
        change.apply(now);
        pending.push(change);
    }

    pub(super) fn remove(&mut self, path: &Path) -> io::Result<()> {
        let (folder, name) = self.place(path)?;
        self.change(folder, Change::Remove(name));
        Ok(())
    }
}
