//! Which operations wait to run together.

use super::chain::Operand;
use super::expression::{Expression, Generated, expression};
use super::lazy::{Gemm, Source};
use super::{Executor, float, masks};
use crate::mesh_backend::inner::Inner;
use burn_ir::{BaseOperationIr, HandleKind, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};

impl<B: Inner> Executor<B> {
    /// Adds an operation to the chain, or begins another with it.
    pub(super) fn fuse(&mut self, op: &OperationIr) -> bool {
        if let OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) = op {
            return self.chain.reshape(&op.input, &op.out);
        }
        let Some((expression, out)) = expression(op, |x| self.generated(x.id)) else {
            return false;
        };
        if out.dtype != self.limits.dtype {
            return false;
        }
        if let Some(value) = expression.value() {
            self.register_generated(out.id, Generated::Number(value), out.shape.clone());
        } else {
            let mut inputs = Vec::new();
            expression.tensors(&mut |x| inputs.push((x.id, x.shape == out.shape)));
            let reduces = expression.reduces();
            for (id, is_whole) in inputs {
                if !self.joins_unread(id, is_whole || reduces) {
                    // A generated tensor that the expression still has is reduced or broadcast.
                    self.settle_generated(id);
                }
            }
            if !self.join(&expression, out) {
                self.flush(None);
                if !self.join(&expression, out) {
                    return false;
                }
            }
        }
        if !self.generated.is_empty() || !self.deferred.is_empty() {
            for x in op.inputs().filter(|x| x.status == TensorStatus::ReadWrite) {
                self.generated.remove(&x.id);
                if self.deferred.remove(&x.id).is_some() {
                    self.forget(x.id);
                }
            }
        }
        self.chain.take_ended().into_iter().for_each(|id| self.drop_tensor(id));
        true
    }

    /// Whether a chain can read a tensor that is not in memory yet, and will not be if attention comes of it.
    fn joins_unread(&self, id: TensorId, is_whole: bool) -> bool {
        let is_matrix = |gemm: &Gemm<B>| gemm.bias.is_none() && gemm.shape.num_dims() == 4 && gemm.shape[3] > 1;
        self.deferred.contains_key(&id) || (is_whole && self.gemms.get(&id).is_some_and(|x| is_matrix(x)))
    }

    fn join(&mut self, expression: &Expression, out: &TensorIr) -> bool {
        let Self {
            chain,
            inner,
            halves,
            copies,
            shared_copies,
            views,
            half,
            limits,
            gemms,
            deferred,
            names,
            of_masks,
            ..
        } = self;
        chain.join((expression, out), *limits, deferred, |x, extent| {
            if let Some(gemm) = gemms.get(&x.id) {
                let (handle, is_half) = (Source::Gemm(gemm.clone()), *half == Some(gemm.dtype));
                if x.status == TensorStatus::ReadWrite {
                    gemms.remove(&x.id);
                }
                return Operand { handle, is_half, has_copy: false };
            }
            if x.dtype.is_bool() {
                let half = half.filter(|_| !extent.is_narrow());
                let dtype = half.unwrap_or(limits.dtype);
                let HandleKind::Bool(mask) = inner.get_tensor(x) else { unreachable!("a mask has booleans") };
                let handle = Source::Mask(masks::mask(x, of_masks), B::bool_into_float(mask, dtype.into()));
                return Operand { handle, is_half: half.is_some(), has_copy: false };
            }
            let is_stored_half = halves.contains(&x.id);
            let has_copy = copies.contains_key(&x.id) || shared_copies.get(&x.id).is_some_and(|x| x.get().is_some());
            let mut handle = float(inner.get_tensor(x));
            if x.status == TensorStatus::ReadWrite {
                halves.remove(&x.id);
                copies.remove(&x.id);
                shared_copies.remove(&x.id);
                views.remove(&x.id);
                names.remove(&x.id);
            }
            let is_half = is_stored_half && !extent.is_narrow() && half.is_some();
            if is_stored_half && !is_half {
                handle = B::float_cast(handle, x.dtype.into());
            }
            Operand { handle: Source::Stored(handle), is_half, has_copy }
        })
    }

    /// Lets the chain compute a sum over all rows of what it computes.
    pub(super) fn sum_in_chain(&mut self, op: &OperationIr) -> bool {
        let Some((x, out)) = sum_of_rows(op) else { return false };
        out.dtype == self.limits.dtype && self.chain.sum_rows(x, out, self.limits)
    }

    /// Sums over all dimensions but the last, in f32.
    pub(super) fn sum_columns(&mut self, op: &OperationIr) -> bool {
        let Some((x, out)) = sum_of_rows(op) else { return false };
        if out.dtype != self.limits.dtype {
            return false;
        }
        self.count("sum of rows");
        let x = float(self.inner.get_tensor(x));
        let sum = self.allocating(out.shape.num_elements(), || B::sum_rows(x, out.dtype));
        let sum = B::float_reshape(sum, out.shape.clone());
        self.insert(out.id, sum, false);
        true
    }
}

/// Input and output of a sum over all dimensions but the last.
fn sum_of_rows(op: &OperationIr) -> Option<(&TensorIr, &TensorIr)> {
    let OperationIr::NumericFloat(_, op) = op else { return None };
    let (x, out, axes) = match op {
        NumericOperationIr::SumDim(op) => (&op.input, &op.out, std::slice::from_ref(&op.axis)),
        NumericOperationIr::SumDims(op) => (&op.input, &op.out, &op.axes[..]),
        _ => return None,
    };
    let last = x.shape.num_dims() - 1;
    let is_summed = |dim: usize| x.shape[dim] == 1 || axes.contains(&dim);
    (!axes.contains(&last) && (0..last).all(is_summed)).then_some((x, out))
}
