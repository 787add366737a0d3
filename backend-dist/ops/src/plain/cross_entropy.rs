//! The local steps of the vocabulary-parallel cross-entropy. Columns from `valid` on are padding and are ignored.

use burn::backend::{
    Backend, FloatDType, IntDType, Scalar, Shape, TensorMetadata,
    tensor::{FloatTensor as Float, IntTensor},
};

use super::{dims, narrow, reshape, rows, widen};
use crate::dtype::cast;
use crate::kernels::LocalKernels;

/// Maximum of each token's logits, `[s, b]`; far below every logit if this rank holds only padding.
pub fn maximum<B: Backend>(logits: Float<B>, valid: usize) -> Float<B> {
    let shape = dims(&logits);
    let logits = widen::<B>(logits).0;
    let lead = &shape[..shape.len() - 1];
    if valid == 0 {
        let dtype = FloatDType::from(logits.dtype());
        return B::float_full(Shape::from(lead.to_vec()), Scalar::Float(-1e30), &logits.device(), dtype);
    }
    let logits = narrow::<B>(rows::<B>(logits), 1, 0, valid);
    reshape::<B>(B::float_max_dim(logits, 1), lead)
}

/// 1 at the label's column if this rank holds it, else 0: `[rows, columns]` in the type of `like`.
fn one_hot<B: Backend>(labels: IntTensor<B>, first_row: usize, columns: usize, like: &Float<B>) -> Float<B> {
    let n: usize = dims(&labels).iter().product();
    let dtype = FloatDType::from(like.dtype());
    let labels = B::int_sub_scalar(B::int_reshape(labels, Shape::new([n, 1])), Scalar::Int(first_row as i64));
    let device = like.device();
    let columns = B::int_arange(0..columns as i64, &device, IntDType::from(labels.dtype()));
    let distance = B::int_abs(B::int_sub(B::int_reshape(columns.clone(), Shape::new([1, dims(&columns)[0]])), labels));
    let differs = B::int_into_float(B::int_clamp(distance, Scalar::Int(0), Scalar::Int(1)), dtype);
    B::float_add_scalar(B::float_neg(differs), Scalar::Float(1.0))
}

/// `Σ exp(logit - max)` and the label's `logit - max` (0 if another rank holds it), stacked: `[2, s, b]`.
pub fn sums<B: LocalKernels>(
    logits: Float<B>,
    max: Float<B>,
    labels: IntTensor<B>,
    first_row: usize,
    valid: usize,
) -> Float<B> {
    let mut shape = dims(&max);
    shape.insert(0, 2);
    let n: usize = dims(&max).iter().product();
    let logits = widen::<B>(logits).0;
    if valid == 0 {
        let dtype = FloatDType::from(logits.dtype());
        return B::float_zeros(Shape::from(shape), &logits.device(), dtype);
    }
    let shifted = B::float_sub(narrow::<B>(rows::<B>(logits), 1, 0, valid), reshape::<B>(max, [n, 1]));
    let chosen = one_hot::<B>(labels, first_row, valid, &shifted);
    let predicted = B::sum_dim(B::float_mul(shifted.clone(), chosen), 1);
    let total = B::sum_dim(B::float_exp(shifted), 1);
    let parts = [total, predicted].map(|x| reshape::<B>(x, [1, n]));
    reshape::<B>(B::float_cat(parts.into(), 0), shape)
}

/// Gradient in the logits, `(softmax - [label]) grad`, from the global log-sum-exp; zero in the padding.
pub fn logits_grad<B: Backend>(
    logits: Float<B>,
    lse: Float<B>,
    labels: IntTensor<B>,
    grad: Float<B>,
    first_row: usize,
    valid: usize,
) -> Float<B> {
    let shape = dims(&logits);
    let columns = shape[shape.len() - 1];
    let (logits, dtype) = widen::<B>(logits);
    let logits = rows::<B>(logits);
    let n = dims(&logits)[0];
    let softmax = B::float_exp(B::float_sub(logits, reshape::<B>(lse, [n, 1])));
    let chosen = one_hot::<B>(labels, first_row, columns, &softmax);
    let out = B::float_mul(B::float_sub(softmax, chosen), reshape::<B>(grad, [n, 1]));
    let out = if valid == columns {
        out
    } else {
        let padding = Shape::new([n, columns - valid]);
        let padding = B::float_zeros(padding, &out.device(), FloatDType::from(out.dtype()));
        if valid == 0 { padding } else { B::float_cat(vec![narrow::<B>(out, 1, 0, valid), padding], 1) }
    };
    cast::<B>(reshape::<B>(out, shape), dtype)
}
