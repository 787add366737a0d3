//! Sums of GEMMs over samples, as the gradients of weights are. Nothing in a backward pass reads them, so that on a mesh
//! they wait for a collective and run while that is on its way.

use super::lazy::Gemm;
use super::{Executor, Float};
use crate::mesh_backend::inner::Inner;
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_ir::{NumericOperationIr, OperationIr, TensorId, TensorStatus};
use std::sync::Arc;

/// Most sums that wait, since their operands stay in memory.
const MOST: usize = 6;
/// FLOP of a GEMM in the time in which a GPU receives a byte from another: of an H200 some 600 TFLOP/s and 300 GB/s.
const FLOP_PER_BYTE: usize = 2000;

/// `aᵀ · b` of all samples' rows.
pub(super) struct Sum<B: Inner> {
    id: TensorId,
    /// `[samples, inner, rows]` and `[samples, inner, columns]`.
    operands: [Float<B>; 2],
    dtype: DType,
}

impl<B: Inner> Sum<B> {
    fn flop(&self) -> usize {
        let [a, b] = &self.operands;
        2 * a.shape().num_elements() * b.shape()[2]
    }
}

impl<B: Inner> Executor<B> {
    /// Runs waiting GEMMs as one if `op` sums their results over the first dimension and nobody else reads them.
    pub(super) fn sum_gemms(&mut self, op: &OperationIr) -> bool {
        let OperationIr::NumericFloat(_, NumericOperationIr::SumDim(sum)) = op else { return false };
        let (x, out) = (&sum.input, &sum.out);
        if sum.axis != 0 || x.status != TensorStatus::ReadWrite || x.shape.num_dims() != 3 {
            return false;
        }
        let is_batch = |gemm: &&Arc<Gemm<B>>| gemm.operands.iter().all(|(_, x)| x.shape()[0] == gemm.shape[0]);
        if self.gemms.get(&x.id).filter(is_batch).is_none() {
            return false;
        }
        let Some(gemm) = self.gemms.remove(&x.id) else { return false };
        let [a, b] = gemm.operands.each_ref().map(|(_, x)| x.clone());
        drop(gemm);
        self.sums.push(Sum { id: out.id, operands: [B::float_swap_dims(a, 1, 2), b], dtype: out.dtype });
        if !self.hides || self.sums.len() > MOST {
            let sum = self.sums.remove(0);
            self.run_sum(sum);
        }
        true
    }

    /// Whether any waits.
    pub fn has_sums(&self) -> bool {
        !self.sums.is_empty()
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
        if let Some(index) = self.sums.iter().position(|sum| sum.id == id) {
            let sum = self.sums.remove(index);
            self.run_sum(sum);
        }
    }

    /// Whether the tensor was a sum that waited. Nobody reads it.
    pub(super) fn drop_sum(&mut self, id: TensorId) -> bool {
        let waiting = self.sums.len();
        self.sums.retain(|sum| sum.id != id);
        self.sums.len() < waiting
    }

    fn run_sum(&mut self, Sum { id, operands: [a, b], dtype }: Sum<B>) {
        self.count("GEMM");
        let ([batches, inner, rows], columns) = (dims(&a), dims(&b)[2]);
        let a = B::float_reshape(a, Shape::from([1, batches * inner, rows]));
        let b = B::float_reshape(b, Shape::from([1, batches * inner, columns]));
        let sum = self.allocating(rows * columns, || B::gemm(B::float_swap_dims(a, 1, 2), b, dtype));
        self.insert(id, sum, false);
    }
}

fn dims<T: TensorMetadata>(x: &T) -> [usize; 3] {
    let shape = x.shape();
    [shape[0], shape[1], shape[2]]
}
