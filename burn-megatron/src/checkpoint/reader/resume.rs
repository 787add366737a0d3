//! What a resumed run asks of a checkpoint.

use std::ops::Range;
use std::path::Path;

use super::super::disk::{Files, RealDisk};
use super::super::error::CheckpointError;
use super::super::names::step_name;
use super::super::{Kind, commit, retention};
use super::Checkpoint;
use crate::element::Element;

impl Checkpoint {
    /// Opens the checkpoint of a step in a folder of checkpoints.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn of_step(root: impl AsRef<Path>, step: u64) -> Result<Self, CheckpointError> {
        Self::open(root.as_ref().join(step_name(step)))
    }

    /// Deletes the checkpoint of a step in a folder of checkpoints, if it is there and is not the one that `latest`
    /// names. A deletion that is interrupted leaves no half checkpoint. While a run saves to the folder, ask its
    /// [`Saver`](crate::checkpoint::Saver::retire) instead.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn delete(root: impl AsRef<Path>, step: u64) -> Result<(), CheckpointError> {
        let (files, root) = (Files::new(RealDisk), root.as_ref());
        let there = retention::steps(&files, root)?.contains(&step) && commit::latest(&files, root)? != Some(step);
        if there { retention::delete(&files, root, &[step]) } else { Ok(()) }
    }

    /// The kind that holds the weights most precisely.
    pub fn weights(&self) -> Kind {
        match self.tensors().iter().any(|tensor| matches!(tensor.kind, Kind::Master | Kind::Remainder)) {
            true => Kind::Master,
            false => Kind::Weight,
        }
    }

    /// Whether there is a tensor of this kind, name and shape.
    ///
    /// # Errors
    /// If it is not there or has another shape.
    pub fn check(&self, kind: Kind, name: &str, shape: &[usize]) -> Result<(), CheckpointError> {
        let nothing: Vec<Range<usize>> = shape.iter().map(|_| 0..0).collect();
        self.read_f64(kind, name, shape, &nothing).map(drop)
    }

    /// The box `ranges` of a tensor of floats.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], and if the elements are not floats.
    ///
    /// # Panics
    /// If `ranges` is not inside `shape`.
    pub fn read_f64(
        &self,
        kind: Kind,
        name: &str,
        shape: &[usize],
        ranges: &[Range<usize>],
    ) -> Result<Vec<f64>, CheckpointError> {
        let (dtype, bytes) = self.read(kind, name, shape, ranges)?;
        let (path, name) = (self.path.clone(), name.to_string());
        Element::of(dtype).map(|element| element.decode(&bytes)).ok_or(CheckpointError::Dtype {
            path,
            kind,
            name,
            saved: dtype,
        })
    }
}
