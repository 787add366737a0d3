//! What a rank knows of each logical tensor.

use super::ids::ById;
use crate::logical::{Placement, TensorState};
use burn_ir::{OperationIr, TensorId};

/// One logical tensor.
#[derive(Debug)]
pub(super) struct Entry {
    /// Where it is.
    pub state: TensorState,
    /// The rank's shard, in the inner interpreter.
    pub local: TensorId,
    /// The same tensor in other placements, so that it is gathered once however many operations read it.
    pub copies: Vec<(Vec<Placement>, TensorId)>,
    /// What it is a view of.
    pub source: Option<Source>,
}

/// The tensor of which another is a view, which may have been dropped since.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// The tensor.
    pub id: TensorId,
    /// The operation, in logical shapes.
    pub view: OperationIr,
}

/// All logical tensors of a rank.
#[derive(Default)]
pub(super) struct Table {
    entries: ById<Entry>,
}

impl Table {
    pub fn insert(&mut self, id: TensorId, state: TensorState, local: TensorId) {
        self.entries.insert(id, Entry { state, local, copies: Vec::new(), source: None });
    }

    /// # Panics
    /// If the tensor was dropped, or is another device's.
    pub fn get(&self, id: TensorId) -> &Entry {
        self.entries.get(&id).unwrap_or_else(|| panic!("{id} is no tensor of this logical device"))
    }

    pub fn try_get(&self, id: TensorId) -> Option<&Entry> {
        self.entries.get(&id)
    }

    pub fn get_mut(&mut self, id: TensorId) -> &mut Entry {
        self.entries.get_mut(&id).unwrap_or_else(|| panic!("{id} is no tensor of this logical device"))
    }

    pub fn remove(&mut self, id: TensorId) -> Option<Entry> {
        self.entries.remove(&id)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

impl Entry {
    /// The shard of the tensor in `placements`, if it has been moved there before.
    pub fn copy_in(&self, placements: &[Placement]) -> Option<TensorId> {
        self.copies.iter().find(|(at, _)| at == placements).map(|&(_, id)| id)
    }
}
