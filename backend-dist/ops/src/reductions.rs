//! Reductions and GEMMs in a fixed order of summation. Burn's own on GPUs are not deterministic: autotuning picks the
//! kernel of a reduction at run time, a thread that races with the tuning may take another one, and some kernels use
//! atomic additions.

use burn::backend::{Backend, Shape, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::operation::{apply, operation};

/// Sum over dimension `dim`, which becomes 1.
///
/// # Panics
/// If there is no such dimension.
pub fn sum_dim<const D: usize>(x: Tensor<D>, dim: usize) -> Tensor<D> {
    assert!(dim < D, "sum_dim: dimension {dim} of {D}");
    apply(SumDim { dim }, [x.into_dispatch()])
}

/// Sum of all elements.
pub fn sum<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    /// Longer sums are reshaped to matrix rows of this length: one long sum occupies few SMs.
    const ROW: usize = 1024;
    let len: usize = x.dims().iter().product();
    let (x, whole): (Tensor<1>, usize) = (x.reshape([len]), len / ROW * ROW);
    if whole == 0 || whole == ROW {
        return sum_dim(x, 0);
    }
    let rows = sum_dim(x.clone().narrow(0, 0, whole).reshape([whole / ROW, ROW]), 1);
    let rows = sum(rows);
    if whole == len { rows } else { rows + sum_dim(x.narrow(0, whole, len - whole), 0) }
}

/// `x` with dimension `dim`, which has one element, repeated `times` times.
///
/// # Panics
/// If that dimension does not have one element.
pub fn expand_dim<const D: usize>(x: Tensor<D>, dim: usize, times: usize) -> Tensor<D> {
    assert!(dim < D && x.dims()[dim] == 1, "expand_dim: dimension {dim} of {:?}", x.dims());
    apply(ExpandDim { dim, times }, [x.into_dispatch()])
}

/// `log Σ exp(x)` over the last dimension, which becomes 1.
pub fn log_sum_exp<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let largest = x.clone().max_dim(D - 1).detach();
    sum_dim((x - largest.clone()).exp(), D - 1).log() + largest
}

/// `a · b` for `a [.., m, k]` and `b [.., k, n]`, whose other dimensions are equal. On GPUs by cuBLASLt, in f32 without
/// TF32.
///
/// # Panics
/// If the sizes do not fit.
pub fn matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    let (left, right) = (a.dims(), b.dims());
    let fits = left[..D - 2] == right[..D - 2] && left[D - 1] == right[D - 2];
    assert!(fits, "matmul: {left:?} · {right:?}");
    apply(Matmul {}, [a, b].map(Tensor::into_dispatch))
}

/// `alpha · a · b + beta · c` for matrices, where `c` is `a`, or `b` unless `left`, which must have the result's shape.
/// On GPUs one GEMM, which rounds once.
///
/// # Panics
/// If the sizes do not fit.
pub fn matmul_mixed(a: Tensor<2>, b: Tensor<2>, [alpha, beta]: [f64; 2], left: bool) -> Tensor<2> {
    let ([rows, inner], [other, columns]) = (a.dims(), b.dims());
    let fits = inner == other && if left { columns == inner } else { rows == inner };
    assert!(fits, "matmul_mixed: [{rows}, {inner}] · [{other}, {columns}], {}", if left { "left" } else { "right" });
    apply(MatmulMixed { alpha, beta, left }, [a, b].map(Tensor::into_dispatch))
}

fn expand<B: Backend>(x: FloatTensor<B>, dim: usize, size: usize) -> FloatTensor<B> {
    let mut shape = x.shape().to_vec();
    shape[dim] = size;
    B::float_expand(x, Shape::from(shape))
}

operation! {
    /// Saves the dimension and its size.
    SumDim { dim: usize }, 1, (usize, usize),
    |[x], _, _| {
        let size = x.shape()[dim];
        (B::sum_dim(x, dim), Some((dim, size)))
    },
    |(dim, size), grad, parents| parents.register::<B>([expand::<B>(grad, dim, size)]),
}

operation! {
    ExpandDim { dim: usize, times: usize }, 1, usize,
    |[x], _, _| (expand::<B>(x, dim, times), Some(dim)),
    |dim, grad, parents| parents.register::<B>([B::sum_dim(grad, dim)]),
}

operation! {
    /// Saves each factor, if the other one needs a gradient.
    Matmul {}, 2, [Option<FloatTensor<B>>; 2],
    |[a, b], _, tracked| {
        let [of_a, of_b] = tracked.0;
        let saved = [of_b.then(|| a.clone()), of_a.then(|| b.clone())];
        (B::matmul(a, b), Some(saved))
    },
    |[a, b], grad, parents| {
        let of_a = b.map(|b| B::matmul(grad.clone(), B::float_transpose(b)));
        parents.register::<B>([of_a, a.map(|a| B::matmul(B::float_transpose(a), grad))]);
    },
}

operation! {
    /// Saves both factors.
    MatmulMixed { alpha: f64, beta: f64, left: bool }, 2, ([FloatTensor<B>; 2], [f64; 2], bool),
    |[a, b], _, tracked| {
        let saved = tracked.then(|| ([a.clone(), b.clone()], [alpha, beta], left));
        (B::matmul_mixed(a, b, [alpha, beta], left), saved)
    },
    |([a, b], [alpha, beta], left), grad, parents| {
        let scaled = B::float_mul_scalar(grad.clone(), alpha.into());
        let of_a = B::matmul(scaled.clone(), B::float_transpose(b));
        let of_b = B::matmul(B::float_transpose(a), scaled);
        let added = B::float_mul_scalar(grad, beta.into());
        let grads = if left { [B::float_add(of_a, added), of_b] } else { [of_a, B::float_add(of_b, added)] };
        parents.register::<B>(grads);
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{normalize_sum, softmax};
    use burn::tensor::activation;
    use burn::tensor::{DType, Device, TensorData};

    fn tensor<const D: usize>(shape: [usize; D]) -> Tensor<D> {
        let values: Vec<f64> = (0..shape.iter().product()).map(|i| (i as f64 * 0.61).sin() + 1.5).collect();
        let on = (&Device::flex().autodiff(), DType::F64);
        Tensor::from_data(TensorData::new(values, shape), on).require_grad()
    }

    fn close<const D: usize>(what: &str, found: Tensor<D>, expected: Tensor<D>) {
        assert_eq!(found.dims(), expected.dims(), "{what}");
        let [found, expected] = [found, expected].map(|x| x.into_data().iter::<f64>().collect::<Vec<_>>());
        for (a, b) in found.iter().zip(&expected) {
            assert!((a - b).abs() <= 1e-13 * (1.0 + b.abs()), "{what}: {a} instead of {b}");
        }
    }

    /// Value and gradient of one operation against Burn's.
    fn alike<const D: usize, const E: usize>(
        what: &str,
        shape: [usize; D],
        ours: impl Fn(Tensor<D>) -> Tensor<E>,
        burns: impl Fn(Tensor<D>) -> Tensor<E>,
    ) {
        let pull = |y: Tensor<E>, x: &Tensor<D>| {
            let weights = tensor(y.dims()).inner();
            let loss = (y * Tensor::from_inner(weights)).sum();
            x.grad(&loss.backward()).expect("the input has a gradient")
        };
        let (a, b) = (tensor(shape), tensor(shape));
        let (y, z) = (ours(a.clone()), burns(b.clone()));
        close(what, y.clone(), z.clone());
        close(&format!("{what}: gradient"), pull(y, &a), pull(z, &b));
    }

    #[test]
    fn values_and_gradients_are_burns() {
        for dim in 0..3 {
            alike("sum_dim", [3, 4, 5], |x| sum_dim(x, dim), |x| x.sum_dim(dim));
        }
        for shape in [[1, 7], [32, 32], [32, 64], [45, 67]] {
            alike("sum", shape, sum, |x| x.sum());
        }
        alike("expand_dim", [3, 1, 5], |x| expand_dim(x, 1, 4), |x| x.expand([3, 4, 5]));
        alike("normalize_sum", [6, 5], |x| normalize_sum(x, 0.1), |x| x.clone() / (x.sum_dim(1) + 0.1));
        alike("softmax", [6, 5], softmax, |x| activation::softmax(x, 1));
        let log = |x: Tensor<2>| x.exp().sum_dim(1).log();
        alike("log_sum_exp", [6, 5], log_sum_exp, log);
        alike("matmul, left", [6, 5], |x| matmul(x, tensor([5, 3])), |x| x.matmul(tensor([5, 3])));
        alike("matmul, right", [6, 5], |x| matmul(tensor([2, 6]), x), |x| tensor([2, 6]).matmul(x));
        let (factors, square) = ([0.5, -2.0], || tensor([5, 5]));
        let sum = |product: Tensor<2>, x: Tensor<2>| product * 0.5 - x * 2.0;
        alike(
            "matmul_mixed, left",
            [6, 5],
            |x| matmul_mixed(x, square(), factors, true),
            |x| sum(x.clone().matmul(square()), x),
        );
        alike(
            "matmul_mixed, right",
            [5, 6],
            |x| matmul_mixed(square(), x, factors, false),
            |x| sum(square().matmul(x.clone()), x),
        );
        alike(
            "matmul_mixed, the other factor",
            [5, 5],
            |x| matmul_mixed(square(), x, factors, true),
            |x| sum(square().matmul(x), square()),
        );
    }

    #[test]
    fn a_large_logit_does_not_overflow() {
        let x = Tensor::<2>::from_data([[1000.0, 999.0]], (&Device::flex(), DType::F64));
        let e = (-1.0f64).exp();
        let share = Tensor::from_data([[1.0 / (1.0 + e), e / (1.0 + e)]], (&Device::flex(), DType::F64));
        close("softmax", softmax(x.clone()), share);
        let log = Tensor::from_data([[1000.0 + (1.0 + e).ln()]], (&Device::flex(), DType::F64));
        close("log_sum_exp", log_sum_exp(x), log);
    }
}
