//! Checkpoints: the tensors and the state of a run on disk, in a form that no layout owns.

mod boxes;
mod clean;
mod commit;
mod disk;
mod error;
mod manifest;
mod names;
mod part;
mod reader;
mod rehearsal;
mod retention;
mod saver;
mod slice;
mod state;
#[cfg(test)]
mod tests;

pub use error::CheckpointError;
pub use manifest::{SavedFile, SavedSlice, SavedTensor};
pub use reader::Checkpoint;
pub use saver::{SaveReport, Saver, SaverOptions};
pub use slice::{Kind, Slice};
pub use state::RunState;
