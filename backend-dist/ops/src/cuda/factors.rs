//! The GEMMs of a linear layer on blocks of matrices, in place.

use burn::backend::{Cube, autodiff::NodeId, autodiff::grads::Gradients};
use burn_cubecl::tensor::CubeTensor;

use super::blocks::{columns_of, shared, view};
use super::{Float, columns, empty, rows};
use crate::main_grads::main_grad;
use gpu::cuda::lt::{Onto, Operand, multiply, multiply_and_add_bias};
use gpu::first_model;
use layouts::gemm_split::Gemm;

/// The weight as the second operand of a GEMM.
pub(super) struct Factor {
    pub w: Float,
    pub transposed: bool,
}

impl Factor {
    /// Columns of the GEMM's output.
    pub(super) fn columns(&self) -> usize {
        self.w.meta.shape()[usize::from(!self.transposed)]
    }

    /// Bytes of the GEMM's output for `rows` rows.
    pub(super) fn bytes(&self, rows: usize) -> usize {
        rows * self.columns() * self.w.dtype.size()
    }

    /// The GEMM of `rows` rows.
    pub(super) fn of(&self, rows: usize) -> Gemm {
        let inner = self.w.meta.shape()[usize::from(self.transposed)];
        Gemm { rows, inner, columns: self.columns(), element: self.w.dtype.size(), gpu: first_model() }
    }

    /// Writes `x · w`, or `x · wᵀ`, plus `bias` to `out`; both are `[batches, rows, columns]`. `left` SMs are left
    /// to a collective.
    pub(super) fn multiply(&self, x: CubeTensor, bias: Option<&Float>, out: &CubeTensor, left: usize) {
        let w = Operand::batched(shared(&self.w, x.meta.shape()[0]));
        let w = if self.transposed { w.transposed() } else { w };
        let x = Operand::batched(x).reserving_sms(left);
        match bias {
            None => multiply(x, w, out, Onto::Replace),
            Some(bias) => multiply_and_add_bias(x, w, bias.clone(), out),
        }
    }
}

/// The gradient of the weight `id`: the GEMM of an output gradient and a layer's input.
pub(super) struct WeightGrad {
    grad: Float,
    input: Float,
    id: NodeId,
}

impl WeightGrad {
    /// The gradient of the weight `id`.
    pub(super) fn new(grad: Float, input: Float, id: NodeId) -> Self {
        Self { grad, input, id }
    }

    /// Its GEMM.
    pub(super) fn gemm(&self) -> Gemm {
        let (outputs, inner) = (columns(&self.grad), rows(&self.grad));
        Gemm {
            rows: outputs,
            inner,
            columns: columns(&self.input),
            element: self.grad.dtype.size(),
            gpu: first_model(),
        }
    }

    /// Delivers it by ranges of its rows: start, number, and the SMs that each GEMM leaves to a collective.
    pub(super) fn write(self, runs: impl IntoIterator<Item = (usize, usize, usize)>, grads: &mut Gradients) {
        let Self { grad, input, id } = self;
        let [outputs, inputs] = [columns(&grad), columns(&input)];
        let placed = main_grad::<Cube>(id);
        let is_placed = placed.is_some();
        let (sum, add) = placed.unwrap_or_else(|| (empty(&input, [outputs, inputs], input.dtype), false));
        let onto = if add { Onto::Add } else { Onto::Replace };
        for (start, count, left) in runs {
            let (grad, input) = (Operand::batched(columns_of(&grad, start, count)), Operand::flat(input.clone()));
            let rows = view(&sum, [1, count, inputs], [0, inputs, 1], start * inputs);
            multiply(grad.transposed().reserving_sms(left), input, &rows, onto);
        }
        if !is_placed {
            grads.register::<Cube>(id, sum);
        }
    }
}
