//! What a rank knows of each logical tensor.

use super::ids::ById;
use crate::logical::Placement::{self, Partial};
use crate::logical::TensorState;
use burn::tensor::{DType, Shape};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};

/// One logical tensor.
#[derive(Debug)]
pub(super) struct Entry {
    /// Where it is.
    pub state: TensorState,
    /// The rank's shard, in the inner interpreter.
    pub local: TensorId,
    /// The same tensor in other placements, so that it is gathered once however many operations read it.
    pub copies: Vec<(Vec<Placement>, TensorId)>,
    /// What it is a view of; apart, because an operation is large and most tensors are no such view.
    pub source: Option<Box<Source>>,
    /// Its shape and type, if an operation made it.
    described: Option<(Shape, DType)>,
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
        self.entries.insert(id, Entry { state, local, copies: Vec::new(), source: None, described: None });
    }

    /// Notes shape and type of a tensor.
    pub fn describe(&mut self, x: &TensorIr) {
        self.get_mut(x.id).described = Some((x.shape.clone(), x.dtype));
    }

    /// The tensors that operations made, from `id` on, that are not whole on every rank.
    pub fn since(&self, id: TensorId) -> impl Iterator<Item = TensorIr> {
        let is_distributed = |entry: &Entry| entry.state.at.iter().any(|at| at.is_shard() || *at == Partial);
        let entries =
            self.entries.iter().filter(move |(other, entry)| other.value() >= id.value() && is_distributed(entry));
        entries.filter_map(|(&id, entry)| {
            let (shape, dtype) = entry.described.clone()?;
            Some(TensorIr { id, shape, dtype, status: TensorStatus::ReadOnly })
        })
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

    /// Where every tensor is.
    pub fn states(&self) -> ById<TensorState> {
        self.entries.iter().map(|(&id, entry)| (id, entry.state.clone())).collect()
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

impl Entry {
    /// The shards of the tensor in `placements`, where it has been moved before.
    pub fn copies_in(&self, placements: &[Placement]) -> impl Iterator<Item = TensorId> {
        self.copies.iter().filter(move |(at, _)| at == placements).map(|&(_, id)| id)
    }
}
