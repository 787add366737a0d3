//! What kinds of operations there are to memory and arithmetic.

use burn::tensor::DType;
use burn_ir::{BaseOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr, TensorIr};

/// Whether the output has the input's elements, and may have its memory.
pub fn is_view(op: &OperationIr) -> bool {
    use BaseOperationIr as Op;
    let (OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op)) = op else { return false };
    matches!(op, Op::Reshape(_) | Op::SwapDims(_) | Op::Permute(_) | Op::Expand(_))
}

/// Whether a view needs elements in their order, and so a copy of what is in another.
pub fn writes_strides(op: &OperationIr) -> bool {
    use BaseOperationIr as Op;
    let (OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op)) = op else { return false };
    matches!(op, Op::Reshape(_))
}

/// Whether the output may be written over an input of its size.
pub fn is_in_place(op: &OperationIr) -> bool {
    use BaseOperationIr as Op;
    match op {
        OperationIr::Float(_, op) => !matches!(op, FloatOperationIr::Matmul(_)),
        OperationIr::NumericFloat(..) | OperationIr::NumericInt(..) | OperationIr::Int(_) | OperationIr::Bool(_) => {
            true
        }
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            matches!(op, Op::MaskFill(_) | Op::MaskWhere(_) | Op::SliceAssign(_) | Op::Scatter(_) | Op::SelectAssign(_))
        }
        _ => false,
    }
}

/// Whether the output is half precision under autocast.
pub fn makes_half(op: &OperationIr) -> bool {
    use ModuleOperationIr as Op;
    match op {
        OperationIr::Float(dtype, FloatOperationIr::Matmul(_)) => *dtype == DType::F32,
        OperationIr::Module(op) => matches!(
            op,
            Op::Linear(_)
                | Op::LinearXBackward(_)
                | Op::Attention(_)
                | Op::AttentionWithLogsumexp(_)
                | Op::AttentionBackward(_)
        ),
        _ => false,
    }
}

/// Whether the output is half precision under autocast if all inputs are: not sums over rows.
pub fn keeps_half(op: &OperationIr) -> bool {
    match op {
        OperationIr::BaseFloat(_) | OperationIr::Float(..) => true,
        OperationIr::NumericFloat(_, op) => !matches!(
            op,
            NumericOperationIr::Sum(_)
                | NumericOperationIr::SumDim(_)
                | NumericOperationIr::SumDims(_)
                | NumericOperationIr::Mean(_)
                | NumericOperationIr::MeanDim(_)
        ),
        _ => false,
    }
}

/// Floating-point operations of a GEMM, a convolution or attention, with two for a multiplication with an addition.
pub fn flops(op: &OperationIr) -> f64 {
    use ModuleOperationIr as Op;
    let elements = |x: &TensorIr| x.shape.num_elements() as f64;
    let last = |x: &TensorIr, back: usize| x.shape[x.shape.num_dims() - back] as f64;
    let filter = |weight: &TensorIr| elements(weight) / weight.shape[0] as f64;
    match op {
        OperationIr::Float(_, FloatOperationIr::Matmul(op)) => 2.0 * elements(&op.out) * last(&op.lhs, 1),
        OperationIr::Module(op) => match op {
            Op::Linear(op) => 2.0 * elements(&op.out) * last(&op.x, 1),
            Op::LinearXBackward(op) => 2.0 * elements(&op.out) * last(&op.output_grad, 1),
            Op::LinearWeightBackward(op) => 2.0 * elements(&op.x) * last(&op.output_grad, 1),
            Op::Conv1d(op) => 2.0 * elements(&op.out) * filter(&op.weight),
            Op::Conv2d(op) => 2.0 * elements(&op.out) * filter(&op.weight),
            Op::Conv3d(op) => 2.0 * elements(&op.out) * filter(&op.weight),
            Op::Conv1dXBackward(op) => 2.0 * elements(&op.output_grad) * filter(&op.weight),
            Op::Conv1dWeightBackward(op) => 2.0 * elements(&op.output_grad) * filter(&op.weight),
            Op::Conv2dXBackward(op) => 2.0 * elements(&op.output_grad) * filter(&op.weight),
            Op::Conv2dWeightBackward(op) => 2.0 * elements(&op.output_grad) * filter(&op.weight),
            Op::Conv3dXBackward(op) => 2.0 * elements(&op.output_grad) * filter(&op.weight),
            Op::Conv3dWeightBackward(op) => 2.0 * elements(&op.output_grad) * filter(&op.weight),
            Op::DeformableConv2d(op) => 2.0 * elements(&op.out) * filter(&op.weight),
            Op::DeformableConv2dBackward(op) => 4.0 * elements(&op.out_grad) * filter(&op.weight),
            Op::ConvTranspose1d(op) => 2.0 * elements(&op.x) * filter(&op.weight),
            Op::ConvTranspose2d(op) => 2.0 * elements(&op.x) * filter(&op.weight),
            Op::ConvTranspose3d(op) => 2.0 * elements(&op.x) * filter(&op.weight),
            Op::ConvTranspose1dWeightBackward(op) => 2.0 * elements(&op.x) * filter(&op.weight),
            Op::ConvTranspose2dWeightBackward(op) => 2.0 * elements(&op.x) * filter(&op.weight),
            Op::ConvTranspose3dWeightBackward(op) => 2.0 * elements(&op.x) * filter(&op.weight),
            Op::Attention(op) => 4.0 * elements(&op.query) * last(&op.key, 2),
            Op::AttentionWithLogsumexp(op) => 4.0 * elements(&op.query) * last(&op.key, 2),
            Op::AttentionBackward(op) => 10.0 * elements(&op.query) * last(&op.key, 2),
            _ => 0.0,
        },
        _ => 0.0,
    }
}
