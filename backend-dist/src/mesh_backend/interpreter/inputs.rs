//! Brings the inputs of an operation to where it needs them.

use super::Interpreter;
use crate::logical::Placement::{self, Partial, Replicate, Shard};
use crate::mesh_backend::reshard::{bytes, lone_collective, name, reshard};
use crate::mesh_backend::{executor::Generated, inner::Inner, table::Table};
use burn::tensor::Shape;
use burn_ir::{HandleKind, IrVisitorMut, TensorId, TensorIr, TensorStatus};
use kernels_cubecl::fused::Part;
use ranks::collective_ops::Collective;

/// An input as the inner interpreter knows it.
#[derive(Clone, Copy)]
pub(super) struct Local {
    pub id: TensorId,
    /// Whether it is dropped after the operation.
    pub is_temporary: bool,
    /// Whether the logical tensor is.
    pub is_consumed: bool,
}

/// Points inputs that are replicated at what the rank holds of them.
pub(super) struct Locals<'a>(pub &'a Table);

impl IrVisitorMut for Locals<'_> {
    fn visit_tensor_mut(&mut self, x: &mut TensorIr) {
        if x.status != TensorStatus::NotInit {
            x.id = self.0.get(x.id).local;
        }
    }
}

impl<B: Inner> Interpreter<B> {
    /// What the rank holds of `x` in the placements `wanted`. If the operation consumes `x`, its present shard is gone
    /// after a move; otherwise it, or the copy, remains for others. With `half`, half precision is enough, so that no more
    /// than that is gathered.
    pub(super) fn place(&mut self, x: &TensorIr, wanted: &[Placement], is_consumed: bool, half: bool) -> Local {
        let entry = self.table.get(x.id);
        if entry.state.at == wanted {
            return Local { id: entry.local, is_temporary: false, is_consumed };
        }
        let is_exact = |copy| !self.executor.is_half(copy) || self.executor.is_half(entry.local);
        let copy = entry.copies_in(wanted).find(|&copy| half || is_exact(copy));
        if let Some(id) = copy {
            if is_consumed {
                let shard = entry.local;
                self.drop_local(shard);
            }
            return Local { id, is_temporary: false, is_consumed };
        }
        let (from, shard, is_weight) = (entry.state.at.clone(), entry.local, entry.state.weight);
        let is_whole = wanted.iter().all(|at| *at == Replicate);
        // The sum of shares in half precision would be less exact than they are.
        let is_gathered = |(from, to): (&Placement, &Placement)| from == to || (from.is_shard() && *to == Replicate);
        let half = half && from.iter().zip(wanted).all(is_gathered);
        let id = match if is_whole { self.whole_from_source(x.id, half) } else { None } {
            Some(id) => {
                if is_consumed {
                    self.drop_local(shard);
                }
                id
            }
            None => self.moved(x, shard, (&from, wanted), is_consumed, half),
        };
        if is_consumed {
            return Local { id, is_temporary: true, is_consumed };
        }
        let changed = || from.iter().zip(wanted).filter(|(from, to)| from != to);
        if changed().all(|(from, _)| *from == Partial) {
            // The reduced tensor serves everybody who wanted the sum.
            self.drop_local(shard);
            let entry = self.table.get_mut(x.id);
            (entry.local, entry.state.at) = (id, wanted.to_vec());
            return Local { id, is_temporary: false, is_consumed };
        }
        // A weight lives long, and its copies would be the memory that sharding saves.
        let is_kept = !is_weight && changed().any(|(from, _)| *from != Replicate);
        if is_kept {
            self.table.get_mut(x.id).copies.push((wanted.to_vec(), id));
        }
        Local { id, is_temporary: !is_kept, is_consumed }
    }

    /// Moves the shard under a new name, in half precision if autocast computes with that and `half` is enough.
    pub(super) fn moved(
        &mut self,
        x: &TensorIr,
        shard: TensorId,
        (from, to): (&[Placement], &[Placement]),
        is_consumed: bool,
        half: bool,
    ) -> TensorId {
        let mut local = x.clone();
        local.id = shard;
        local.status = if is_consumed { TensorStatus::ReadWrite } else { TensorStatus::ReadOnly };
        local.shape = self.shape_here(&x.shape, from);
        if let Some(id) = self.share_of_generated(shard, (from, to), &local.shape) {
            if is_consumed {
                self.drop_local(shard);
            }
            return id;
        }
        let id = self.new_id();
        let alone = lone_collective((from, to), &self.groups).map(|(axis, what)| (what, self.groups[axis].clone()));
        if let Some((what, group)) = &alone
            && let Some((handle, is_half)) = self.executor.gemm_and_collective(&local, what, group)
        {
            return self.register_moved(id, (handle, is_half), what, to);
        }
        let (handle, is_half) = if half { self.executor.halved(&local) } else { self.executor.stored(&local) };
        if let Some((what @ Collective::AllGather(0), group)) = alone.filter(|_| half)
            && let Some(whole) = self.executor.begin_gather(id, &handle, &group)
        {
            return self.register_moved(id, (whole, is_half), &what, to);
        }
        let executor = &mut self.executor;
        let mut meanwhile = |bytes| executor.run_sums(bytes);
        let handle = reshard(handle, (from, to), &self.groups, &mut self.report, &mut meanwhile);
        self.executor.register_stored(id, handle, is_half);
        id
    }

    /// Names and reports what one collective gave.
    fn register_moved(
        &mut self,
        id: TensorId,
        (x, is_half): (HandleKind<B>, bool),
        what: &Collective,
        at: &[Placement],
    ) -> TensorId {
        let shards: usize =
            at.iter().zip(&self.groups).filter(|(at, _)| at.is_shard()).map(|(_, g)| g.size()).product();
        self.report.collective(name(what), bytes(&x) * shards);
        self.executor.register_stored(id, x, is_half);
        id
    }

    /// The shape of what a rank holds of a tensor of this shape in these placements.
    pub(super) fn shape_here(&self, shape: &Shape, at: &[Placement]) -> Shape {
        let mut shape = shape.clone();
        for (at, axis) in at.iter().zip(&self.axes) {
            if let Some(dim) = at.dim() {
                shape[dim] /= axis.ranks;
            }
        }
        shape
    }

    /// A share of a replicated tensor that is computed where it is used, without a kernel.
    fn share_of_generated(
        &mut self,
        whole: TensorId,
        (from, to): (&[Placement], &[Placement]),
        shape: &Shape,
    ) -> Option<TensorId> {
        let is_share = to.iter().all(|at| *at == Replicate || at.is_shard());
        let whole = self.executor.generated(whole).filter(|_| is_share && from.iter().all(|at| *at == Replicate))?;
        let mut sharded = (0..to.len()).filter(|&axis| self.axes[axis].ranks > 1 && to[axis] != Replicate);
        let share = match (whole, sharded.next(), sharded.next()) {
            (Generated::Number(_), ..) | (_, None, _) => whole,
            (Generated::Draw(draw), Some(axis), None) => {
                let Shard(dim) = to[axis] else { return None };
                let part = Part::of_dim(shape, dim, self.groups[axis].rank(), self.axes[axis].ranks);
                Generated::Draw(draw.share(part)?)
            }
            _ => return None,
        };
        let id = self.new_id();
        self.executor.register_generated(id, share, self.shape_here(shape, to));
        Some(id)
    }
}
