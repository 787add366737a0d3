//! Views share what was gathered, as on a logical device.

use super::{Meta, Share};
use crate::logical::Placement::{self, Replicate};
use burn_ir::{TensorId, TensorIr, TensorStatus};

impl Meta {
    /// After `out` was made as a view of `x`, and before consumed inputs are forgotten: if both are sharded activations,
    /// `out` has a view of the whole copy of `x`, if there is one, or knows where one may be later.
    pub(super) fn link_view(&mut self, x: &TensorIr, out: &TensorIr) {
        let source = &self.table[&x.id];
        // What is broadcast is gathered itself.
        let is_linked = !source.state.weight && x.shape.num_elements() == out.shape.num_elements();
        if !is_linked || !self.is_sharded(x.id) || !self.is_sharded(out.id) {
            return;
        }
        let whole = self.replicated().at;
        let copy = source.copies.iter().find(|(at, _)| *at == whole).map(|(_, copy)| *copy);
        let copy = copy.map(|copy| self.view(copy, out.id));
        let view = self.table.get_mut(&out.id).expect("it was made");
        match copy {
            Some(copy) => view.copies.push((whole, copy)),
            None if x.status != TensorStatus::ReadWrite => view.source = Some(x.clone()),
            None => {}
        }
    }

    /// The whole of `x`, if that is `wanted` and `x` is a view of a tensor that still exists and is sharded.
    pub(super) fn whole_from_source(&mut self, x: TensorId, wanted: &[Placement]) -> Option<Share> {
        let source = self.table[&x].source.clone().filter(|_| wanted.iter().all(|at| *at == Replicate))?;
        if !self.table.contains_key(&source.id) || !self.is_sharded(source.id) {
            return None;
        }
        let (whole, is_temporary) = self.place(&source, wanted);
        let copy = self.view(whole, x);
        if is_temporary {
            self.release(whole);
        }
        Some(copy)
    }

    /// What `out` would be as a view of a whole tensor.
    fn view(&mut self, whole: Share, out: TensorId) -> Share {
        Share { is_strided: self.table[&out].share.is_strided, ..self.share(whole) }
    }

    fn is_sharded(&self, id: TensorId) -> bool {
        self.table[&id].state.at.iter().any(|at| at.is_shard())
    }
}
