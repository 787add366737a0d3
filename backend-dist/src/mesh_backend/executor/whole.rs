//! Sums and means of all elements, as those of losses: a sum over each row, then one of what that leaves. Burn's own try
//! kernels for the first of each size, and for that measure the device, which takes seconds.

use super::Executor;
use crate::mesh_backend::inner::Inner;
use burn::tensor::Shape;
use burn_ir::{
    BaseOperationIr, NumericOperationIr, OperationIr, ReduceDimOpIr, ReduceOpIr, ScalarIr, ScalarOpIr, ShapeOpIr,
    TensorId, TensorIr, TensorStatus,
};

/// The first id of what an operation is split into.
const OWN_IDS: u64 = 1 << 63;
/// Longest rows of a tensor whose own are too long for a kernel.
const LONG: usize = 8192;

impl<B: Inner> Executor<B> {
    /// Runs a sum or mean of all elements.
    pub(super) fn sum_all(&mut self, op: &OperationIr) -> bool {
        let OperationIr::NumericFloat(dtype, op) = op else { return false };
        let (op, is_mean) = match op {
            NumericOperationIr::Sum(op) => (op, false),
            NumericOperationIr::Mean(op) => (op, true),
            _ => return false,
        };
        let (mut x, elements) = (op.input.clone(), op.input.shape.num_elements());
        let columns = columns(&x.shape, self.limits.fits);
        let Some(columns) = columns.filter(|_| op.out.dtype == self.limits.dtype && x.dtype == op.out.dtype) else {
            return false;
        };
        if x.shape[..].last() != Some(&columns) {
            let rows = self.part(&x, vec![elements / columns, columns]);
            x = self.reshape(x, rows);
        }
        let (rows, axis) = (elements / columns, x.shape.num_dims() - 1);
        let out = self.part(&x, [&x.shape[..axis], &[1]].concat());
        let sum = ReduceDimOpIr { input: x, out: out.clone(), axis, accumulator_len: 1 };
        self.register_op(&OperationIr::NumericFloat(*dtype, NumericOperationIr::SumDim(sum)));
        x = consumed(out);
        if rows > 1 {
            let out = self.part(&x, vec![1]);
            let sum = ReduceOpIr { input: x, out: out.clone() };
            self.register_op(&OperationIr::NumericFloat(*dtype, NumericOperationIr::Sum(sum)));
            x = consumed(out);
        }
        if is_mean {
            let out = self.part(&x, x.shape.to_vec());
            let mean = ScalarOpIr { lhs: x, rhs: ScalarIr::Float(1.0 / elements as f64), out: out.clone() };
            self.register_op(&OperationIr::NumericFloat(*dtype, NumericOperationIr::MulScalar(mean)));
            x = consumed(out);
        }
        self.reshape(x, op.out.clone());
        true
    }

    /// A tensor that nobody else knows, of the type of `x`.
    fn part(&mut self, x: &TensorIr, shape: Vec<usize>) -> TensorIr {
        self.parts += 1;
        let id = TensorId::new(OWN_IDS + self.parts);
        TensorIr { id, shape: Shape::from(shape), status: TensorStatus::NotInit, dtype: x.dtype }
    }

    fn reshape(&mut self, x: TensorIr, out: TensorIr) -> TensorIr {
        let view = ShapeOpIr { input: x, out: out.clone() };
        self.register_op(&OperationIr::BaseFloat(BaseOperationIr::Reshape(view)));
        consumed(out)
    }
}

/// The tensor, for its last reader.
fn consumed(x: TensorIr) -> TensorIr {
    TensorIr { status: TensorStatus::ReadWrite, ..x }
}

/// Of how many numbers rows are of which a kernel sums each: all, the tensor's own, or as many as divide all.
fn columns(shape: &Shape, fits: fn(usize) -> bool) -> Option<usize> {
    let (elements, own) = (shape.num_elements(), shape[..].last().copied().unwrap_or(1));
    match elements {
        0 => None,
        _ if fits(elements) => Some(elements),
        _ if own > 1 && fits(own) => Some(own),
        _ => (2..=LONG).rev().find(|columns| elements.is_multiple_of(*columns) && fits(*columns)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_a_kernel_sums() {
        let columns = |shape: &[usize]| columns(&Shape::from(shape.to_vec()), kernels_cubecl::fused::row_fits);
        assert_eq!(columns(&[16, 512, 1024]), Some(1024));
        assert_eq!(columns(&[3, 100]), Some(300));
        assert_eq!(columns(&[1]), Some(1));
        assert_eq!(columns(&[1 << 20]), Some(8192));
        // Vectors of two would be too many for 6,250.
        assert_eq!(columns(&[2, 50_000]), Some(5000));
        // A prime number.
        assert_eq!(columns(&[65_537]), None);
        assert_eq!(columns(&[3, 0]), None);
    }
}
