//! What a resumed run asks of a checkpoint.

use std::ops::Range;
use std::path::{Path, PathBuf};

use layouts::shard::HostFloats;

use super::super::disk::{Files, RealDisk};
use super::super::error::{CheckpointError, Result};
use super::super::names::step_name;
use super::super::{Kind, boxes, commit, retention};
use super::Checkpoint;
use crate::element::Element;

impl Checkpoint {
    /// Opens the checkpoint of a step in a folder of checkpoints.
    pub fn of_step(root: impl AsRef<Path>, step: u64) -> Result<Self> {
        Self::open(Self::folder_of(root, step))
    }

    /// Where the checkpoint of a step is in a folder of checkpoints, if it is there.
    #[doc(hidden)]
    pub fn folder_of(root: impl AsRef<Path>, step: u64) -> PathBuf {
        root.as_ref().join(step_name(step))
    }

    /// Deletes the checkpoint of a step in a folder of checkpoints, if it is there and is not the one that `latest`
    /// names. A deletion that is interrupted leaves no half checkpoint. While a run saves to the folder, ask its
    /// [`Saver`](crate::checkpoint::Saver::retire) instead.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn delete(root: impl AsRef<Path>, step: u64) -> Result<()> {
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
    pub fn check(&self, kind: Kind, name: &str, shape: &[usize]) -> Result<()> {
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
    pub fn read_f64(&self, kind: Kind, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>> {
        self.read_floats(kind, name, shape, ranges).map(HostFloats::into_f64)
    }

    /// The same in the type in which the values are stored.
    ///
    /// # Panics
    /// If `ranges` is not inside `shape`.
    pub fn read_floats(&self, kind: Kind, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<HostFloats> {
        if self.is_joined(kind, name) {
            let (_, bytes) = self.joined(name, shape, ranges)?;
            let mut values = Element::F32.zeros(boxes::len(ranges));
            values.bytes_mut().copy_from_slice(&bytes);
            return Ok(values);
        }
        if let Some(values) = self.decoded(kind, name, shape, ranges)? {
            return Ok(HostFloats::F32(values));
        }
        let located = self.locate(kind, name, shape, ranges)?;
        let saved = self.tensors()[located.index].dtype;
        let Some(element) = Element::of(saved) else {
            return Err(CheckpointError::Dtype { path: self.path.clone(), kind, name: name.into(), saved });
        };
        let mut values = element.zeros(boxes::len(ranges));
        self.fill(located, ranges, values.bytes_mut())?;
        Ok(values)
    }
}
