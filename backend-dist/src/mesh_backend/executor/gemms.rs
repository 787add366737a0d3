//! GEMMs, which wait where they may be a sum of GEMMs.

use super::{Executor, Float};
use crate::mesh_backend::inner::Inner;
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_ir::{MatmulOpIr, NumericOperationIr, OperationIr, TensorId, TensorStatus};

/// `a · b` of each matrix.
pub(super) struct Gemm<B: Inner> {
    a: Float<B>,
    b: Float<B>,
    pub(super) dtype: DType,
}

impl<B: Inner> Executor<B> {
    /// `a · b`.
    pub(super) fn matmul(&mut self, op: &MatmulOpIr) {
        let dtype = self.half.filter(|_| op.out.dtype == self.limits.dtype).unwrap_or(op.out.dtype);
        for x in [&op.lhs, &op.rhs] {
            if Some(dtype) == self.half {
                self.chain.want_half(x.id);
            }
            self.settle(x.id);
        }
        let [a, b] = [&op.lhs, &op.rhs].map(|x| self.operand(x, dtype));
        let (rank, batches) = (op.out.shape.num_dims(), op.out.shape[0]);
        self.gemms.insert(op.out.id, Gemm { a, b, dtype });
        // Burn's gradient of a weight is a sum over samples.
        let may_be_summed = rank == 3 && batches > 1 && op.lhs.shape[0] == batches && op.rhs.shape[0] == batches;
        if !may_be_summed {
            self.run_gemm(op.out.id);
        }
    }

    pub(super) fn run_gemm(&mut self, id: TensorId) {
        let Some(Gemm { a, b, dtype }) = self.gemms.remove(&id) else { return };
        self.count("GEMM");
        let product = self.allocating(elements_of_product(&a, &b), || B::gemm(a, b, dtype));
        self.insert(id, product, self.half == Some(dtype));
    }

    /// Runs waiting GEMMs as one if `op` sums their results over the first dimension and nobody else reads them.
    pub(super) fn sum_gemms(&mut self, op: &OperationIr) -> bool {
        let OperationIr::NumericFloat(_, NumericOperationIr::SumDim(sum)) = op else { return false };
        let (x, out) = (&sum.input, &sum.out);
        if sum.axis != 0 || x.status != TensorStatus::ReadWrite {
            return false;
        }
        let Some(Gemm { a, b, .. }) = self.gemms.remove(&x.id) else { return false };
        self.count("GEMM");
        let [batches, rows, inner] = dims(&a);
        let columns = dims(&b)[2];
        let a = B::float_reshape(B::float_swap_dims(a, 1, 2), Shape::from([1, batches * inner, rows]));
        let b = B::float_reshape(b, Shape::from([1, batches * inner, columns]));
        let sum = self.allocating(rows * columns, || B::gemm(B::float_swap_dims(a, 1, 2), b, out.dtype));
        self.insert(out.id, sum, false);
        true
    }
}

fn elements_of_product<T: TensorMetadata>(a: &T, b: &T) -> usize {
    let [a, b] = [a.shape(), b.shape()];
    let lead = a.num_dims() - 2;
    let batches: usize = (0..lead).map(|dim| a[dim].max(b[dim])).product();
    batches * a[lead] * b[lead + 1]
}

fn dims<T: TensorMetadata>(x: &T) -> [usize; 3] {
    let shape = x.shape();
    [shape[0], shape[1], shape[2]]
}
