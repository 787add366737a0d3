//! A disk in memory, for tests: an operation can fail, the process can be killed before it, and a power cut can come,
//! in which everything that was not made durable may be lost.

mod loss;
mod world;

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::{Disk, DiskFile, Entry};
pub(in super::super) use loss::Loss;
use world::{Change, Names, Node, World};

/// What happens at an operation, counted from 0. Writes get half done first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum Fault {
    /// It returns this error; what follows works.
    Fail(usize, io::ErrorKind),
    /// The process ends; nothing that follows has an effect.
    Kill(usize),
}

/// A folder tree and its history since it was last durable. Clones are the same disk.
#[derive(Clone)]
pub(in super::super) struct SimDisk(Arc<Mutex<World>>);

/// See [`SimDisk::tree`].
pub(in super::super) type Tree = BTreeMap<String, Option<Vec<u8>>>;

impl SimDisk {
    /// An empty disk.
    pub fn new() -> Self {
        let nodes = vec![Node::folder(Names::new())];
        Self(Arc::new(Mutex::new(World { nodes, fault: None, operations: 0, locked: false, free: u64::MAX })))
    }

    /// An independent copy with a fault to come; the count of operations starts at 0.
    pub fn fork(&self, fault: Option<Fault>) -> Self {
        let world = World { fault, operations: 0, locked: false, ..self.world().clone() };
        Self(Arc::new(Mutex::new(world)))
    }

    /// The disk as the next process finds it.
    pub fn restart(&self, loss: Loss) -> Self {
        let world = self.world();
        let nodes = loss::survivors(&world.nodes, loss);
        Self(Arc::new(Mutex::new(World { nodes, fault: None, operations: 0, locked: false, free: world.free })))
    }

    /// Bytes that are reported as free.
    pub fn set_free_space(&self, free: u64) {
        self.world().free = free;
    }

    /// A fault from now on, counted from now.
    pub fn set_fault(&self, fault: Option<Fault>) {
        let mut world = self.world();
        (world.fault, world.operations) = (fault, 0);
    }

    /// Operations since the start, a fork or the choice of a fault.
    pub fn operations(&self) -> usize {
        self.world().operations
    }

    /// Every path with the contents of the file, or `None` for a folder.
    pub fn tree(&self) -> Tree {
        fn add(world: &World, node: usize, path: String, tree: &mut Tree) {
            match &world.nodes[node] {
                Node::File { now, .. } => drop(tree.insert(path, Some(now.clone()))),
                Node::Folder { now, .. } => {
                    now.iter().for_each(|(name, &node)| add(world, node, format!("{path}/{name}"), tree));
                    tree.insert(path, None);
                }
            }
        }
        let mut tree = Tree::new();
        add(&self.world(), 0, String::new(), &mut tree);
        tree
    }

    /// Copies everything, as it is now, to a folder of the real disk.
    pub fn export(&self, folder: &Path) {
        fn write(world: &World, node: usize, path: &Path) {
            match &world.nodes[node] {
                Node::File { now, .. } => fs::write(path, now).unwrap(),
                Node::Folder { now, .. } => {
                    fs::create_dir_all(path).unwrap();
                    now.iter().for_each(|(name, &node)| write(world, node, &path.join(name)));
                }
            }
        }
        write(&self.world(), 0, folder);
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock()
    }

    /// Counts an operation and lets the fault happen; `half` is what is done even then.
    fn begin(&self, half: impl FnOnce(&mut World)) -> io::Result<MutexGuard<'_, World>> {
        let mut world = self.world();
        let operation = world.operations;
        world.operations += 1;
        match world.fault {
            Some(Fault::Kill(at)) if operation >= at => {
                if operation == at {
                    half(&mut world);
                }
                Err(io::Error::other("killed"))
            }
            Some(Fault::Fail(at, kind)) if operation == at => {
                half(&mut world);
                Err(kind.into())
            }
            _ => Ok(world),
        }
    }
}

impl Disk for SimDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mut world = self.begin(|_| {})?;
        if world.find(path).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let (folder, name) = world.place(path)?;
        world.nodes.push(Node::folder(Names::new()));
        let node = world.nodes.len() - 1;
        world.change(folder, Change::Add(name, node));
        Ok(())
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut world = self.begin(|_| {})?;
        if world.find(path).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let node = world.create_file(path)?;
        Ok(Box::new(SimFile { disk: self.clone(), node }))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let mut world = self.begin(|_| {})?;
        let node = world.find(path)?;
        let Node::Folder { now, safe, pending } = &mut world.nodes[node] else { panic!("not a folder") };
        *safe = now.clone();
        pending.clear();
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut world = self.begin(|_| {})?;
        let node = world.find(from)?;
        let ((folder, from), (target, to)) = (world.place(from)?, world.place(to)?);
        assert_eq!(folder, target, "renaming is within a folder");
        let Node::Folder { now, .. } = &world.nodes[folder] else { panic!("not a folder") };
        if let Some(&old) = now.get(&to)
            && matches!(&world.nodes[old], Node::Folder { now, .. } if !now.is_empty())
        {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        world.change(folder, Change::Rename(from, to, node));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut world = self.begin(|_| {})?;
        world.find(path)?;
        world.remove(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let mut world = self.begin(|_| {})?;
        let node = world.find(path)?;
        match &world.nodes[node] {
            Node::Folder { now, .. } if !now.is_empty() => Err(io::ErrorKind::DirectoryNotEmpty.into()),
            _ => world.remove(path),
        }
    }

    fn is_link(&self, path: &Path) -> io::Result<bool> {
        self.begin(|_| {})?.find(path).map(|_| false)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>> {
        let world = self.begin(|_| {})?;
        let Node::Folder { now, .. } = &world.nodes[world.find(folder)?] else {
            return Err(io::ErrorKind::NotADirectory.into());
        };
        let is_folder = |node: usize| matches!(world.nodes[node], Node::Folder { .. });
        Ok(now.iter().map(|(name, &node)| Entry { name: name.clone(), is_folder: is_folder(node) }).collect())
    }

    fn size(&self, path: &Path) -> io::Result<u64> {
        Ok(self.read(path)?.len() as u64)
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let world = self.begin(|_| {})?;
        match &world.nodes[world.find(path)?] {
            Node::File { now, .. } => Ok(now.clone()),
            Node::Folder { .. } => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    fn free_space(&self, _folder: &Path) -> io::Result<u64> {
        Ok(self.begin(|_| {})?.free)
    }

    fn lock(&self, path: &Path, text: &str) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let mut world = self.begin(|_| {})?;
        if world.locked {
            return Ok(None);
        }
        let node = match world.find(path) {
            Ok(node) => node,
            Err(_) => world.create_file(path)?,
        };
        world.locked = true;
        drop(world);
        let (lock, mut file) = (SimLock(self.clone()), SimFile { disk: self.clone(), node });
        file.empty();
        file.write(text.as_bytes())?;
        Ok(Some(Box::new(lock)))
    }
}

struct SimFile {
    disk: SimDisk,
    node: usize,
}

impl SimFile {
    fn empty(&self) {
        let Node::File { now, .. } = &mut self.disk.world().nodes[self.node] else { panic!("not a file") };
        now.clear();
    }

    fn append(&self, world: &mut World, bytes: &[u8]) {
        let Node::File { now, .. } = &mut world.nodes[self.node] else { panic!("not a file") };
        now.extend_from_slice(bytes);
    }
}

impl DiskFile for SimFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut world = self.disk.begin(|world| self.append(world, &bytes[..bytes.len() / 2]))?;
        self.append(&mut world, bytes);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut world = self.disk.begin(|_| {})?;
        let Node::File { now, safe } = &mut world.nodes[self.node] else { panic!("not a file") };
        *safe = now.clone();
        Ok(())
    }
}

struct SimLock(SimDisk);

impl Drop for SimLock {
    fn drop(&mut self) {
        self.0.world().locked = false;
    }
}
