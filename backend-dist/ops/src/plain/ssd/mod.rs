//! The steps between the GEMMs of Mamba-2's recurrence in chunks, in at least fp32.
//!
//! Numbers of a position and head are `[b, chunks, h, chunk]`; tensors by head have one more dimension, tensors by
//! column `[b, chunks, groups, chunk or state, h/groups p]`.

use burn::backend::{Backend, FloatDType, Scalar, Shape, TensorMetadata, tensor::FloatTensor as Float};
use burn::tensor::TensorData;

use super::{add, dims, narrow, reshape, sigmoid};
use crate::dtype::cast;
use crate::kernels::LocalKernels;
use crate::ssd::stages::{Combined, Decays, Features, InputSums, SsdShape, SsdStages, StepInputs};

pub(super) mod gradients;

/// The formulas, on every backend.
pub struct Formulas;

/// Larger than any distance between positions.
const NEVER: f64 = 1e9;

impl<B: LocalKernels> SsdStages<B> for Formulas {
    fn decays(inputs: &StepInputs<B>, shape: SsdShape) -> Decays<B> {
        let steps = limited::<B>(softplus::<B>(argument::<B>(inputs)), inputs.limits);
        let steps = per_head::<B>(steps, shape);
        let sums = B::float_cumsum(B::float_mul(steps.clone(), rates::<B>(inputs)), 3);
        let last = shape.chunk - 1;
        let behind = narrow::<B>(sums.clone(), 3, last, last + 1);
        let until = B::float_exp(B::float_sub(behind, sums.clone()));
        let since = B::float_exp(sums.clone());
        let Some(ages) = ages::<B>(inputs, shape, &steps) else { return Decays { steps, sums, until, since } };
        let (c, l) = (|at: usize| at / shape.chunk, |at: usize| at % shape.chunk);
        let all = 0..shape.chunks() * shape.chunk;
        let entered = all.clone().map(|at| (l(at) + c(at).min(1)) as f64).collect();
        let to_end = all.map(|at| (last - l(at)) as f64).collect();
        let [entered, to_end] =
            [entered, to_end].map(|of| numbers::<B>(of, [1, shape.chunks(), 1, shape.chunk], &steps));
        let stays = reached::<B>(narrow::<B>(ages.clone(), 3, last, last + 1), to_end);
        let (until, since) = (B::float_mul(until, stays), B::float_mul(since, reached::<B>(ages, entered)));
        Decays { steps, sums, until, since }
    }

    fn operand(x: &Float<B>, of: Features, shape: SsdShape) -> Float<B> {
        by_head::<B>(wide::<B>(narrow::<B>(x.clone(), 2, of.first, of.end())), of.heads, shape)
    }

    fn operands(x: &Float<B>, of: Features, factors: &[&Float<B>], shape: SsdShape) -> [Float<B>; 2] {
        let x = <Self as SsdStages<B>>::operand(x, of, shape);
        let scaled = factors.iter().fold(x.clone(), |x, factor| B::float_mul(x, column_of::<B>((*factor).clone())));
        [x, by_column::<B>(scaled, shape)]
    }

    fn weights(scores: &Float<B>, decays: &Decays<B>, inputs: &StepInputs<B>, shape: SsdShape) -> Float<B> {
        let weights = B::float_mul(for_heads::<B>(scores.clone(), shape), shares::<B>(decays, inputs, shape));
        B::float_mul(weights, row_of::<B>(decays.steps.clone()))
    }

    fn states(
        summands: Float<B>,
        decays: &Decays<B>,
        _: &Combined<B>,
        first: Option<Float<B>>,
        shape: SsdShape,
    ) -> [Float<B>; 2] {
        let factors = chunk_shares::<B>(decays, shape);
        let size = dims(&summands);
        let one = [size[0], 1, size[2], size[3], size[4]];
        let mut state = match first {
            Some(first) => reshape::<B>(first, one),
            None => zeros::<B>(one, &summands),
        };
        let mut in_front = Vec::with_capacity(size[1]);
        for c in 0..size[1] {
            let of = |x: &Float<B>| narrow::<B>(x.clone(), 1, c, c + 1);
            in_front.push(state.clone());
            state = B::float_add(B::float_mul(state, of(&factors)), of(&summands));
        }
        [B::float_cat(in_front, 1), reshape::<B>(state, [size[0], size[2], size[3], size[4]])]
    }

    fn combine(answers: [Float<B>; 2], decays: &Decays<B>, inputs: &Combined<B>, shape: SsdShape) -> Float<B> {
        let [inside, before] = answers;
        let before = B::float_mul(from_columns::<B>(before, shape), column_of::<B>(decays.since.clone()));
        let x = wide::<B>(narrow::<B>(inputs.x.clone(), 2, 0, shape.inner()));
        let skip = cast::<B>(inputs.skip.clone(), x.dtype());
        let [seq, samples] = [shape.seq, shape.samples];
        let skip = reshape::<B>(skip, [1, 1, shape.heads, 1]);
        let skipped = B::float_mul(reshape::<B>(x, [seq, samples, shape.heads, shape.head_dim]), skip);
        let skipped = reshape::<B>(skipped, [seq, samples, shape.inner()]);
        let y = B::float_add(in_sequence::<B>(B::float_add(inside, before), shape), skipped);
        cast::<B>(y, inputs.x.dtype())
    }

    fn weights_grads(
        grad: Float<B>,
        scores: &Float<B>,
        decays: &Decays<B>,
        inputs: &StepInputs<B>,
        shape: SsdShape,
    ) -> [Float<B>; 3] {
        gradients::weights::<B>(grad, scores, decays, inputs, shape)
    }

    fn states_grads(in_front: &Float<B>, grad: Float<B>, decays: &Decays<B>, shape: SsdShape) -> [Float<B>; 2] {
        gradients::states::<B>(in_front, grad, decays, shape)
    }

    fn combine_grads(
        grad: &Float<B>,
        sums: InputSums<B>,
        decays: &Decays<B>,
        inputs: &Combined<B>,
        shape: SsdShape,
    ) -> (Float<B>, [Float<B>; 3]) {
        gradients::combine::<B>(grad, sums, decays, inputs, shape)
    }

    fn decays_grads(
        inputs: &StepInputs<B>,
        decays: &Decays<B>,
        weights: [Float<B>; 2],
        combined: [Float<B>; 3],
        along: Float<B>,
        shape: SsdShape,
    ) -> [Float<B>; 4] {
        gradients::decays::<B>(inputs, decays, weights, combined, along, shape)
    }
}

/// At least fp32.
pub(super) fn wide<B: Backend>(x: Float<B>) -> Float<B> {
    super::widen::<B>(x).0
}

pub(super) fn zeros<B: Backend>(shape: impl Into<Vec<usize>>, like: &Float<B>) -> Float<B> {
    B::float_zeros(Shape::from(shape.into()), &like.device(), FloatDType::from(like.dtype()))
}

pub(super) fn numbers<B: Backend>(values: Vec<f64>, shape: impl Into<Vec<usize>>, like: &Float<B>) -> Float<B> {
    let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
    cast::<B>(B::float_from_data(TensorData::new(values, shape.into()), &like.device()), like.dtype())
}

/// What softplus is taken of, `[s, b, h]`.
fn argument<B: Backend>(inputs: &StepInputs<B>) -> Float<B> {
    let raw = wide::<B>(inputs.raw.clone());
    let bias = cast::<B>(inputs.bias.clone(), raw.dtype());
    let heads = dims(&bias)[0];
    B::float_add(raw, reshape::<B>(bias, [1, 1, heads]))
}

/// `log(1 + eˣ)` without an exponential of a positive number.
fn softplus<B: Backend>(x: Float<B>) -> Float<B> {
    let small = B::float_log1p(B::float_exp(B::float_neg(B::float_abs(x.clone()))));
    B::float_add(B::float_clamp_min(x, Scalar::Float(0.0)), small)
}

fn limited<B: Backend>(steps: Float<B>, [smallest, largest]: [f64; 2]) -> Float<B> {
    let steps = if smallest > 0.0 { B::float_clamp_min(steps, Scalar::Float(smallest)) } else { steps };
    if largest < f64::INFINITY { B::float_clamp_max(steps, Scalar::Float(largest)) } else { steps }
}

/// A, negative, `[1, 1, h, 1]`.
fn rates<B: Backend>(inputs: &StepInputs<B>) -> Float<B> {
    let a_log = wide::<B>(inputs.a_log.clone());
    let heads = dims(&a_log)[0];
    B::float_neg(B::float_exp(reshape::<B>(a_log, [1, 1, heads, 1])))
}

/// `[s, b, features]` in chunks of the padded sequence, `[chunks, chunk, b, features]`.
fn chunked<B: Backend>(x: Float<B>, shape: SsdShape) -> Float<B> {
    let features = dims(&x)[2];
    let padding = shape.chunks() * shape.chunk - shape.seq;
    let x = match padding {
        0 => x,
        _ => B::float_cat(vec![x.clone(), zeros::<B>([padding, shape.samples, features], &x)], 0),
    };
    reshape::<B>(x, [shape.chunks(), shape.chunk, shape.samples, features])
}

/// `[s, b, h]` as `[b, chunks, h, chunk]`.
pub(super) fn per_head<B: Backend>(x: Float<B>, shape: SsdShape) -> Float<B> {
    B::float_permute(chunked::<B>(x, shape), &[2, 0, 3, 1])
}

/// `[s, b, h p]` by head.
pub(super) fn by_head<B: Backend>(x: Float<B>, heads: usize, shape: SsdShape) -> Float<B> {
    let features = dims(&x)[2] / heads;
    let x = reshape::<B>(chunked::<B>(x, shape), [shape.chunks(), shape.chunk, shape.samples, heads, features]);
    B::float_permute(x, &[2, 0, 3, 1, 4])
}

/// By head as `[s, b, h p]`.
pub(super) fn in_sequence<B: Backend>(x: Float<B>, shape: SsdShape) -> Float<B> {
    let size = dims(&x);
    let x = B::float_permute(x, &[1, 3, 0, 2, 4]);
    let x = reshape::<B>(x, [size[1] * size[3], size[0], size[2] * size[4]]);
    narrow::<B>(x, 0, 0, shape.seq)
}

/// By head as by column.
pub(super) fn by_column<B: Backend>(x: Float<B>, shape: SsdShape) -> Float<B> {
    let size = dims(&x);
    let (groups, serves) = (shape.groups, size[2] / shape.groups);
    let x = reshape::<B>(x, [size[0], size[1], groups, serves, size[3], size[4]]);
    reshape::<B>(B::float_permute(x, &[0, 1, 2, 4, 3, 5]), [size[0], size[1], groups, size[3], serves * size[4]])
}

/// By column as by head.
pub(super) fn from_columns<B: Backend>(x: Float<B>, shape: SsdShape) -> Float<B> {
    let (size, serves) = (dims(&x), shape.heads / shape.groups);
    let x = reshape::<B>(x, [size[0], size[1], shape.groups, size[3], serves, shape.head_dim]);
    reshape::<B>(B::float_permute(x, &[0, 1, 2, 4, 3, 5]), [size[0], size[1], shape.heads, size[3], shape.head_dim])
}

/// A number of each position for its features, or for all positions that it sees.
pub(super) fn column_of<B: Backend>(x: Float<B>) -> Float<B> {
    let size = dims(&x);
    reshape::<B>(x, [size[0], size[1], size[2], size[3], 1])
}

/// A number of each position for all positions that see it.
pub(super) fn row_of<B: Backend>(x: Float<B>) -> Float<B> {
    let size = dims(&x);
    reshape::<B>(x, [size[0], size[1], size[2], 1, size[3]])
}

/// A tensor of each group `[b, chunks, groups, m, n]` for each of its heads.
pub(super) fn for_heads<B: Backend>(x: Float<B>, shape: SsdShape) -> Float<B> {
    let (size, serves) = (dims(&x), shape.heads / shape.groups);
    let x = reshape::<B>(x, [size[0], size[1], size[2], 1, size[3], size[4]]);
    let x = B::float_expand(x, Shape::from([size[0], size[1], size[2], serves, size[3], size[4]].to_vec()));
    reshape::<B>(x, [size[0], size[1], shape.heads, size[3], size[4]])
}

/// How many positions of the same document are in front of each position, `[b, chunks, 1, chunk]`, if there are several.
/// Padding belongs to the last one.
fn ages<B: Backend>(inputs: &StepInputs<B>, shape: SsdShape, like: &Float<B>) -> Option<Float<B>> {
    let ages = inputs.ages.as_ref()?;
    let ages = cast::<B>(ages.clone(), like.dtype());
    let padding = shape.chunks() * shape.chunk - shape.seq;
    let ages = match padding {
        0 => ages,
        _ => {
            let more = numbers::<B>((1..=padding).map(|more| more as f64).collect(), [padding, 1], like);
            let last = narrow::<B>(ages.clone(), 0, shape.seq - 1, shape.seq);
            B::float_cat(vec![ages, B::float_add(last, more)], 0)
        }
    };
    let ages = reshape::<B>(ages, [shape.chunks(), shape.chunk, shape.samples, 1]);
    Some(B::float_permute(ages, &[2, 0, 3, 1]))
}

/// 1 where a document is at least as old as a distance, else 0.
fn reached<B: Backend>(ages: Float<B>, distances: Float<B>) -> Float<B> {
    let reached = add::<B>(B::float_sub(ages, distances), 1.0);
    B::float_clamp(reached, Scalar::Float(0.0), Scalar::Float(1.0))
}

/// The share that stays from behind a position (last dimension) to behind another one of its chunk, `[b, chunks, h,
/// chunk, chunk]`; zero from a later one, and from another document. No exponential is taken of a positive number.
pub(super) fn shares<B: Backend>(decays: &Decays<B>, inputs: &StepInputs<B>, shape: SsdShape) -> Float<B> {
    let chunk = shape.chunk;
    let [later, earlier] = [column_of::<B>(decays.sums.clone()), row_of::<B>(decays.sums.clone())];
    let shares = B::float_exp(B::float_clamp_max(B::float_sub(later, earlier), Scalar::Float(0.0)));
    // A token that is decoded, for which nothing is copied to the device.
    if chunk == 1 {
        return shares;
    }
    let distance = |at: usize| if at % chunk <= at / chunk { (at / chunk - at % chunk) as f64 } else { NEVER };
    let distances = numbers::<B>((0..chunk * chunk).map(distance).collect(), [1, 1, 1, chunk, chunk], &decays.sums);
    let ages = ages::<B>(inputs, shape, &decays.sums).map(column_of::<B>);
    let ages = ages.unwrap_or_else(|| add::<B>(zeros::<B>([1, 1, 1, 1, 1], &decays.sums), NEVER / 2.0));
    B::float_mul(shares, reached::<B>(ages, distances))
}

/// The share of a state that each chunk leaves, by column.
fn chunk_shares<B: Backend>(decays: &Decays<B>, shape: SsdShape) -> Float<B> {
    let left = narrow::<B>(decays.since.clone(), 3, shape.chunk - 1, shape.chunk);
    let left = B::float_expand(
        column_of::<B>(left),
        Shape::from([shape.samples, shape.chunks(), shape.heads, 1, shape.head_dim].to_vec()),
    );
    by_column::<B>(left, shape)
}

/// σ of what softplus is taken of, zero beyond the limits, `[s, b, h]`.
fn step_slope<B: Backend>(inputs: &StepInputs<B>) -> Float<B> {
    let argument = argument::<B>(inputs);
    let steps = softplus::<B>(argument.clone());
    let within = |inside: Float<B>| B::float_clamp_min(B::float_sign(inside), Scalar::Float(0.0));
    let [smallest, largest] = inputs.limits;
    let mut slope = sigmoid::<B>(argument);
    if smallest > 0.0 {
        slope = B::float_mul(slope, within(add::<B>(steps.clone(), -smallest)));
    }
    if largest < f64::INFINITY {
        slope = B::float_mul(slope, within(add::<B>(B::float_neg(steps), largest)));
    }
    slope
}
