//! Tensors in other placements, and the collectives that bring them there.

use super::storage::{Share, size};
use super::{Kept, Meta};
use crate::logical::MeshAxis;
use crate::logical::Placement::{self, Partial, Replicate};
use burn_ir::TensorIr;

impl Meta {
    pub(super) fn bytes_of(&self, x: &TensorIr, at: &[Placement], is_half: bool) -> u64 {
        let sharded = |(at, axis): (&Placement, &MeshAxis)| if at.is_shard() { axis.ranks } else { 1 };
        let parts: usize = at.iter().zip(&self.axes).map(sharded).product();
        (x.shape.num_elements() / parts) as u64 * size(x.dtype, is_half)
    }

    /// A share in the placements `to`, by collectives.
    pub(super) fn moved(&mut self, x: &TensorIr, from: &[Placement], to: &[Placement], is_half: bool) -> Share {
        let whole = x.shape.num_elements() * size(x.dtype, is_half) as usize;
        for ((from, to), axis) in from.iter().zip(to).zip(&self.axes) {
            let name = match (from, to) {
                (Partial, Replicate) => "all-reduce",
                (Partial, _) if to.is_shard() => "reduce-scatter",
                (_, Replicate) if from.is_shard() => "all-gather",
                _ if from != to && from.is_shard() && to.is_shard() => "all-to-all",
                _ => continue,
            };
            if axis.ranks > 1 {
                let mut counts = self.counts.lock();
                counts.collectives.entry(name).or_default().add(whole);
            }
        }
        let storage = self.allocate(self.bytes_of(x, to, is_half));
        Share { storage, is_strided: false, is_half }
    }

    /// The tensor is from now on in the placements `to`.
    pub(super) fn place_for_good(&mut self, x: &TensorIr, to: Vec<Placement>) {
        let Kept { state, share, .. } = &self.table[&x.id];
        if state.at != to {
            let (from, old) = (state.at.clone(), *share);
            let share = self.moved(x, &from, &to, old.is_half);
            self.release(old);
            let kept = self.table.get_mut(&x.id).expect("it was there");
            (kept.share, kept.state.at) = (share, to);
        }
    }

    /// The input of an operation in the placements `to`, and whether it is released after the operation.
    pub(super) fn place(&mut self, x: &TensorIr, to: &[Placement]) -> (Share, bool) {
        let Kept { state, share, copies, .. } = &self.table[&x.id];
        if state.at == to {
            return (*share, false);
        }
        if let Some((_, copy)) = copies.iter().find(|(at, _)| at == to) {
            return (*copy, false);
        }
        let (from, is_weight, is_half) = (state.at.clone(), state.weight, share.is_half);
        let mut changed = from.iter().zip(to).filter(|(from, to)| from != to);
        if changed.clone().all(|(from, _)| *from == Partial) {
            self.place_for_good(x, to.to_vec());
            return (self.table[&x.id].share, false);
        }
        let is_kept = !is_weight && changed.any(|(from, _)| *from != Replicate);
        let copy = match self.whole_from_source(x.id, to) {
            Some(whole) => whole,
            None => self.moved(x, &from, to, is_half),
        };
        if is_kept {
            self.table.get_mut(&x.id).expect("it was there").copies.push((to.to_vec(), copy));
        }
        (copy, !is_kept)
    }
}
