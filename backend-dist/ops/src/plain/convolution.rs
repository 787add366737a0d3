//! The causal depthwise convolution with SiLU.

use burn::backend::{Backend, FloatDType, Scalar, Shape, TensorMetadata, tensor::FloatTensor};

use super::{add, dims, narrow, reshape, sigmoid, widen};
use crate::convolution::{ConvolutionGrads, ConvolutionInputs};
use crate::dtype::cast;
use crate::kernels::LocalKernels;

/// The inputs in at least fp32.
struct Wide<B: Backend> {
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    ages: Option<FloatTensor<B>>,
}

impl<B: Backend> Wide<B> {
    fn new(ConvolutionInputs { x, w, bias, ages }: ConvolutionInputs<B>) -> Self {
        let x = widen::<B>(x).0;
        let of = |t| cast::<B>(t, x.dtype());
        Self { w: of(w), bias: bias.map(of), ages: ages.map(of), x }
    }

    fn kernel(&self) -> usize {
        dims(&self.w)[1]
    }

    /// The taps of the values `distance` positions before, `[1, 1, features]`.
    fn taps(&self, distance: usize) -> FloatTensor<B> {
        let at = self.kernel() - 1 - distance;
        let taps = narrow::<B>(self.w.clone(), 1, at, at + 1);
        reshape::<B>(taps, [1, 1, dims(&self.w)[0]])
    }

    /// `x [s, b, features]` at positions whose value `distance` before is of the same document, else zeros.
    fn within(&self, x: FloatTensor<B>, distance: usize) -> FloatTensor<B> {
        match &self.ages {
            Some(ages) if distance > 0 => {
                let [seq, samples] = [dims(ages)[0], dims(ages)[1]];
                let reaches = add::<B>(ages.clone(), 1.0 - distance as f64);
                let reaches = B::float_clamp(reaches, Scalar::Float(0.0), Scalar::Float(1.0));
                B::float_mul(x, reshape::<B>(reaches, [seq, samples, 1]))
            }
            _ => x,
        }
    }

    /// The values `distance` before each position; zeros in front of the sequence.
    fn before(&self, distance: usize) -> FloatTensor<B> {
        let seq = dims(&self.x)[0];
        let seen = narrow::<B>(self.x.clone(), 0, 0, seq.saturating_sub(distance));
        B::float_cat(vec![zeros::<B>(&self.x, distance.min(seq)), seen], 0)
    }

    /// Before SiLU.
    fn sums(&self) -> FloatTensor<B> {
        let summand = |distance| B::float_mul(self.within(self.before(distance), distance), self.taps(distance));
        let sum = (1..self.kernel()).fold(summand(0), |sum, distance| B::float_add(sum, summand(distance)));
        match &self.bias {
            Some(bias) => B::float_add(sum, reshape::<B>(bias.clone(), [1, 1, dims(bias)[0]])),
            None => sum,
        }
    }
}

/// So many positions of zeros.
fn zeros<B: Backend>(like: &FloatTensor<B>, positions: usize) -> FloatTensor<B> {
    let mut shape = dims(like);
    shape[0] = positions;
    B::float_zeros(Shape::from(shape), &like.device(), FloatDType::from(like.dtype()))
}

pub fn forward<B: Backend>(inputs: ConvolutionInputs<B>) -> FloatTensor<B> {
    let dtype = inputs.x.dtype();
    let sums = Wide::<B>::new(inputs).sums();
    cast::<B>(B::float_mul(sigmoid::<B>(sums.clone()), sums), dtype)
}

pub fn grads<B: LocalKernels>(inputs: ConvolutionInputs<B>, grad: FloatTensor<B>) -> ConvolutionGrads<B> {
    let [of_x, of_w] = [&inputs.x, &inputs.w].map(|t| t.dtype());
    let inputs = Wide::<B>::new(inputs);
    let (seq, features, kernel) = (dims(&inputs.x)[0], dims(&inputs.w)[0], inputs.kernel());
    let sums = inputs.sums();
    let sigma = sigmoid::<B>(sums.clone());
    let slope = add::<B>(B::float_mul(sums, add::<B>(B::float_neg(sigma.clone()), 1.0)), 1.0);
    let slope = B::float_mul(B::float_mul(cast::<B>(grad, inputs.x.dtype()), sigma), slope);
    let over_positions = |x: FloatTensor<B>| reshape::<B>(B::sum_dim(B::sum_dim(x, 0), 1), [features, 1]);
    let within = |distance| inputs.within(slope.clone(), distance);
    // Back to the positions whose values were seen.
    let seen = |distance: usize| {
        let seen = narrow::<B>(B::float_mul(within(distance), inputs.taps(distance)), 0, distance.min(seq), seq);
        B::float_cat(vec![seen, zeros::<B>(&inputs.x, distance.min(seq))], 0)
    };
    let taps =
        (0..kernel).rev().map(|distance| over_positions(B::float_mul(within(distance), inputs.before(distance))));
    ConvolutionGrads {
        w: cast::<B>(B::float_cat(taps.collect(), 1), of_w),
        bias: inputs.bias.as_ref().map(|_| reshape::<B>(cast::<B>(over_positions(slope.clone()), of_w), [features])),
        x: cast::<B>((1..kernel).fold(seen(0), |sum, distance| B::float_add(sum, seen(distance))), of_x),
    }
}
