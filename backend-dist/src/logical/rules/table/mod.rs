//! Which rule belongs to which operation of Burn's intermediate representation.

mod module;

use super::elementwise::{Linearity, elementwise};
use super::{Completion, Decision, MeshAxis, Operand, Policy, along, indexing, matmul, reduce, shape, unary};
use burn::tensor::IndexingUpdateOp;
use burn_ir::{
    ActivationOperationIr, BaseOperationIr, BinaryOpIr, BoolOperationIr, FloatOperationIr, IntOperationIr,
    NumericOperationIr, OperationIr, ScalarOpIr, TensorIr, UnaryOpIr,
};

/// What the rule of `op` asks for along `axis`, if there is one. The decision's inputs are in the order of
/// [`OperationIr::inputs`], its outputs in the order of [`OperationIr::outputs`]. `operand` describes an input.
pub fn decide<'a>(
    op: &'a OperationIr,
    operand: &dyn Fn(&'a TensorIr) -> Operand<'a>,
    axis: &MeshAxis,
) -> Option<Decision> {
    let table = Table { operand, axis };
    match op {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => table.base(op),
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => table.numeric(op),
        OperationIr::Float(_, op) => table.float(op),
        OperationIr::Int(op) => table.int(op),
        OperationIr::Bool(op) => table.bool(op),
        OperationIr::Activation(op) => table.activation(op),
        OperationIr::Module(op) => table.module(op),
        OperationIr::Init(_) | OperationIr::Custom(_) | OperationIr::Drop(_) => None,
    }
}

struct Table<'a, 'f> {
    operand: &'f dyn Fn(&'a TensorIr) -> Operand<'a>,
    axis: &'f MeshAxis,
}

impl<'a> Table<'a, '_> {
    fn x(&self, tensor: &'a TensorIr) -> Operand<'a> {
        (self.operand)(tensor)
    }

    fn all<const N: usize>(&self, tensors: [&'a TensorIr; N]) -> [Operand<'a>; N] {
        tensors.map(|tensor| self.x(tensor))
    }

    fn pointwise<const N: usize>(
        &self,
        linearity: Linearity,
        inputs: [&'a TensorIr; N],
        out: &TensorIr,
    ) -> Option<Decision> {
        elementwise(linearity, &self.all(inputs), &out.shape)
    }

    fn binary(&self, linearity: Linearity, op: &'a BinaryOpIr) -> Option<Decision> {
        self.pointwise(linearity, [&op.lhs, &op.rhs], &op.out)
    }

    fn map(&self, op: &'a UnaryOpIr) -> Option<Decision> {
        unary(self.x(&op.input), false, Some)
    }

    fn scalar(&self, linear: bool, op: &'a ScalarOpIr) -> Option<Decision> {
        unary(self.x(&op.lhs), linear, Some)
    }

    fn base(&self, op: &'a BaseOperationIr) -> Option<Decision> {
        use BaseOperationIr as Op;
        match op {
            Op::Reshape(op) => shape::reshape(self.x(&op.input), &op.out.shape, self.axis.ranks),
            Op::SwapDims(op) => {
                let mut axes: Vec<usize> = (0..op.input.shape.num_dims()).collect();
                axes.swap(op.dim1, op.dim2);
                shape::permute(self.x(&op.input), &axes)
            }
            Op::Permute(op) => shape::permute(self.x(&op.input), &op.axes),
            Op::Flip(op) => unary(self.x(&op.input), true, |dim| (!op.axes.contains(&dim)).then_some(dim)),
            Op::Expand(op) => shape::expand(self.x(&op.input), &op.out.shape),
            Op::Unfold(op) => along(self.x(&op.input), op.dim, true),
            Op::Slice(op) => shape::slice(self.x(&op.tensor), &op.ranges),
            Op::SliceAssign(op) => shape::slice_assign(self.x(&op.tensor), self.x(&op.value), &op.ranges),
            Op::Select(op) => indexing::select(self.x(&op.tensor), self.x(&op.indices), op.dim),
            Op::SelectAssign(op) if op.update == IndexingUpdateOp::Add => {
                indexing::select_add(self.x(&op.tensor), self.x(&op.indices), self.x(&op.value), op.dim)
            }
            Op::Gather(op) => indexing::gather(self.x(&op.tensor), self.x(&op.indices), op.dim),
            Op::Scatter(op) if op.update == IndexingUpdateOp::Add => {
                indexing::scatter_add(self.x(&op.tensor), self.x(&op.indices), self.x(&op.value), op.dim)
            }
            Op::MaskWhere(op) => self.pointwise(Linearity::None, [&op.tensor, &op.mask, &op.value], &op.out),
            Op::MaskFill(op) => self.pointwise(Linearity::None, [&op.tensor, &op.mask], &op.out),
            Op::Equal(op) | Op::NotEqual(op) => self.binary(Linearity::None, op),
            Op::EqualElem(op) | Op::NotEqualElem(op) => self.scalar(false, op),
            Op::RepeatDim(op) => shape::repeat(self.x(&op.tensor), op.dim),
            Op::Cat(op) => {
                let inputs: Vec<_> = op.tensors.iter().map(|tensor| self.x(tensor)).collect();
                shape::cat(&inputs, op.dim)
            }
            Op::Cast(op) => unary(self.x(&op.input), true, Some),
            Op::Empty(_) | Op::Ones(_) | Op::Zeros(_) => shape::created(),
            Op::All(op) | Op::Any(op) => reduce::other(self.x(&op.input), &every(&op.input)),
            Op::AllDim(op) | Op::AnyDim(op) => reduce::other(self.x(&op.input), &[op.axis]),
            _ => None,
        }
    }

    fn numeric(&self, op: &'a NumericOperationIr) -> Option<Decision> {
        use NumericOperationIr as Op;
        match op {
            Op::Add(op) | Op::Sub(op) => self.binary(Linearity::Joint, op),
            Op::Mul(op) => self.binary(Linearity::Each, op),
            Op::Div(op) if op.lhs.dtype.is_float() => self.binary(Linearity::First, op),
            Op::Div(op)
            | Op::Rem(op)
            | Op::Powi(op)
            | Op::Greater(op)
            | Op::GreaterEqual(op)
            | Op::Lower(op)
            | Op::LowerEqual(op) => self.binary(Linearity::None, op),
            Op::MulScalar(op) => self.scalar(true, op),
            Op::DivScalar(op) => self.scalar(op.lhs.dtype.is_float(), op),
            Op::AddScalar(op)
            | Op::SubScalar(op)
            | Op::RemScalar(op)
            | Op::PowiScalar(op)
            | Op::GreaterElem(op)
            | Op::GreaterEqualElem(op)
            | Op::LowerElem(op)
            | Op::LowerEqualElem(op)
            | Op::ClampMin(op)
            | Op::ClampMax(op) => self.scalar(false, op),
            Op::Clamp(op) => unary(self.x(&op.tensor), false, Some),
            Op::Neg(op) => unary(self.x(&op.input), true, Some),
            Op::Abs(op) | Op::Sign(op) => self.map(op),
            Op::Full(_) => shape::created(),
            Op::Sum(op) => reduce::sum(self.x(&op.input), &every(&op.input)),
            Op::SumDim(op) => reduce::sum(self.x(&op.input), &[op.axis]),
            Op::SumDims(op) => reduce::sum(self.x(&op.input), &op.axes),
            Op::Mean(op) if op.input.dtype.is_float() => {
                reduce::mean(self.x(&op.input), &every(&op.input), self.axis.ranks)
            }
            Op::MeanDim(op) if op.input.dtype.is_float() => {
                reduce::mean(self.x(&op.input), &[op.axis], self.axis.ranks)
            }
            Op::Max(op) if op.input.dtype.is_float() => {
                reduce::extremum(self.x(&op.input), &every(&op.input), Completion::Max)
            }
            Op::Min(op) if op.input.dtype.is_float() => {
                reduce::extremum(self.x(&op.input), &every(&op.input), Completion::Min)
            }
            Op::MaxDim(op) if op.input.dtype.is_float() => {
                reduce::extremum(self.x(&op.input), &[op.axis], Completion::Max)
            }
            Op::MinDim(op) if op.input.dtype.is_float() => {
                reduce::extremum(self.x(&op.input), &[op.axis], Completion::Min)
            }
            Op::Prod(op) | Op::Max(op) | Op::Min(op) | Op::MaxAbs(op) => {
                reduce::other(self.x(&op.input), &every(&op.input))
            }
            Op::ProdDim(op)
            | Op::ArgMax(op)
            | Op::ArgMin(op)
            | Op::ArgTopK(op)
            | Op::TopK(op)
            | Op::MaxDim(op)
            | Op::MinDim(op)
            | Op::MaxAbsDim(op) => reduce::other(self.x(&op.input), &[op.axis]),
            Op::MaxDimWithIndices(op) | Op::MinDimWithIndices(op) => {
                reduce::other(self.x(&op.tensor), &[op.dim]).map(|decision| decision.with_outputs(2))
            }
            Op::TopKWithIndices(op) => {
                reduce::other(self.x(&op.tensor), &[op.dim]).map(|decision| decision.with_outputs(2))
            }
            Op::CumSum(op) => along(self.x(&op.input), op.axis, true),
            Op::CumProd(op) | Op::CumMin(op) | Op::CumMax(op) => along(self.x(&op.input), op.axis, false),
            Op::Sort(op) | Op::ArgSort(op) => along(self.x(&op.input), op.dim, false),
            Op::SortWithIndices(op) => along(self.x(&op.input), op.dim, false).map(|decision| decision.with_outputs(2)),
            Op::Pad(op) => unary(self.x(&op.input), false, |dim| {
                (op.padding.len() == op.input.shape.num_dims() && op.padding[dim] == (0, 0)).then_some(dim)
            }),
            _ => None,
        }
    }

    fn float(&self, op: &'a FloatOperationIr) -> Option<Decision> {
        use FloatOperationIr as Op;
        match op {
            Op::Matmul(op) => matmul::matmul(self.x(&op.lhs), self.x(&op.rhs), self.axis.policy),
            Op::PowfScalar(op) | Op::FmodScalar(op) => self.scalar(false, op),
            Op::Powf(op) | Op::Hypot(op) | Op::Fmod(op) | Op::ArcTan2(op) => self.binary(Linearity::None, op),
            Op::IntoInt(op) => unary(self.x(&op.input), false, Some),
            Op::Exp(op)
            | Op::Log(op)
            | Op::Log1p(op)
            | Op::Erf(op)
            | Op::Sqrt(op)
            | Op::Cos(op)
            | Op::Cosh(op)
            | Op::Sin(op)
            | Op::Sinh(op)
            | Op::Tan(op)
            | Op::Tanh(op)
            | Op::ArcCos(op)
            | Op::ArcCosh(op)
            | Op::ArcSin(op)
            | Op::ArcSinh(op)
            | Op::ArcTan(op)
            | Op::ArcTanh(op)
            | Op::Round(op)
            | Op::Floor(op)
            | Op::Ceil(op)
            | Op::Trunc(op)
            | Op::Recip(op)
            | Op::IsNan(op)
            | Op::IsInf(op) => self.map(op),
            _ => None,
        }
    }

    fn int(&self, op: &'a IntOperationIr) -> Option<Decision> {
        use IntOperationIr as Op;
        match op {
            Op::IntoFloat(op) => unary(self.x(&op.input), true, Some),
            Op::Matmul(op) => matmul::matmul(self.x(&op.lhs), self.x(&op.rhs), Policy::WeightsStay),
            Op::BitwiseAnd(op)
            | Op::BitwiseOr(op)
            | Op::BitwiseXor(op)
            | Op::BitwiseLeftShift(op)
            | Op::BitwiseRightShift(op) => self.binary(Linearity::None, op),
            Op::BitwiseAndScalar(op)
            | Op::BitwiseOrScalar(op)
            | Op::BitwiseXorScalar(op)
            | Op::BitwiseLeftShiftScalar(op)
            | Op::BitwiseRightShiftScalar(op) => self.scalar(false, op),
            Op::BitwiseNot(op) => self.map(op),
        }
    }

    fn bool(&self, op: &'a BoolOperationIr) -> Option<Decision> {
        use BoolOperationIr as Op;
        match op {
            Op::IntoFloat(op) | Op::IntoInt(op) => unary(self.x(&op.input), false, Some),
            Op::Not(op) => self.map(op),
            Op::And(op) | Op::Or(op) | Op::Xor(op) => self.binary(Linearity::None, op),
        }
    }

    fn activation(&self, op: &'a ActivationOperationIr) -> Option<Decision> {
        use ActivationOperationIr as Op;
        match op {
            Op::Relu(op) | Op::Gelu(op) | Op::Sigmoid(op) | Op::LogSigmoid(op) => self.map(op),
            Op::LeakyRelu(op) => self.scalar(false, op),
            Op::HardSigmoid(op) => unary(self.x(&op.tensor), false, Some),
            Op::ReluBackward(op) | Op::GeluBackward(op) | Op::SigmoidBackward(op) | Op::LogSigmoidBackward(op) => {
                self.binary(Linearity::None, op)
            }
            Op::Softmax(op) | Op::LogSoftmax(op) | Op::Softmin(op) => along(self.x(&op.input), op.axis, false),
            Op::PRelu(_) => None,
        }
    }
}

fn every(tensor: &TensorIr) -> Vec<usize> {
    (0..tensor.shape.num_dims()).collect()
}
