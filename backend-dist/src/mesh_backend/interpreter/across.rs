//! What a rank does with its share of a tensor apart from operations: collectives with ranks that have other tensors,
//! names for shares, and sequence parallelism.

use super::Interpreter;
use super::complete::float;
use crate::logical::Placement::{self, Replicate};
use crate::mesh_backend::across::{Across, Part};
use crate::{logical::TensorState, mesh_backend::inner::Inner, mesh_backend::reshard::run_collective};
use burn::tensor::Shape;
use burn_ir::{HandleKind, OperationIr, TensorId, TensorIr, TensorStatus};
use parking_lot::Mutex;
use ranks::collective_ops::Collective;
use ranks::comm::{Group, ReduceOp};
use std::collections::HashMap;
use std::sync::Arc;

impl<B: Inner> Interpreter<B> {
    /// What the caller runs without a lock for collectives with ranks that have other tensors.
    pub(super) fn start_across(&mut self, across: Across) -> Box<dyn FnOnce() + Send> {
        let Across { parts, group, mean, is_async } = across;
        let groups = || self.groups.iter().chain(&self.across);
        let names = || groups().map(|group| group.name()).collect::<Vec<_>>().join(", ");
        let found = groups().find(|candidate| candidate.name() == group).cloned();
        let group = found.unwrap_or_else(|| {
            panic!(
                "collectives over {group}: the device knows the axes {}; nearest legal: `Teams` with `.across(..)` this axis, or a \
                 logical device along {group} too",
                names()
            )
        });
        let is_async = is_async && B::is_async(&group);
        let (mut sources, mut arriving) = (Vec::new(), Vec::new());
        for Part { x, out, shape, what, half } in parts {
            let state = self.table.get(x.id).state.clone();
            let receives = matches!(what, Collective::Broadcast(root) if root != group.rank());
            let (source, is_half) = match is_async && receives {
                true => {
                    let half = self.executor.half_of(&x).filter(|_| half);
                    let dtype = half.unwrap_or(x.dtype);
                    (HandleKind::Float(B::float_empty(shape, &self.device, dtype.into())), half.is_some())
                }
                false => {
                    let (source, is_half) = self.share(&x, half);
                    (if x.shape == shape { source } else { expanded(source, shape) }, is_half)
                }
            };
            sources.push((source, what));
            arriving.push((out, is_half, state));
        }
        let arrivals = self.arrivals.clone();
        Box::new(move || {
            let results = match is_async {
                true => {
                    let floats = sources.into_iter().map(|(source, what)| (float(source), what)).collect();
                    let (results, pending) = B::begin_async(floats, mean, &group);
                    arrivals.0.lock().in_flight.insert(arriving[0].0, pending);
                    results.into_iter().map(HandleKind::Float).collect()
                }
                false => {
                    sources.into_iter().map(|(source, what)| waited_for(source, what, mean, &group)).collect::<Vec<_>>()
                }
            };
            let mut arrivals = arrivals.0.lock();
            for ((out, is_half, state), result) in arriving.into_iter().zip(results) {
                arrivals.tensors.insert(out, (result, is_half, state));
            }
        })
    }

    /// Names what collectives have given.
    pub(super) fn end_across(&mut self, outs: &[TensorId]) {
        for &out in outs {
            let arrived = self.arrivals.0.lock().tensors.remove(&out);
            let (handle, is_half, state) = arrived.expect("a collective has run");
            self.executor.register_stored(out, handle, is_half);
            self.table.insert(out, state, out);
        }
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
        self.executor.settle_for_read(local.id);
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

    /// Under sequence parallelism: shards what comes out of a table by tokens, as the layers after it want it.
    pub(super) fn shard_tokens(&mut self, op: &OperationIr) {
        let Some((out, to)) = self.axes.first().and_then(|axis| self.homes.of_embedding(op, axis.ranks)) else {
            return;
        };
        let mut at = self.table.get(out.id).state.at.clone();
        at[0] = to;
        self.place_for_good(&out, at);
    }
}

/// A collective that is waited for; with `mean`, a sum is divided by the number of members.
fn waited_for<B: Inner>(x: HandleKind<B>, what: Collective, mean: bool, group: &Group) -> HandleKind<B> {
    let is_sum = match what {
        Collective::AllReduce(op) => op == ReduceOp::Sum,
        Collective::Reduce(root) => root == group.rank(),
        _ => false,
    };
    let result = run_collective(x, what, group);
    if !(mean && is_sum) {
        return result;
    }
    HandleKind::Float(B::float_div_scalar(float(result), (group.size() as f64).into()))
}

fn expanded<B: Inner>(x: HandleKind<B>, shape: Shape) -> HandleKind<B> {
    HandleKind::Float(B::float_expand(float(x), shape))
}

/// What collectives have given.
pub(super) struct Arrivals<B: Inner>(Arc<Mutex<Arrived<B>>>);

struct Arrived<B: Inner> {
    /// By the tensor to be.
    tensors: HashMap<TensorId, (HandleKind<B>, bool, TensorState)>,
    /// By their first tensor; what is dropped is waited for.
    in_flight: HashMap<TensorId, Box<dyn Send>>,
}

impl<B: Inner> Arrivals<B> {
    /// What runs from now on comes after the collectives whose first output this is.
    pub fn wait(&self, first: TensorId) {
        let pending = self.0.lock().in_flight.remove(&first);
        drop(pending);
    }
}

impl<B: Inner> Default for Arrivals<B> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Arrived { tensors: HashMap::new(), in_flight: HashMap::new() })))
    }
}

impl<B: Inner> Clone for Arrivals<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}
