//! A sequence of elementwise operations that a program asks for at once: a message takes it as long as an operation.

use burn_ir::{
    BinaryOpIr, FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorId, TensorIr,
    TensorStatus, UnaryOpIr,
};
use serde::{Deserialize, Serialize};

/// A step of AdamW, in the operations and the order of Burn's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdamWStep {
    /// How much of each moment stays, and what of the gradient, or its square, comes to it.
    pub decays: [f64; 2],
    pub rests: [f64; 2],
    /// What the moments are divided by.
    pub corrections: [f64; 2],
    pub epsilon: f64,
    /// What the weight is multiplied by.
    pub keep: f64,
    pub rate: f64,
}

impl AdamWStep {
    /// Its numbers, in the order of [`operations`](Self::operations).
    pub fn numbers(self) -> [f64; 9] {
        let Self { decays, rests, corrections, epsilon, keep, rate } = self;
        [decays[0], rests[0], decays[1], rests[1], corrections[0], corrections[1], epsilon, keep, rate]
    }

    /// The step of these [`numbers`](Self::numbers).
    pub fn of_numbers([decay_1, rest_1, decay_2, rest_2, first, second, epsilon, keep, rate]: [f64; 9]) -> Self {
        let (decays, rests, corrections) = ([decay_1, decay_2], [rest_1, rest_2], [first, second]);
        Self { decays, rests, corrections, epsilon, keep, rate }
    }

    /// The weight, both moments, and the gradient become weight and moments. Inputs that may be written over are, by the
    /// operation that reads them last.
    pub fn operations(
        self,
        [weight, moment_1, moment_2, gradient]: [&TensorIr; 4],
        outs: [&TensorIr; 3],
        new_id: impl FnMut() -> TensorId,
    ) -> Vec<OperationIr> {
        use NumericOperationIr::{Add, AddScalar, Div, DivScalar, Mul, MulScalar, Sub};
        let [new_weight, new_1, new_2] = outs.map(Clone::clone);
        let kept = |x: &TensorIr| TensorIr { status: TensorStatus::ReadOnly, ..x.clone() };
        let mut ops = Operations { like: outs[0], new_id, ops: Vec::with_capacity(15) };
        let a = ops.scalar(MulScalar, moment_1, self.decays[0]);
        let b = ops.scalar(MulScalar, &kept(gradient), self.rests[0]);
        ops.binary(Add, &a, &b, new_1.clone());
        let a = ops.scalar(MulScalar, moment_2, self.decays[1]);
        let square = ops.tensor();
        ops.binary(Mul, &kept(gradient), gradient, square.clone());
        let b = ops.scalar(MulScalar, &last(square), self.rests[1]);
        ops.binary(Add, &a, &b, new_2.clone());
        let a = ops.scalar(DivScalar, &kept(&new_1), self.corrections[0]);
        let b = ops.scalar(DivScalar, &kept(&new_2), self.corrections[1]);
        let root = ops.tensor();
        let sqrt = UnaryOpIr { input: b, out: root.clone() };
        ops.ops.push(OperationIr::Float(root.dtype, FloatOperationIr::Sqrt(sqrt)));
        let b = ops.scalar(AddScalar, &last(root), self.epsilon);
        let ratio = ops.tensor();
        ops.binary(Div, &a, &b, ratio.clone());
        let a = ops.scalar(MulScalar, weight, self.keep);
        let b = ops.scalar(MulScalar, &last(ratio), self.rate);
        ops.binary(Sub, &a, &b, new_weight);
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
