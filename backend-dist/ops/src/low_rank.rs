//! What adapters add to wide outputs: a GEMM of short rows, whose gradients read the wide one only once where there is a
//! kernel for it.

use burn::backend::{
    Flex, TensorMetadata,
    autodiff::{NodeId, grads::Gradients, ops::Ops},
    tensor::FloatTensor,
};
use burn::tensor::{FloatDType, Shape, Tensor};

use super::{
    fp8::{Fp8Kernels, Matrix, Number, Scales, Scaling, Sides, ToldGradient},
    main_grads::main_grad,
    operation::{Parents, apply, operation},
    plain::narrow,
    shared_input::{LeftGemm, with_added},
};

/// `y + x · wᵀ` for `y [.., out]`, `x [.., in]` and `w [out, in]`. On GPUs the GEMM adds to `y` in place, before rounding. If
/// `y` is of a layer in FP8, that may be `told` of its gradient.
///
/// # Panics
///
/// If the sizes do not fit.
pub fn add_linear<const D: usize>(y: Tensor<D>, x: Tensor<D>, w: Tensor<2>, told: Option<ToldGradient>) -> Tensor<D> {
    let ([out, inner], last) = (w.dims(), D - 1);
    let fits = x.dims()[last] == inner && y.dims()[last] == out && x.dims()[..last] == y.dims()[..last];
    assert!(fits, "add_linear: {:?} + {:?} · [{out}, {inner}]ᵀ", y.dims(), x.dims());
    apply(AddLinear { told }, [y.into_dispatch(), x.into_dispatch(), w.into_dispatch()])
}

/// What a layer in FP8 needs of a gradient that others read anyway.
#[derive(Clone, Debug)]
pub enum ForFp8<B: Fp8Kernels> {
    /// Nothing.
    Nothing,
    /// Its amax.
    Amax,
    /// A cast.
    Cast(Scales<B>, Number),
}

/// That, as it was made.
#[derive(Clone, Debug)]
pub enum MadeForFp8<B: Fp8Kernels> {
    /// Nothing.
    Nothing,
    /// The amax, `[1]`.
    Amax(FloatTensor<B>),
    /// The cast by rows.
    Cast(Scales<B>, Matrix<B>),
}

/// Gradients of `low` and `b`, unless that of `b` was written elsewhere, and what was made of the one they follow from.
pub type LowRankGrads<B> = (FloatTensor<B>, Option<FloatTensor<B>>, MadeForFp8<B>);

/// The kernels of adapters, by default made of others. `low [.., n r]` and `b [out, r]`: each of `n` equal parts of the outputs
/// reads `r` columns of `low`. With `amax` they also return that of the result, if it costs no pass over it.
pub trait LowRankKernels: Fp8Kernels {
    /// The gradients of `low` and `b` in `low · bᵀ`, given that of the result. That of `b` is written to the f32 elements of
    /// `sum`, or added to them, if there is one.
    fn low_rank_grads(
        grad: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        sum: Option<(FloatTensor<Self>, bool)>,
        for_fp8: ForFp8<Self>,
    ) -> LowRankGrads<Self> {
        grads_unfused::<Self>(grad, low, b, sum, for_fp8)
    }

    /// `silu(gate) up` of `[gate | up] = base + low · bᵀ`.
    fn low_rank_swiglu(
        base: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        amax: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        unfused::<Self>(base, low, b, amax)
    }

    /// The gradient of `base`, given that of the result, to which a GEMM that was left is added.
    fn low_rank_swiglu_grad(
        operands: [FloatTensor<Self>; 3],
        grad: FloatTensor<Self>,
        left: Option<LeftGemm<Self>>,
        amax: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        grad_unfused::<Self>(operands, grad, left, amax)
    }
}

impl LowRankKernels for Flex {}

fn last<B: Fp8Kernels>(x: &FloatTensor<B>) -> usize {
    x.shape().to_vec().pop().expect("a matrix has columns")
}

/// How many parts there are.
fn count<B: Fp8Kernels>(low: &FloatTensor<B>, b: &FloatTensor<B>) -> usize {
    last::<B>(low) / last::<B>(b)
}

/// `b` as a matrix of all columns of `low`: each part in its own, zeros elsewhere. One GEMM then has all of them.
fn spread<B: Fp8Kernels>(b: FloatTensor<B>, count: usize) -> FloatTensor<B> {
    if count == 1 {
        return b;
    }
    let [rows, inner] = b.shape().dims();
    let zeros = |columns: usize| {
        let shape = Shape::from([rows / count, columns]);
        B::float_zeros(shape, &b.device(), FloatDType::from(b.dtype()))
    };
    let part = |i: usize| {
        let own = narrow::<B>(b.clone(), 0, i * rows / count, (i + 1) * rows / count);
        let [before, behind] = [i, count - 1 - i].map(|parts| (parts > 0).then(|| zeros(parts * inner)));
        B::float_cat(before.into_iter().chain([own]).chain(behind).collect(), 1)
    };
    B::float_cat((0..count).map(part).collect(), 0)
}

/// `y + low · bᵀ`, by one GEMM.
pub fn add<B: Fp8Kernels>(y: FloatTensor<B>, low: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let count = count::<B>(&low, &b);
    B::add_linear_forward(y, low, spread::<B>(b, count))
}

/// The gradients of `low` and `b`, by a GEMM each.
pub fn grads_unfused<B: Fp8Kernels>(
    grad: FloatTensor<B>,
    low: FloatTensor<B>,
    b: FloatTensor<B>,
    sum: Option<(FloatTensor<B>, bool)>,
    for_fp8: ForFp8<B>,
) -> LowRankGrads<B> {
    let of_low = low_grad::<B>(grad.clone(), &low, b.clone());
    (of_low, b_grad::<B>(grad.clone(), low, b, sum), made::<B>(grad, for_fp8))
}

fn low_grad<B: Fp8Kernels>(grad: FloatTensor<B>, low: &FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let count = count::<B>(low, &b);
    B::linear_input_grad(grad, spread::<B>(b, count))
}

fn b_grad<B: Fp8Kernels>(
    grad: FloatTensor<B>,
    low: FloatTensor<B>,
    b: FloatTensor<B>,
    sum: Option<(FloatTensor<B>, bool)>,
) -> Option<FloatTensor<B>> {
    let (count, [rows, inner]) = (count::<B>(&low, &b), b.shape().dims());
    match sum {
        Some((sum, add)) if count == 1 => {
            B::linear_accumulate_weight_grad(grad, low, &sum, add);
            return None;
        }
        _ => {}
    }
    let all = B::linear_weight_grad(grad, low);
    let part = |i: usize| {
        let rows = narrow::<B>(all.clone(), 0, i * rows / count, (i + 1) * rows / count);
        narrow::<B>(rows, 1, i * inner, (i + 1) * inner)
    };
    let of_b = if count == 1 { all.clone() } else { B::float_cat((0..count).map(part).collect(), 0) };
    match sum {
        Some((sum, add)) => {
            B::accumulate(of_b, &sum, add);
            None
        }
        None => Some(of_b),
    }
}

/// By a pass of its own, as the layer would.
fn made<B: Fp8Kernels>(grad: FloatTensor<B>, for_fp8: ForFp8<B>) -> MadeForFp8<B> {
    match for_fp8 {
        ForFp8::Nothing => MadeForFp8::Nothing,
        ForFp8::Amax => MadeForFp8::Amax(B::fp8_amax(grad)),
        ForFp8::Cast(scales, number) => {
            let (scaling, sides) = (Scaling::Tensor(scales.clone()), Sides { by_rows: true, by_columns: false });
            let rows = B::fp8_cast(grad, &scaling, number, sides).by_rows;
            MadeForFp8::Cast(scales, rows.expect("rows were asked for"))
        }
    }
}

/// The activation of the sum, with the amax by a pass of its own.
pub fn unfused<B: Fp8Kernels>(
    base: FloatTensor<B>,
    low: FloatTensor<B>,
    b: FloatTensor<B>,
    amax: bool,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let out = B::swiglu_forward(add::<B>(base, low, b));
    (out.clone(), amax.then(|| B::fp8_amax(out)))
}

/// Its gradient, the same way.
pub fn grad_unfused<B: Fp8Kernels>(
    [base, low, b]: [FloatTensor<B>; 3],
    grad: FloatTensor<B>,
    left: Option<LeftGemm<B>>,
    amax: bool,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let grad = with_added::<B>(grad, left);
    let grad = B::swiglu_grad(add::<B>(base, low, b), grad);
    (grad.clone(), amax.then(|| B::fp8_amax(grad)))
}

/// Delivers the gradients of `low` and `b` in `low · bᵀ` to those of their nodes that want them, given that of the result.
pub(super) fn deliver_grads<B: LowRankKernels>(
    grads: &mut Gradients,
    grad: FloatTensor<B>,
    (low, low_node): (FloatTensor<B>, Option<NodeId>),
    (b, b_node): (FloatTensor<B>, Option<NodeId>),
    for_fp8: ForFp8<B>,
) -> MadeForFp8<B> {
    let sum = b_node.and_then(main_grad::<B>);
    let (of_low, of_b, made) = match (low_node, b_node) {
        (Some(_), Some(_)) => {
            let (of_low, of_b, made) = B::low_rank_grads(grad, low, b, sum, for_fp8);
            (Some(of_low), of_b, made)
        }
        (Some(_), None) => (Some(low_grad::<B>(grad.clone(), &low, b)), None, made::<B>(grad, for_fp8)),
        (None, Some(_)) => (None, b_grad::<B>(grad.clone(), low, b, sum), made::<B>(grad, for_fp8)),
        (None, None) => (None, None, MadeForFp8::Nothing),
    };
    for (node, value) in [(low_node, of_low), (b_node, of_b)] {
        if let (Some(node), Some(value)) = (node, value) {
            grads.register::<B>(node, value);
        }
    }
    made
}

/// Tells the layer that reads a gradient what was made of it.
pub(super) fn tell<B: Fp8Kernels>(told: Option<ToldGradient>, made: MadeForFp8<B>) {
    match (told, made) {
        (Some(told), MadeForFp8::Amax(amax)) => told.note_amax::<B>(amax),
        (Some(told), MadeForFp8::Cast(scales, by_rows)) => told.note_cast::<B>(scales, by_rows),
        _ => {}
    }
}

operation! {
    AddLinear { told: Option<ToldGradient> }, 3, ([FloatTensor<B>; 2], Option<ToldGradient>),
    |[y, x, w], _, tracked| {
        let saved = tracked.then(|| ([x.clone(), w.clone()], told.clone()));
        (B::add_linear_forward(y, x, w), saved)
    },
    |([x, w], told), grad, parents| {
        let Parents { ops: Ops { parents: [y_node, x_node, w_node], .. }, grads } = parents;
        let told = told.filter(|told| y_node.is_some() && told.is_read());
        let for_fp8 = if told.is_some() { ForFp8::Amax } else { ForFp8::Nothing };
        let [x_node, w_node] = [x_node, w_node].map(|node| node.map(|node| node.id));
        let made = deliver_grads::<B>(grads, grad.clone(), (x, x_node), (w, w_node), for_fp8);
        tell::<B>(told, made);
        if let Some(node) = y_node {
            grads.register::<B>(node.id, grad);
        }
    },
}
