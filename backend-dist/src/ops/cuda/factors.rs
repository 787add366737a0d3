//! The products of a linear layer, piece by piece where they lie.

use burn::backend::{Cube, autodiff::NodeId, autodiff::grads::Gradients};
use burn_cubecl::tensor::CubeTensor;

use super::blocks::{columns_of, shared, view};
use super::{Float, columns, empty, rows};
use crate::cuda::lt::{Onto, Operand, leaving, multiply, multiply_and_add_bias};
use crate::ops::main_grads::place;
use crate::ops::pieces::Product;

/// The second factor of a product.
pub(super) struct Factor {
    pub w: Float,
    pub transposed: bool,
}

impl Factor {
    /// Columns of the product.
    pub(super) fn columns(&self) -> usize {
        self.w.meta.shape()[usize::from(!self.transposed)]
    }

    /// Bytes of the product with a matrix of `rows` rows.
    pub(super) fn bytes(&self, rows: usize) -> usize {
        rows * self.columns() * self.w.dtype.size()
    }

    /// The product with a matrix of `rows` rows.
    pub(super) fn of(&self, rows: usize) -> Product {
        let inner = self.w.meta.shape()[usize::from(self.transposed)];
        Product { rows, inner, columns: self.columns(), element: self.w.dtype.size() }
    }

    /// Writes `x · w`, or `x · wᵀ`, plus `bias` to `out`; both are `[batches, rows, columns]`.
    pub(super) fn multiply(&self, x: CubeTensor, bias: Option<&Float>, out: &CubeTensor) {
        let w = Operand::batched(shared(&self.w, x.meta.shape()[0]));
        let w = if self.transposed { w.transposed() } else { w };
        match bias {
            None => multiply(Operand::batched(x), w, out, Onto::Replace),
            Some(bias) => multiply_and_add_bias(Operand::batched(x), w, bias.clone(), out),
        }
    }
}

/// The gradient of the weight `id`: the product of an output's gradient and a layer's input.
pub(super) struct WeightGrad {
    grad: Float,
    input: Float,
    id: NodeId,
}

impl WeightGrad {
    /// That of the weight `id`.
    pub(super) fn new(grad: Float, input: Float, id: NodeId) -> Self {
        Self { grad, input, id }
    }

    /// The product.
    pub(super) fn product(&self) -> Product {
        let (outputs, inner) = (columns(&self.grad), rows(&self.grad));
        Product { rows: outputs, inner, columns: columns(&self.input), element: self.grad.dtype.size() }
    }

    /// Brings it to its place, by runs of its rows: start, number, and how many multiprocessors each leaves to an
    /// exchange.
    pub(super) fn write(self, runs: impl IntoIterator<Item = (usize, usize, usize)>, grads: &mut Gradients) {
        let Self { grad, input, id } = self;
        let [outputs, inputs] = [columns(&grad), columns(&input)];
        let placed = place::<Cube>(id);
        let is_placed = placed.is_some();
        let (sum, add) = placed.unwrap_or_else(|| (empty(&input, [outputs, inputs], input.dtype), false));
        let onto = if add { Onto::Add } else { Onto::Replace };
        for (start, count, left) in runs {
            let (grad, input) = (Operand::batched(columns_of(&grad, start, count)), Operand::flat(input.clone()));
            let rows = view(&sum, [1, count, inputs], [0, inputs, 1], start * inputs);
            leaving(left, || multiply(grad.transposed(), input, &rows, onto));
        }
        if !is_placed {
            grads.register::<Cube>(id, sum);
        }
    }
}
