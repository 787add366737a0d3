//! Functions of a whole row: softmax and layer normalization.

use super::Expression::{self, Number, Tensor};
use super::{binary, number};
use burn_ir::{DimOpIr, LayerNormOpIr, TensorIr};
use kernels_cubecl::fused::{Binary, Reduce, Unary};

pub(super) fn over_row(f: Reduce, x: Expression<'_>) -> Expression<'_> {
    Expression::Reduce(f, Box::new(x))
}

/// The mean of numbers of which this is the sum.
pub(super) fn share(sum: Expression<'_>, count: usize) -> Expression<'_> {
    binary(Binary::Mul, sum, Number(1.0 / count as f64))
}

/// As Burn's own, which subtracts the largest number of a row first; or its logarithm.
pub(super) fn softmax(op: &DimOpIr, is_log: bool) -> Option<(Expression<'_>, &TensorIr)> {
    let shifted = || binary(Binary::Sub, Tensor(&op.input), over_row(Reduce::Max, Tensor(&op.input)));
    let exp = || Expression::Unary(Unary::Exp, Box::new(shifted()));
    let sum = over_row(Reduce::Sum, exp());
    let softmax = match is_log {
        true => binary(Binary::Sub, shifted(), Expression::Unary(Unary::Log, Box::new(sum))),
        false => binary(Binary::Div, exp(), sum),
    };
    let is_last = op.axis + 1 == op.input.shape.num_dims();
    is_last.then_some((softmax, &op.out))
}

/// As Burn computes it where no gradient is tracked; there it is several operations.
pub(super) fn layer_norm(op: &LayerNormOpIr) -> (Expression<'_>, &TensorIr) {
    let columns = op.input.shape[op.input.shape.num_dims() - 1];
    let mean = |x| share(over_row(Reduce::Sum, x), columns);
    let centered = || binary(Binary::Sub, Tensor(&op.input), mean(Tensor(&op.input)));
    let variance = mean(binary(Binary::Mul, centered(), centered()));
    let deviation = binary(Binary::Add, variance, Number(number(&op.epsilon)));
    let deviation = Expression::Unary(Unary::Sqrt, Box::new(deviation));
    let scaled = binary(Binary::Mul, binary(Binary::Div, centered(), deviation), Tensor(&op.gamma));
    let normed = match &op.beta {
        Some(beta) => binary(Binary::Add, scaled, Tensor(beta)),
        None => scaled,
    };
    (normed, &op.out)
}
