//! GEMMs of layers in FP8 (e4m3) with a scale for each block, as [`ops::fp8`] has them: outputs, and gradients of inputs and
//! weights. No rank needs what another one has, so every layout rounds the same numbers.

use super::lazy::Gemm;
use super::{Executor, Float};
use crate::mesh_backend::inner::Inner;
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use ops::fp8::{BLOCK, Matrix, Number, Precision, Scaling, Sides};

/// Which dimension of the last two a GEMM adds up.
#[derive(Clone, Copy, PartialEq)]
enum Along {
    Last,
    First,
}

impl<B: Inner> Executor<B> {
    /// The output of a layer, or the gradient of its input, if FP8 is chosen and the sizes are those of blocks. Attention,
    /// whose tensors have four dimensions, stays out.
    pub(super) fn fp8_layer(&mut self, gemm: &Gemm<B>) -> Option<Float<B>> {
        if !self.fp8 || !gemm.is_layer() || gemm.shape.num_dims() > 3 {
            return None;
        }
        let [(id, a), (_, b)] = &gemm.operands;
        let [inner, out] = last_two(b);
        let rows = a.shape()[..a.shape().num_dims() - 1].iter().product();
        if !fits::<B>(gemm.dtype, [rows, inner, out]) {
            return None;
        }
        self.count("FP8 GEMM");
        // Queries, keys and values read one tensor.
        let x = match self.cast.take_if(|(of, _)| of == id) {
            Some((_, x)) => x,
            None => cast::<B>(a.clone(), Along::Last, &Scaling::Vector),
        };
        self.cast = Some((*id, x.clone()));
        let w = cast::<B>(b.clone(), Along::First, &Scaling::Block);
        let bias = gemm.bias.clone().map(|bias| B::float_reshape(bias, Shape::from([out])));
        let to = (gemm.shape.clone(), gemm.dtype);
        Some(self.allocating(rows * out, || B::fp8_gemm(x, w, bias, to, Precision::Full)))
    }

    /// `aᵀ · b` of all rows, the gradient of a weight, likewise.
    pub(super) fn fp8_gradient(&mut self, [a, b]: &[Float<B>; 2], dtype: DType) -> Option<Float<B>> {
        if !self.fp8 {
            return None;
        }
        let ([rows, inputs], [_, outputs]) = (last_two(a), last_two(b));
        if !fits::<B>(a.dtype(), [rows, inputs, outputs]) {
            return None;
        }
        self.count("FP8 GEMM");
        self.cast = None;
        let [x, grad] = [a, b].map(|x| cast::<B>(x.clone(), Along::First, &Scaling::Vector));
        let to = (Shape::from([inputs, outputs]), dtype);
        Some(self.allocating(inputs * outputs, || B::fp8_gemm(x, grad, None, to, Precision::Full)))
    }
}

/// Whether a GEMM of this type and these sizes can be in FP8.
fn fits<B: Inner>(dtype: DType, sizes: [usize; 3]) -> bool {
    B::has_fp8(dtype) && sizes.iter().all(|size| *size > 0 && size.is_multiple_of(BLOCK))
}

fn last_two(x: &impl TensorMetadata) -> [usize; 2] {
    let shape = x.shape();
    let last = shape.num_dims() - 1;
    [shape[last - 1], shape[last]]
}

/// `x [.., m, n]` with its `inner` dimension contiguous, whichever of the two is contiguous in memory.
fn cast<B: Inner>(x: Float<B>, inner: Along, scaling: &Scaling<B>) -> Matrix<B> {
    let last = x.shape().num_dims() - 1;
    let by = |x, by_rows| {
        let cast = B::fp8_cast(x, scaling, Number::E4m3, Sides { by_rows, by_columns: !by_rows });
        cast.by_rows.or(cast.by_columns).expect("one was asked for")
    };
    let turned = B::float_swap_dims(x.clone(), last - 1, last);
    // Of several samples the transpose has no rows.
    match x.shape()[..last - 1].iter().all(|size| *size == 1) && B::is_dense(&turned) {
        true => by(turned, inner == Along::First),
        false => by(x, inner == Along::Last),
    }
}
