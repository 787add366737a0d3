//! What a rank does with its share of a tensor apart from operations: collectives with ranks that have other tensors,
//! names for shares, and sequence parallelism.

use super::Interpreter;
use crate::logical::Placement::{self, Replicate};
use crate::logical::TensorState;
use crate::mesh_backend::inner::Inner;
use crate::mesh_backend::reshard::run_collective;
use burn_ir::{HandleKind, OperationIr, TensorId, TensorIr, TensorStatus};
use parking_lot::Mutex;
use ranks::collective_ops::Collective;
use std::collections::HashMap;
use std::sync::Arc;

impl<B: Inner> Interpreter<B> {
    /// What the caller runs without a lock for a collective on the rank's share of `x` over the group of this name.
    pub(super) fn start_across(
        &mut self,
        (x, half): (TensorIr, bool),
        out: TensorId,
        what: Collective,
        group: &str,
    ) -> Box<dyn FnOnce() + Send> {
        let groups = || self.groups.iter().chain(&self.across);
        let names = || groups().map(|group| group.name()).collect::<Vec<_>>();
        let found = groups().find(|candidate| candidate.name() == group).cloned();
        let found = found.unwrap_or_else(|| panic!("{what:?} over {group}: the device has the groups {:?}", names()));
        let state = self.table.get(x.id).state.clone();
        let (handle, is_half) = self.share(&x, half);
        let arrivals = self.arrivals.clone();
        Box::new(move || {
            let result = run_collective(handle, what, &found);
            arrivals.0.lock().insert(out, (result, is_half, state));
        })
    }

    /// Names what a collective has given.
    pub(super) fn end_across(&mut self, out: TensorId) {
        let (handle, is_half, state) = self.arrivals.0.lock().remove(&out).expect("a collective has run");
        self.executor.register_stored(out, handle, is_half);
        self.table.insert(out, state, out);
    }

    /// What the rank holds of `x`, and whether that is in half precision, as it also is if autocast computes with that and
    /// it is enough.
    pub(super) fn share(&mut self, x: &TensorIr, half: bool) -> (HandleKind<B>, bool) {
        let entry = self.table.get(x.id);
        let shape = self.shape_here(&x.shape, &entry.state.at);
        let x = TensorIr { id: entry.local, shape, status: TensorStatus::ReadOnly, dtype: x.dtype };
        if half { self.executor.halved(&x) } else { self.executor.stored(&x) }
    }

    /// Moves a tensor, which remains the same tensor.
    pub(super) fn place_for_good(&mut self, x: &TensorIr, at: Vec<Placement>) {
        let Some(entry) = self.table.try_get(x.id) else { return };
        let (from, shard) = (entry.state.at.clone(), entry.local);
        if from == at {
            return;
        }
        let id =
            self.moved(&TensorIr { status: TensorStatus::ReadWrite, ..x.clone() }, shard, (&from, &at), true, false);
        let entry = self.table.get_mut(x.id);
        (entry.local, entry.state.at) = (id, at);
    }

    /// What a read of another rank asks of this one.
    pub(super) fn take_part(&mut self, x: TensorIr) {
        let is_consumed = x.status == TensorStatus::ReadWrite;
        let local = self.place(&x, &vec![Replicate; self.axes.len()], is_consumed, false);
        // As the reader does, so that all ranks store alike what comes after it.
        self.executor.settle(local.id);
        if local.is_temporary {
            self.drop_local(local.id);
        }
        if is_consumed {
            self.drop_tensor_but(x.id, local.id);
        }
    }

    /// Forgets a consumed tensor, whose share is `local` or has gone.
    fn drop_tensor_but(&mut self, id: TensorId, local: TensorId) {
        let Some(mut entry) = self.table.remove(id) else { return };
        if entry.local == local {
            self.drop_local(local);
        } else if entry.copies.iter().any(|(_, copy)| *copy == local) {
            entry.copies.retain(|(_, copy)| *copy != local);
            self.drop_local(local);
        }
        self.drop_copies(entry);
    }

    /// Under sequence parallelism: shards what comes out of a table along the sequence, as the layers after it want it.
    pub(super) fn shard_sequence(&mut self, op: &OperationIr) {
        let Some((out, to)) = self.axes.first().and_then(|axis| self.homes.of_embedding(op, axis.ranks)) else {
            return;
        };
        let mut at = self.table.get(out.id).state.at.clone();
        at[0] = to;
        self.place_for_good(&out, at);
    }
}

/// What collectives have given, by the tensor to be.
pub(super) struct Arrivals<B: Inner>(Arc<Mutex<ByTensor<B>>>);

type ByTensor<B> = HashMap<TensorId, (HandleKind<B>, bool, TensorState)>;

impl<B: Inner> Default for Arrivals<B> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<B: Inner> Clone for Arrivals<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}
