//! Gradients of weights: sums over samples of GEMMs, or one GEMM over all rows. Nothing in a backward pass reads them, so
//! that on a mesh they wait for a collective and run while that is on its way.

use super::lazy::Gemm;
use super::{Executor, Float};
use crate::mesh_backend::inner::Inner;
use burn::backend::TensorMetadata;
use burn::tensor::Shape;
use burn_ir::{BaseOperationIr, MatmulOpIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use std::sync::Arc;

/// Most sums that wait, since their operands stay in memory.
const MOST: usize = 6;
/// FLOP of a GEMM in the time in which a GPU receives a byte from another: of an H200 some 600 TFLOP/s and 300 GB/s.
const FLOP_PER_BYTE: usize = 2000;

/// `aᵀ · b` of all rows.
pub(super) struct Sum<B: Inner> {
    out: TensorIr,
    /// `[.., inner, rows]` and `[.., inner, columns]`.
    operands: [Float<B>; 2],
}

impl<B: Inner> Sum<B> {
    fn flop(&self) -> usize {
        let [a, b] = &self.operands;
        2 * a.shape().num_elements() * columns(b)
    }
}

impl<B: Inner> Executor<B> {
    /// Runs waiting GEMMs as one if `op` sums their results over the first dimension and nobody else reads them. A sum that
    /// waits takes another shape.
    pub(super) fn sum_gemms(&mut self, op: &OperationIr) -> bool {
        if let OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) = op
            && op.input.status == TensorStatus::ReadWrite
            && let Some(sum) = self.sums.iter_mut().find(|sum| sum.out.id == op.input.id)
        {
            sum.out = op.out.clone();
            self.forget(op.input.id);
            return true;
        }
        let OperationIr::NumericFloat(_, NumericOperationIr::SumDim(sum)) = op else { return false };
        let (x, out) = (&sum.input, &sum.out);
        if sum.axis != 0 || x.status != TensorStatus::ReadWrite || x.shape.num_dims() != 3 {
            return false;
        }
        let is_batch = |gemm: &&Arc<Gemm<B>>| {
            gemm.bias.is_none() && gemm.operands.iter().all(|(_, x)| x.shape()[0] == gemm.shape[0])
        };
        let Some(gemm) = self.gemms.get(&x.id).filter(is_batch) else { return false };
        let operands = gemm.operands.each_ref().map(|(_, x)| x.clone());
        self.gemms.remove(&x.id);
        self.add_sum(out, operands);
        true
    }

    /// Takes a GEMM for the gradient of a weight, which is stored in its own type, if it has the size of a parameter and its
    /// operands have not.
    pub(super) fn gradient_gemm(&mut self, op: &MatmulOpIr) -> bool {
        let lead = op.out.shape.num_dims() - 2;
        if lead > 1 {
            return false;
        }
        let is_parameter = |x: &TensorIr| self.lasting.contains(&x.shape.num_elements());
        let has_one_matrix = |x: &TensorIr| x.shape[..lead].iter().all(|size| *size == 1);
        let inputs = [&op.lhs, &op.rhs];
        if !is_parameter(&op.out) || inputs.iter().any(|x| is_parameter(x) || !has_one_matrix(x)) {
            return false;
        }
        let dtype = self.half.filter(|_| op.out.dtype == self.limits.dtype).unwrap_or(op.out.dtype);
        inputs.iter().for_each(|x| self.want(x.id, dtype));
        let operands = inputs.map(|x| self.in_type(x, dtype));
        self.add_sum(&op.out, operands);
        true
    }

    fn add_sum(&mut self, out: &TensorIr, [a, b]: [Float<B>; 2]) {
        let last = a.shape().num_dims() - 1;
        self.sums.push(Sum { out: out.clone(), operands: [B::float_swap_dims(a, last - 1, last), b] });
        if !self.hides || self.sums.len() > MOST {
            let sum = self.sums.remove(0);
            self.run_sum(sum);
        }
    }

    /// Runs sums that take as long as a collective in which a rank receives so many bytes.
    pub fn run_sums(&mut self, bytes: usize) {
        let mut flop = bytes.saturating_mul(FLOP_PER_BYTE);
        while flop > 0 && !self.sums.is_empty() {
            let sum = self.sums.remove(0);
            flop = flop.saturating_sub(sum.flop());
            self.run_sum(sum);
        }
    }

    /// Runs the sum that gives this tensor, if it waits.
    pub(super) fn run_sum_of(&mut self, id: TensorId) {
        if let Some(index) = self.sums.iter().position(|sum| sum.out.id == id) {
            let sum = self.sums.remove(index);
            self.run_sum(sum);
        }
    }

    /// Whether the tensor was a sum that waited. Nobody reads it.
    pub(super) fn drop_sum(&mut self, id: TensorId) -> bool {
        let waiting = self.sums.len();
        self.sums.retain(|sum| sum.out.id != id);
        self.sums.len() < waiting
    }

    fn run_sum(&mut self, Sum { out, operands }: Sum<B>) {
        let [a, b] = operands.map(|x| {
            let shape = x.shape();
            let last = shape.num_dims() - 1;
            B::float_reshape(x, Shape::from([1, shape[..last].iter().product::<usize>(), shape[last]]))
        });
        let elements = out.shape.num_elements();
        let operands = [a, b];
        let sum = self.fp8_gradient(&operands, out.dtype).unwrap_or_else(|| {
            self.count("GEMM");
            let [a, b] = operands;
            self.allocating(elements, || B::gemm(B::float_swap_dims(a, 1, 2), b, out.dtype))
        });
        self.insert(out.id, B::float_reshape(sum, out.shape), false);
    }
}

fn columns(x: &impl TensorMetadata) -> usize {
    let shape = x.shape();
    shape[shape.num_dims() - 1]
}
