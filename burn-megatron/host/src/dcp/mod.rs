//! Folders of PyTorch's distributed checkpoints (`torch.distributed.checkpoint`, DCP), without Python.
//!
//! A folder has `.metadata`, a pickle that says which box of which tensor is where, and files `__0_0.distcp` in which every
//! box is an archive as `torch.save` writes it. Megatron-Core's `torch_dist` is such a folder with files of its own next
//! to it.

mod archive;
mod buffers;
mod flattened;
mod folder;
mod metadata;
mod node;
mod objects;
mod opcodes;
mod pickle;
mod pickler;
mod pieces;
mod unpickler;
mod writer;

use std::path::{Path, PathBuf};

use thiserror::Error;

pub use archive::{count, number};
pub use folder::{Chunk, DcpFolder, DcpTensor};
pub use metadata::METADATA;
pub use objects::DcpObjects;
pub use pickle::{Pickle, Value};
pub use pickler::Pickler;
pub use writer::DcpWriter;

/// A DCP folder that cannot be read or written.
#[derive(Debug, Error)]
#[error("{}: {}{what}", path.display(), tensor.as_ref().map(|name| format!("tensor `{name}` ")).unwrap_or_default())]
pub struct DcpError {
    /// The file.
    pub path: PathBuf,
    /// The tensor, if it is one.
    pub tensor: Option<String>,
    /// What is wrong.
    pub what: String,
}

impl DcpError {
    fn file(path: &Path, what: impl ToString) -> Self {
        Self { path: path.into(), tensor: None, what: what.to_string() }
    }

    fn tensor(path: &Path, tensor: &str, what: impl ToString) -> Self {
        Self { path: path.into(), tensor: Some(tensor.into()), what: what.to_string() }
    }
}
