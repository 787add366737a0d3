//! Checkpoints: the tensors and the state of a run on disk, in a form that no layout owns.
//!
//! A [`Saver`] writes them, a [`Checkpoint`] reads them. Both deal in boxes of global tensors only: a tensor that two
//! ranks saved in halves is read whole, in quarters or split along another dimension.
//!
//! ```text
//! ROOT/
//!   latest                       the checkpoint to resume from: step_00000200
//!   step_00000200/
//!     manifest.json              the state of the run; every tensor with its shape, type, slices and files
//!     rank_00000.safetensors     the slices that the first writer had, and so on
//!     rank_00001.safetensors
//!     tokenizer.json             if the run has one
//!     SHA256SUMS                 of all of them
//!   .lock                        held by the run that saves here
//!   .step_00000300.tmp/          being written, or left by a run that was killed; the next run removes it
//! ```
//!
//! `sha256sum -c SHA256SUMS` checks a checkpoint, and any reader of safetensors opens its files. In Python:
//!
//! ```python
//! from safetensors import safe_open
//! with safe_open("step_00000200/rank_00000.safetensors", "np") as file:
//!     print({key: file.get_tensor(key).shape for key in file.keys()})
//! ```
//!
//! A key is the kind of a tensor, its global name, and the box if it is not the whole tensor:
//! `exp_avg/layers.0.attention.q_proj.weight[0:512,0:1024]`.
//!
//! **What is promised.** A save is written to a temporary folder, made durable, renamed, and only then named by
//! `latest`. A process that is killed or a machine that loses power at any point leaves the previous checkpoint or the
//! new one, whole; a save that fails says why and leaves the previous one. A deleted checkpoint loses its name before
//! its files. A checkpoint that is opened has all its files and every element of every tensor, or the error names what
//! is missing.

mod clean;
mod commit;
mod disk;
mod error;
mod hashes;
mod lock;
mod manifest;
mod names;
mod pace;
mod reader;
mod rehearsal;
mod retention;
mod saver;
mod shard;
mod slice;
mod state;
mod storage;
#[cfg(test)]
mod tests;

use crate::boxes;
pub use error::{CheckpointError, Result};
#[doc(hidden)]
pub use lock::lock_output;
pub use manifest::{SavedFile, SavedSlice, SavedTensor};
#[doc(hidden)]
pub use pace::Pace;
pub use pace::SaveEvery;
pub use reader::Checkpoint;
pub use saver::{Channel, Peers, SaveReport, Saver, SaverOptions};
pub use slice::{Copied, Kind, Slice, SliceData};
pub use state::RunState;
#[cfg(feature = "object-store")]
pub use storage::ObjectStorage;
pub use storage::{
    CopyReport, FolderStorage, SharedStorage, Storage, check_storage, fetch, open_storage, stored_steps, upload,
};
