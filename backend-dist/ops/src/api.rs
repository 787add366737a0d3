//! The public operations: shape checks, then the extension.

use burn::backend::{Dispatch, tensor::FloatTensor};
use burn::tensor::{Int, Tensor};

use super::{
    dropout_mask::DropoutMask,
    local::{AddBias, Dropout, Embedding, Rope, Softcap},
    operation::{Tensors, apply, apply_with},
    options::{GeluKind, Rms},
    residual::{Apply, Joint},
    step::Step,
    tensor_parallel::fused::{Linear, LinearConfig},
};

/// `x · wᵀ` for `x [.., in]` and `w [out, in]`; output `[.., out]`.
///
/// # Panics
///
/// If the last dimension of `x` is not `in`.
pub fn linear<const D: usize>(x: Tensor<D>, w: Tensor<2>) -> Tensor<D> {
    let (input, [out, inner]) = (x.dims()[D - 1], w.dims());
    assert_eq!(input, inner, "linear: input has {input} features, weight [{out}, {inner}] takes {inner}");
    apply(Linear { config: LinearConfig::default() }, [x.into_dispatch(), w.into_dispatch()])
}

/// `x + b` for `x [.., n]` and `b [n]`.
///
/// # Panics
///
/// If `b` does not fit `x`.
pub fn add_bias<const D: usize>(x: Tensor<D>, b: Tensor<1>) -> Tensor<D> {
    check_affine("add_bias: bias", x.dims()[D - 1], &b);
    apply(AddBias {}, [x.into_dispatch(), b.into_dispatch()])
}

/// `w x / √(mean(x²) + eps)` over the last dimension, or with `1 + w` ([`Rms`]); `w` has its size.
///
/// # Panics
///
/// If `w` does not fit `x`.
pub fn rms_norm<const D: usize>(x: Tensor<D>, w: Tensor<1>, norm: impl Into<Rms>) -> Tensor<D> {
    check_affine("rms_norm: weight", x.dims()[D - 1], &w);
    step(Step::RmsNorm(norm.into()), [x.into_dispatch(), w.into_dispatch()])
}

/// `w (x - mean(x)) / √(var(x) + eps) + b` over the last dimension, with the biased variance.
///
/// # Panics
///
/// If `w` or `b` does not fit `x`.
pub fn layer_norm<const D: usize>(x: Tensor<D>, w: Tensor<1>, b: Tensor<1>, eps: f64) -> Tensor<D> {
    check_affine("layer_norm: weight", x.dims()[D - 1], &w);
    check_affine("layer_norm: bias", x.dims()[D - 1], &b);
    step(Step::LayerNorm(eps), [x.into_dispatch(), w.into_dispatch(), b.into_dispatch()])
}

/// Rotary position embedding of `x [s, b, h, d]`: row `i` of `cos, sin [s, rot/2]` belongs to sequence position `i` of
/// `x`. Dimension `j < rot/2` is rotated with dimension `j + rot/2` ("rotate half", as Hugging Face's Llama);
/// dimensions from `rot` on are copied. No gradient flows into `cos` and `sin`.
///
/// # Panics
///
/// If `cos` or `sin` does not fit `x`.
pub fn rope(x: Tensor<4>, cos: Tensor<2>, sin: Tensor<2>) -> Tensor<4> {
    let heads = x.dims()[2];
    rope_packed(x, cos, sin, heads)
}

/// [`rope`] on the first `heads` heads only, the others are copied: rotates the queries and keys of a packed
/// `[q | k | v]` projection in one step.
///
/// # Panics
///
/// If `cos` or `sin` does not fit `x`, or `x` has fewer than `heads` heads.
pub fn rope_packed(x: Tensor<4>, cos: Tensor<2>, sin: Tensor<2>, heads: usize) -> Tensor<4> {
    let [s, _, h, d] = x.dims();
    assert!(heads <= h, "rope: {heads} heads to rotate, input has {h}");
    assert_eq!(cos.dims(), sin.dims(), "rope: cos and sin differ in shape");
    let [rows, half] = cos.dims();
    assert!(rows == s && 2 * half <= d, "rope: angles are [{rows}, {half}], input has sequence {s}, head size {d}");
    apply_with(Rope { heads }, [x.into_dispatch()], Tensors::floats([cos, sin].map(Tensor::into_dispatch)))
}

/// `silu(gate) up` of `x [.., 2f] = [gate | up]`; output `[.., f]`.
///
/// # Panics
///
/// If the last dimension is odd.
pub fn swiglu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let size = x.dims()[D - 1];
    assert!(size.is_multiple_of(2), "swiglu: last dimension {size} is not [gate | up]");
    step(Step::SwiGlu, [x.into_dispatch()])
}

/// GELU, element by element.
pub fn gelu<const D: usize>(x: Tensor<D>, kind: GeluKind) -> Tensor<D> {
    step(Step::Gelu(kind), [x.into_dispatch()])
}

/// `gelu(gate) up` of `x [.., 2f] = [gate | up]`; output `[.., f]`.
///
/// # Panics
///
/// If the last dimension is odd.
pub fn geglu<const D: usize>(x: Tensor<D>, kind: GeluKind) -> Tensor<D> {
    let size = x.dims()[D - 1];
    assert!(size.is_multiple_of(2), "geglu: last dimension {size} is not [gate | up]");
    step(Step::GeGlu(kind), [x.into_dispatch()])
}

/// `max(x, 0)²`, element by element (So et al., "Primer", arXiv 2109.08668).
pub fn squared_relu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    step(Step::SquaredRelu, [x.into_dispatch()])
}

/// `cap tanh(x / cap)`, element by element.
pub fn softcap<const D: usize>(x: Tensor<D>, cap: f64) -> Tensor<D> {
    apply(Softcap { cap }, [x.into_dispatch()])
}

/// Rows of the embedding matrix `w [rows, hidden]` by id; output `[a, b, hidden]` for `ids [a, b]`. Row 0 of `w` has id
/// `first_row`. An id outside `first_row..first_row + rows` gives zeros, so that the sum over the vocabulary-parallel
/// shards is the embedding.
pub fn embedding(w: Tensor<2>, ids: Tensor<2, Int>, first_row: usize) -> Tensor<3> {
    apply_with(Embedding { first_row }, [w.into_dispatch()], Tensors::ints([ids.into_dispatch()]))
}

/// Sets elements to zero with probability `p` and divides the others by `1 - p`. The mask is a function of the key's
/// seed and the element's position in the global tensor only, see [`DropoutMask`].
///
/// # Panics
///
/// If `p` is not in `0..1`, or `x` does not lie within the key's global tensor.
pub fn dropout<const D: usize>(x: Tensor<D>, p: f64, key: DropoutMask) -> Tensor<D> {
    assert!((0.0..1.0).contains(&p), "dropout: probability {p} is not in 0..1");
    if p == 0.0 {
        return x;
    }
    apply(Dropout { p, key }, [x.into_dispatch()])
}

/// A norm with its parameters, or an activation.
fn step<const N: usize, const D: usize>(step: Step, inputs: [FloatTensor<Dispatch>; N]) -> Tensor<D> {
    apply(Apply { step, joint: Joint::default() }, inputs)
}

fn check_affine(what: &str, hidden: usize, w: &Tensor<1>) {
    let [size] = w.dims();
    assert_eq!(size, hidden, "{what} has {size} elements, the input's last dimension is {hidden}");
}
