//! Which operations wait to run together.

use super::chain::Operand;
use super::expression::{self, Expression, expression};
use super::{Executor, float};
use crate::mesh_backend::inner::Inner;
use burn_ir::{BaseOperationIr, NumericOperationIr, OperationIr, TensorIr, TensorStatus};
use kernels_cubecl::fused::{Draw, Extent};

impl<B: Inner> Executor<B> {
    /// Keeps a tensor of which all elements are one number as that number.
    pub(super) fn note_constant(&mut self, op: &OperationIr) -> bool {
        let constant = expression::constant(op).filter(|(_, out)| out.dtype == self.limits.dtype);
        if let Some((value, out)) = constant {
            self.constants.insert(out.id, (value, out.shape.clone()));
        }
        constant.is_some()
    }

    /// Adds an operation to the chain, or begins another with it.
    pub(super) fn fuse(&mut self, op: &OperationIr) -> bool {
        if let OperationIr::BaseFloat(op) = op {
            return matches!(op, BaseOperationIr::Reshape(op) if self.chain.reshape(&op.input, &op.out));
        }
        let constants = &self.constants;
        let constant = |x: &TensorIr| constants.get(&x.id).map(|(value, _)| *value);
        let Some((expression, out)) = expression(op, constant) else {
            return false;
        };
        if out.dtype != self.limits.dtype {
            return false;
        }
        if let Some(value) = expression.value() {
            self.constants.insert(out.id, (value, out.shape.clone()));
        } else {
            let mut inputs = Vec::new();
            expression.tensors(&mut |x| inputs.push(x.id));
            // A reduction reads a tensor even if all its elements are one number.
            let read = if expression.reduces() { Self::settle_number } else { Self::settle_before };
            inputs.into_iter().for_each(|id| read(self, id));
            if !self.join(&expression, out) {
                self.flush();
                if !self.join(&expression, out) {
                    return false;
                }
            }
        }
        if !self.constants.is_empty() {
            let consumed = op.inputs().filter(|x| x.status == TensorStatus::ReadWrite);
            consumed.for_each(|x| drop(self.constants.remove(&x.id)));
        }
        true
    }

    /// A random tensor of zeros and ones, if it can be computed where it is used.
    pub fn bernoulli(&mut self, out: &TensorIr, draw: Draw) -> bool {
        if !self.fuses || out.dtype != self.limits.dtype {
            return false;
        }
        let expression = Expression::Bernoulli(draw);
        if !self.join(&expression, out) {
            self.flush();
            return self.join(&expression, out);
        }
        true
    }

    fn join(&mut self, expression: &Expression, out: &TensorIr) -> bool {
        let Self { chain, inner, halves, copies, views, half, limits, .. } = self;
        chain.join((expression, out), *limits, |x, extent| {
            let (is_stored_half, has_copy) = (halves.contains(&x.id), copies.contains_key(&x.id));
            let mut handle = float(inner.get_tensor(x));
            if x.status == TensorStatus::ReadWrite {
                halves.remove(&x.id);
                copies.remove(&x.id);
                views.remove(&x.id);
            }
            let is_half = is_stored_half && matches!(extent, Extent::Whole | Extent::PerColumn) && half.is_some();
            if is_stored_half && !is_half {
                handle = B::float_cast(handle, x.dtype.into());
            }
            Operand { handle, is_half, has_copy }
        })
    }

    /// Lets a sum over leading dimensions of what the chain computes wait for the chain, which can continue meanwhile.
    pub(super) fn wait(&mut self, op: &OperationIr) -> bool {
        let (x, out, last) = match op {
            OperationIr::NumericFloat(_, NumericOperationIr::SumDim(op)) => (&op.input, &op.out, op.axis),
            OperationIr::NumericFloat(_, NumericOperationIr::SumDims(op)) => {
                (&op.input, &op.out, op.axes.iter().copied().max().unwrap_or(0))
            }
            _ => return false,
        };
        if last + 1 == x.shape.num_dims() || !self.chain.has(x.id) {
            return false;
        }
        self.chain.pin(x.id);
        self.late.insert(out.id);
        self.waiting.push(op.clone());
        true
    }

    /// Sums over all dimensions but the last, in f32.
    pub(super) fn sum_columns(&mut self, op: &OperationIr) -> bool {
        let (x, out, axes) = match op {
            OperationIr::NumericFloat(_, NumericOperationIr::SumDim(op)) => (&op.input, &op.out, vec![op.axis]),
            OperationIr::NumericFloat(_, NumericOperationIr::SumDims(op)) => (&op.input, &op.out, op.axes.clone()),
            _ => return false,
        };
        let last = x.shape.num_dims() - 1;
        let is_summed = |dim: usize| x.shape[dim] == 1 || axes.contains(&dim);
        if out.dtype != self.limits.dtype || axes.contains(&last) || !(0..last).all(is_summed) {
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
