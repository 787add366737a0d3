//! Sequences of elementwise operations that a program asks for at once: a message takes it as long as an operation.

use burn_ir::{
    BinaryOpIr, FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorId, TensorIr,
    TensorStatus, UnaryOpIr,
};
use serde::{Deserialize, Serialize};

/// What AdamW computes of two tensors `a` and `b` of one shape, in the operations and the order of Burn's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Formula {
    /// `decay a + rest b`.
    Mean { decay: f64, rest: f64 },
    /// `decay a + rest b²`.
    MeanOfSquares { decay: f64, rest: f64 },
    /// `a / first / (sqrt(b / second) + epsilon)`.
    Ratio { first: f64, second: f64, epsilon: f64 },
    /// `keep a - rate b`.
    Step { keep: f64, rate: f64 },
}

impl Formula {
    /// The operations. Inputs that may be written over are, by the operation that reads them last.
    pub fn operations(
        self,
        a: &TensorIr,
        b: &TensorIr,
        out: &TensorIr,
        new_id: impl FnMut() -> TensorId,
    ) -> Vec<OperationIr> {
        let mut ops = Operations { like: out, new_id, ops: Vec::new() };
        match self {
            Self::Mean { decay, rest } => {
                let a = ops.scalar(NumericOperationIr::MulScalar, a, decay);
                let b = ops.scalar(NumericOperationIr::MulScalar, b, rest);
                ops.binary(NumericOperationIr::Add, &a, &b, out.clone());
            }
            Self::MeanOfSquares { decay, rest } => {
                let a = ops.scalar(NumericOperationIr::MulScalar, a, decay);
                let square = ops.tensor();
                let kept = TensorIr { status: TensorStatus::ReadOnly, ..b.clone() };
                ops.binary(NumericOperationIr::Mul, &kept, b, square.clone());
                let b = ops.scalar(NumericOperationIr::MulScalar, &last(square), rest);
                ops.binary(NumericOperationIr::Add, &a, &b, out.clone());
            }
            Self::Ratio { first, second, epsilon } => {
                let a = ops.scalar(NumericOperationIr::DivScalar, a, first);
                let b = ops.scalar(NumericOperationIr::DivScalar, b, second);
                let root = ops.tensor();
                let sqrt = UnaryOpIr { input: b, out: root.clone() };
                ops.ops.push(OperationIr::Float(out.dtype, FloatOperationIr::Sqrt(sqrt)));
                let b = ops.scalar(NumericOperationIr::AddScalar, &last(root), epsilon);
                ops.binary(NumericOperationIr::Div, &a, &b, out.clone());
            }
            Self::Step { keep, rate } => {
                let a = ops.scalar(NumericOperationIr::MulScalar, a, keep);
                let b = ops.scalar(NumericOperationIr::MulScalar, b, rate);
                ops.binary(NumericOperationIr::Sub, &a, &b, out.clone());
            }
        }
        ops.ops
    }
}

struct Operations<'a, F> {
    like: &'a TensorIr,
    new_id: F,
    ops: Vec<OperationIr>,
}

impl<F: FnMut() -> TensorId> Operations<'_, F> {
    fn tensor(&mut self) -> TensorIr {
        TensorIr { id: (self.new_id)(), status: TensorStatus::NotInit, ..self.like.clone() }
    }

    /// What `op` makes of `x` and a number, for one reader.
    fn scalar(&mut self, op: fn(ScalarOpIr) -> NumericOperationIr, x: &TensorIr, number: f64) -> TensorIr {
        let out = self.tensor();
        let op = op(ScalarOpIr { lhs: x.clone(), rhs: ScalarIr::Float(number), out: out.clone() });
        self.ops.push(OperationIr::NumericFloat(out.dtype, op));
        last(out)
    }

    fn binary(&mut self, op: fn(BinaryOpIr) -> NumericOperationIr, a: &TensorIr, b: &TensorIr, out: TensorIr) {
        let dtype = out.dtype;
        let op = op(BinaryOpIr { lhs: a.clone(), rhs: b.clone(), out });
        self.ops.push(OperationIr::NumericFloat(dtype, op));
    }
}

/// The tensor as its last reader sees it.
fn last(x: TensorIr) -> TensorIr {
    TensorIr { status: TensorStatus::ReadWrite, ..x }
}
