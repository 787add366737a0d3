//! A checkpoint that was never written.

use std::collections::HashMap;
use std::path::PathBuf;

use super::super::error::Result;
use super::super::manifest::{Manifest, SavedTensor, Shard};
use super::super::{Kind, RunState, Slice};
use super::shards::ShardFiles;
use super::{Checkpoint, Located};

/// What its path and files are called in messages.
const NAME: &str = "memory";

impl Checkpoint {
    /// The slices that all ranks have handed over after a step, for a run to continue from.
    ///
    /// # Errors
    /// If they overlap or leave something out.
    #[doc(hidden)]
    pub fn in_memory(state: RunState, slices: Vec<Slice>) -> Result<Self> {
        let path = PathBuf::from(NAME);
        let mut shards = ShardFiles::new(&path);
        let (mut saved, mut starts) = (Vec::new(), HashMap::<(Kind, String), Vec<(usize, u64)>>::new());
        for slice in slices.into_iter().filter(|slice| !slice.data.is_empty()) {
            saved.push(SavedTensor::of_slice(&slice, NAME));
            starts.entry((slice.kind, slice.name)).or_default().push((shards.keep(slice.data), 0));
        }
        // The slices of a tensor stay in this order.
        let manifest = Manifest::new(&path, state, None, vec![Shard { file: None, tensors: saved }])?;
        let located = manifest.tensors.iter().enumerate().map(|(index, tensor)| {
            let key = (tensor.kind, tensor.name.clone());
            let starts = starts.remove(&key).unwrap_or_default();
            (key, Located { index, starts })
        });
        let tensors = located.collect();
        Ok(Self { path, manifest, shards, tensors, warning: None })
    }
}
