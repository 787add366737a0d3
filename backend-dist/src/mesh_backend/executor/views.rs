//! Operations that change only the shape.

use crate::mesh_backend::inner::Inner;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr};

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

impl View {
    pub fn apply<B: Inner>(self, x: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Reshape(shape) => B::float_reshape(x, shape),
            Self::Expand(shape) => B::float_expand(x, shape),
            Self::SwapDims(a, b) => B::float_swap_dims(x, a, b),
            Self::Permute(axes) => B::float_permute(x, &axes),
        }
    }
}
