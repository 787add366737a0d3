//! Views share what was gathered: three reshapes of one tensor are gathered once, and so is a transposition for the
//! backward pass.

use super::Interpreter;
use crate::{logical::Placement::Replicate, mesh_backend::inner::Inner, mesh_backend::table::Source};
use burn_ir::{BaseOperationIr, IrVisitorMut, OperationIr, TensorId, TensorIr, TensorStatus};

/// Input and output of an operation that only changes the shape.
fn view(op: &OperationIr) -> Option<(&TensorIr, &TensorIr)> {
    let (OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op)) = op else { return None };
    match op {
        BaseOperationIr::Reshape(op) => Some((&op.input, &op.out)),
        BaseOperationIr::SwapDims(op) => Some((&op.input, &op.out)),
        BaseOperationIr::Permute(op) => Some((&op.input, &op.out)),
        _ => None,
    }
}

impl<B: Inner> Interpreter<B> {
    /// After `op` has run, and before its consumed inputs are dropped: if it is a view of a sharded activation, the
    /// output gets a view of the input's whole copy, if there is one, and knows where one may be later.
    pub(super) fn link_view(&mut self, op: &OperationIr) {
        let Some((x, out)) = view(op) else { return };
        // Where the operation has run on the whole input, the output is whole.
        let is_sharded = |id: TensorId| self.table.get(id).state.at.iter().any(|at| at.is_shard());
        let entry = self.table.get(x.id);
        if entry.state.weight || !is_sharded(x.id) || !is_sharded(out.id) {
            return;
        }
        let whole = vec![Replicate; self.axes.len()];
        let copy = entry.copies_in(&whole).next();
        if let Some(copy) = copy {
            let copy = self.viewed(copy, op);
            self.table.get_mut(out.id).copies.push((whole, copy));
        } else if x.status != TensorStatus::ReadWrite {
            self.table.get_mut(out.id).source = Some(Box::new(Source { id: x.id, view: op.clone() }));
        }
    }

    /// The whole of the tensor `x`, if it is a view of another that still exists and is sharded; with `half`, half
    /// precision is enough.
    pub(super) fn whole_from_source(&mut self, x: TensorId, half: bool) -> Option<TensorId> {
        let source = self.table.get(x).source.clone()?;
        let at = &self.table.try_get(source.id)?.state.at;
        if !at.iter().any(|at| at.is_shard()) {
            return None;
        }
        let (input, _) = view(&source.view)?;
        let input = TensorIr { status: TensorStatus::ReadOnly, ..input.clone() };
        let whole = self.place(&input, &vec![Replicate; self.axes.len()], false, half);
        let id = self.viewed(whole.id, &source.view);
        if whole.is_temporary {
            self.drop_local(whole.id);
        }
        Some(id)
    }

    /// The view `op` of the whole tensor `x`.
    fn viewed(&mut self, x: TensorId, op: &OperationIr) -> TensorId {
        let out = self.new_id();
        let mut op = op.clone();
        op.visit_mut(&mut Between { x, out });
        self.executor.register_op(&op);
        out
    }
}

/// Makes an operation of one input one from `x` to `out`.
struct Between {
    x: TensorId,
    out: TensorId,
}

impl IrVisitorMut for Between {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        match tensor.status {
            TensorStatus::NotInit => tensor.id = self.out,
            _ => (tensor.id, tensor.status) = (self.x, TensorStatus::ReadOnly),
        }
    }
}
