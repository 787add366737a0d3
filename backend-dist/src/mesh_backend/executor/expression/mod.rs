//! Burn's operations as expressions that a fused kernel can compute.

mod of_rows;

use burn_ir::{
    ActivationOperationIr, BaseOperationIr, BinaryOpIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr,
    OperationIr, ReduceDimOpIr, ScalarIr, ScalarOpIr, TensorIr, UnaryOpIr,
};
use kernels_cubecl::fused::{Binary, Draw, Reduce, Unary};
use of_rows::{layer_norm, over_row, share, softmax};

/// What an operation computes for every element, broadcasting its inputs.
#[derive(Debug)]
pub(super) enum Expression<'a> {
    Tensor(&'a TensorIr),
    Number(f64),
    /// One where a tensor of booleans is true, else zero.
    Mask(&'a TensorIr),
    Unary(Unary, Box<Expression<'a>>),
    Binary(Binary, Box<Expression<'a>>, Box<Expression<'a>>),
    /// Over the last dimension.
    Reduce(Reduce, Box<Expression<'a>>),
    /// Random zeros and ones.
    Bernoulli(Draw),
}

/// What a tensor is that is not in memory, but computed where it is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Generated {
    /// All elements are one number.
    Number(f64),
    /// Random zeros and ones: its elements, row by row, are those of the draw.
    Draw(Draw),
}

use Expression::{Bernoulli, Number, Tensor};

/// The expression of `op` and its output, if it has one. Tensors that are `generated` are what they are computed from.
pub(super) fn expression(
    op: &OperationIr,
    generated: impl Fn(&TensorIr) -> Option<Generated>,
) -> Option<(Expression<'_>, &TensorIr)> {
    let (mut expression, out) = match op {
        OperationIr::NumericFloat(_, op) => numeric(op),
        OperationIr::Float(_, op) => float(op),
        OperationIr::Activation(op) => activation(op),
        OperationIr::Module(ModuleOperationIr::LayerNorm(op)) => Some(layer_norm(op)),
        OperationIr::BaseFloat(BaseOperationIr::MaskFill(op)) => {
            Some((masked(Tensor(&op.tensor), &op.mask, Number(number(&op.value))), &op.out))
        }
        OperationIr::BaseFloat(BaseOperationIr::MaskWhere(op)) => {
            Some((masked(Tensor(&op.tensor), &op.mask, Tensor(&op.value)), &op.out))
        }
        _ => None,
    }?;
    expression.replace(&|x| match generated(x)? {
        Generated::Number(value) => Some(Number(value)),
        // An element has its own draw: one that is broadcast is not drawn again.
        Generated::Draw(draw) => (x.shape == out.shape).then_some(Bernoulli(draw)),
    });
    Some((expression, out))
}

/// The number that is all elements of `op`'s output.
pub(super) fn constant(op: &OperationIr) -> Option<(f64, &TensorIr)> {
    match op {
        OperationIr::BaseFloat(BaseOperationIr::Ones(op)) => Some((1.0, &op.out)),
        OperationIr::BaseFloat(BaseOperationIr::Zeros(op)) => Some((0.0, &op.out)),
        OperationIr::NumericFloat(_, NumericOperationIr::Full(op)) => Some((number(&op.value), &op.out)),
        _ => None,
    }
}

fn numeric(op: &NumericOperationIr) -> Option<(Expression<'_>, &TensorIr)> {
    use NumericOperationIr as Op;
    match op {
        Op::Add(op) => Some(two(Binary::Add, op)),
        Op::Sub(op) => Some(two(Binary::Sub, op)),
        Op::Mul(op) => Some(two(Binary::Mul, op)),
        Op::Div(op) => Some(two(Binary::Div, op)),
        Op::AddScalar(op) => Some(with_number(Binary::Add, op)),
        Op::SubScalar(op) => Some(with_number(Binary::Sub, op)),
        Op::MulScalar(op) => Some(with_number(Binary::Mul, op)),
        Op::DivScalar(op) => Some(with_number(Binary::Div, op)),
        Op::ClampMin(op) => Some(with_number(Binary::Max, op)),
        Op::ClampMax(op) => Some(with_number(Binary::Min, op)),
        Op::Clamp(op) => {
            let least = binary(Binary::Max, Tensor(&op.tensor), Number(number(&op.min)));
            Some((binary(Binary::Min, least, Number(number(&op.max))), &op.out))
        }
        Op::Abs(op) => Some(one(Unary::Abs, op)),
        Op::Neg(op) => Some(one(Unary::Neg, op)),
        Op::PowiScalar(op) => power(op),
        Op::SumDim(op) => reduce(Reduce::Sum, op),
        Op::MaxDim(op) => reduce(Reduce::Max, op),
        Op::MeanDim(op) => {
            let (sum, out) = reduce(Reduce::Sum, op)?;
            Some((share(sum, op.input.shape[op.axis]), out))
        }
        _ => None,
    }
}

fn float(op: &FloatOperationIr) -> Option<(Expression<'_>, &TensorIr)> {
    use FloatOperationIr as Op;
    match op {
        Op::Exp(op) => Some(one(Unary::Exp, op)),
        Op::Log(op) => Some(one(Unary::Log, op)),
        Op::Log1p(op) => Some(one(Unary::Log1p, op)),
        Op::Erf(op) => Some(one(Unary::Erf, op)),
        Op::Sqrt(op) => Some(one(Unary::Sqrt, op)),
        Op::Tanh(op) => Some(one(Unary::Tanh, op)),
        Op::Sin(op) => Some(one(Unary::Sin, op)),
        Op::Cos(op) => Some(one(Unary::Cos, op)),
        Op::Recip(op) => Some(one(Unary::Recip, op)),
        Op::PowfScalar(op) => power(op),
        _ => None,
    }
}

fn activation(op: &ActivationOperationIr) -> Option<(Expression<'_>, &TensorIr)> {
    use ActivationOperationIr as Op;
    match op {
        Op::Relu(op) => Some(one(Unary::Relu, op)),
        Op::Gelu(op) => Some(one(Unary::Gelu, op)),
        Op::Sigmoid(op) => Some(one(Unary::Sigmoid, op)),
        Op::GeluBackward(op) => Some(two(Binary::GeluGrad, op)),
        Op::ReluBackward(op) => Some(two(Binary::ReluGrad, op)),
        Op::SigmoidBackward(op) => Some(two(Binary::SigmoidGrad, op)),
        Op::Softmax(op) => softmax(op, false),
        Op::LogSoftmax(op) => softmax(op, true),
        _ => None,
    }
}

fn one(f: Unary, op: &UnaryOpIr) -> (Expression<'_>, &TensorIr) {
    (Expression::Unary(f, Box::new(Tensor(&op.input))), &op.out)
}

fn two(f: Binary, op: &BinaryOpIr) -> (Expression<'_>, &TensorIr) {
    (binary(f, Tensor(&op.lhs), Tensor(&op.rhs)), &op.out)
}

fn with_number(f: Binary, op: &ScalarOpIr) -> (Expression<'_>, &TensorIr) {
    (binary(f, Tensor(&op.lhs), Number(number(&op.rhs))), &op.out)
}

fn binary<'a>(f: Binary, a: Expression<'a>, b: Expression<'a>) -> Expression<'a> {
    Expression::Binary(f, Box::new(a), Box::new(b))
}

/// Powers without a logarithm.
fn power(op: &ScalarOpIr) -> Option<(Expression<'_>, &TensorIr)> {
    let x = || Tensor(&op.lhs);
    let square = || binary(Binary::Mul, x(), x());
    let exponent = number(&op.rhs);
    let power = if exponent == 2.0 {
        square()
    } else if exponent == 3.0 {
        binary(Binary::Mul, square(), x())
    } else if exponent == 0.5 {
        Expression::Unary(Unary::Sqrt, Box::new(x()))
    } else if exponent == -0.5 {
        Expression::Unary(Unary::Recip, Box::new(Expression::Unary(Unary::Sqrt, Box::new(x()))))
    } else if exponent == -1.0 {
        Expression::Unary(Unary::Recip, Box::new(x()))
    } else if exponent == 1.0 {
        x()
    } else {
        return None;
    };
    Some((power, &op.out))
}

fn reduce(f: Reduce, op: &ReduceDimOpIr) -> Option<(Expression<'_>, &TensorIr)> {
    if op.input.shape[op.axis] == 1 {
        return Some((Tensor(&op.input), &op.out));
    }
    let is_last = op.axis + 1 == op.input.shape.num_dims();
    is_last.then(|| (over_row(f, Tensor(&op.input)), &op.out))
}

/// `x`, but `value` where the mask is true.
fn masked<'a>(x: Expression<'a>, mask: &'a TensorIr, value: Expression<'a>) -> Expression<'a> {
    let kept = binary(Binary::Unless, x, Expression::Mask(mask));
    match value {
        Number(0.0) => kept,
        value => {
            let others = binary(Binary::Sub, Number(1.0), Expression::Mask(mask));
            binary(Binary::Add, kept, binary(Binary::Unless, value, others))
        }
    }
}

fn number(scalar: &ScalarIr) -> f64 {
    match *scalar {
        ScalarIr::Float(x) => x,
        ScalarIr::Int(x) => x as f64,
        ScalarIr::UInt(x) => x as f64,
        ScalarIr::Bool(x) => f64::from(x),
    }
}

impl<'a> Expression<'a> {
    /// Puts what `generated` gives in place of tensors. Those that a reduction reads remain: it has another shape.
    fn replace(&mut self, generated: &impl Fn(&TensorIr) -> Option<Self>) {
        match self {
            Self::Tensor(x) => {
                if let Some(generated) = generated(x) {
                    *self = generated;
                }
            }
            Self::Number(_) | Self::Mask(_) | Self::Reduce(..) | Self::Bernoulli(_) => {}
            Self::Unary(_, x) => x.replace(generated),
            Self::Binary(_, a, b) => {
                a.replace(generated);
                b.replace(generated);
            }
        }
    }

    /// Its value, if it depends on no tensor.
    pub fn value(&self) -> Option<f64> {
        match self {
            Self::Tensor(_) | Self::Mask(_) | Self::Reduce(..) | Self::Bernoulli(_) => None,
            Self::Number(x) => Some(*x),
            Self::Unary(f, x) => Some(f.of(x.value()?)),
            Self::Binary(f, a, b) => Some(f.of(a.value()?, b.value()?)),
        }
    }

    /// Calls `f` with every tensor.
    pub fn tensors(&self, f: &mut impl FnMut(&'a TensorIr)) {
        match self {
            Self::Tensor(x) | Self::Mask(x) => f(x),
            Self::Number(_) | Self::Bernoulli(_) => {}
            Self::Unary(_, x) | Self::Reduce(_, x) => x.tensors(f),
            Self::Binary(_, a, b) => {
                a.tensors(f);
                b.tensors(f);
            }
        }
    }

    /// Calls `f` with every tensor that is reduced.
    pub fn reduced(&self, f: &mut impl FnMut(&'a TensorIr)) {
        match self {
            Self::Reduce(_, x) => x.tensors(f),
            Self::Tensor(_) | Self::Number(_) | Self::Mask(_) | Self::Bernoulli(_) => {}
            Self::Unary(_, x) => x.reduced(f),
            Self::Binary(_, a, b) => {
                a.reduced(f);
                b.reduced(f);
            }
        }
    }

    /// Whether it reduces a row.
    pub fn reduces(&self) -> bool {
        match self {
            Self::Reduce(..) => true,
            Self::Tensor(_) | Self::Number(_) | Self::Mask(_) | Self::Bernoulli(_) => false,
            Self::Unary(_, x) => x.reduces(),
            Self::Binary(_, a, b) => a.reduces() || b.reduces(),
        }
    }

    /// Whether it draws random numbers.
    pub fn draws(&self) -> bool {
        match self {
            Self::Bernoulli(_) => true,
            Self::Tensor(_) | Self::Number(_) | Self::Mask(_) => false,
            Self::Unary(_, x) | Self::Reduce(_, x) => x.draws(),
            Self::Binary(_, a, b) => a.draws() || b.draws(),
        }
    }
}
