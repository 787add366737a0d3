//! Operations that change only the shape.

use super::{Executor, float};
use crate::mesh_backend::inner::Inner;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_ir::{BaseOperationIr, HandleKind, OperationIr, TensorId, TensorIr};

/// One of them.
#[derive(Clone, Debug)]
pub(super) enum View {
    Reshape(Shape),
    Expand(Shape),
    SwapDims(usize, usize),
    Permute(Vec<usize>),
}

/// `op` as a view: its input and output.
pub(super) fn view(op: &OperationIr) -> Option<(&TensorIr, &TensorIr, View)> {
    let OperationIr::BaseFloat(op) = op else { return None };
    match op {
        BaseOperationIr::Reshape(op) => Some((&op.input, &op.out, View::Reshape(op.out.shape.clone()))),
        BaseOperationIr::Expand(op) => Some((&op.input, &op.out, View::Expand(op.out.shape.clone()))),
        BaseOperationIr::SwapDims(op) => Some((&op.input, &op.out, View::SwapDims(op.dim1, op.dim2))),
        BaseOperationIr::Permute(op) => Some((&op.input, &op.out, View::Permute(op.axes.clone()))),
        _ => None,
    }
}

impl<B: Inner> Executor<B> {
    /// The output of a view is stored as its input is, and knows where to find a copy in half precision.
    pub(super) fn link(&mut self, x: &TensorIr, out: TensorId, view: &View) {
        if self.halves.contains(&x.id) {
            self.halves.insert(out);
        } else if self.half.is_some() {
            let (root, mut views) = self.views.get(&x.id).cloned().unwrap_or((x.id, Vec::new()));
            views.push(view.clone());
            self.views.insert(out, (root, views));
        }
    }

    /// `out` is the view of `x`.
    pub(super) fn apply_view(&mut self, x: &TensorIr, out: TensorId, view: View) {
        let viewed = view.apply::<B>(float(self.inner.get_tensor(x)));
        self.inner.register_tensor_to_device(out, HandleKind::Float(viewed));
    }
}

impl View {
    pub fn apply<B: Inner>(self, x: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Reshape(shape) => B::reshaped(x, shape),
            Self::Expand(shape) => B::float_expand(x, shape),
            Self::SwapDims(a, b) => B::float_swap_dims(x, a, b),
            Self::Permute(axes) => B::float_permute(x, &axes),
        }
    }
}
