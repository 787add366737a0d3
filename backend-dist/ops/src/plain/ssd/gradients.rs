//! The gradients of the steps between the GEMMs.

use burn::backend::{TensorMetadata, tensor::FloatTensor};

use super::super::{dims, narrow, reshape};
use super::*;
use crate::dtype::cast;

/// The sum over one dimension, which is gone then.
pub fn summed<B: LocalKernels>(x: FloatTensor<B>, dim: usize) -> FloatTensor<B> {
    let mut shape = dims(&x);
    shape.remove(dim);
    reshape::<B>(B::sum_dim(x, dim), shape)
}

/// Of the scores, `[b, chunks, groups, chunk, chunk]`; and the sums of gradient times weight over the positions that a
/// position sees, and, without its step size, over those that see it.
pub fn weights<B: LocalKernels>(
    grad: FloatTensor<B>,
    scores: &FloatTensor<B>,
    decays: &Decays<B>,
    inputs: &StepInputs<B>,
    shape: SsdShape,
) -> [FloatTensor<B>; 3] {
    let steps = row_of::<B>(decays.steps.clone());
    let stays = B::float_mul(grad, shares::<B>(decays, inputs, shape));
    let size = dims(&stays);
    let of_scores = B::float_mul(stays.clone(), steps.clone());
    let serves = shape.heads / shape.groups;
    let of_scores = reshape::<B>(of_scores, [size[0], size[1], shape.groups, serves, size[3], size[4]]);
    let along = B::float_mul(stays, for_heads::<B>(scores.clone(), shape));
    [summed::<B>(of_scores, 3), summed::<B>(B::float_mul(along.clone(), steps), 4), summed::<B>(along, 3)]
}

/// Of what chunks add, and of the share of a head's state that each chunk leaves, `[b, chunks, h]`.
pub fn states<B: LocalKernels>(
    in_front: &FloatTensor<B>,
    grad: FloatTensor<B>,
    decays: &Decays<B>,
    shape: SsdShape,
) -> [FloatTensor<B>; 2] {
    let factors = chunk_shares::<B>(decays, shape);
    let size = dims(&grad);
    let mut behind = zeros::<B>([size[0], 1, size[2], size[3], size[4]], &grad);
    let mut of_summands = Vec::with_capacity(size[1]);
    for c in (0..size[1]).rev() {
        let of = |x: &FloatTensor<B>| narrow::<B>(x.clone(), 1, c, c + 1);
        of_summands.push(behind.clone());
        behind = B::float_add(B::float_mul(behind, of(&factors)), of(&grad));
    }
    of_summands.reverse();
    let of_summands = B::float_cat(of_summands, 1);
    let along = from_columns::<B>(B::float_mul(of_summands.clone(), in_front.clone()), shape);
    [of_summands, summed::<B>(summed::<B>(along, 4), 3)]
}

/// Of x, B and C, `[s, b, features]`, and sums over a head's features.
pub fn combine<B: LocalKernels>(
    grad: &FloatTensor<B>,
    sums: InputSums<B>,
    decays: &Decays<B>,
    inputs: &Combined<B>,
    shape: SsdShape,
) -> (FloatTensor<B>, [FloatTensor<B>; 3]) {
    let dy = by_head::<B>(wide::<B>(grad.clone()), shape.heads, shape);
    let x = wide::<B>(narrow::<B>(inputs.x.clone(), 2, 0, shape.inner()));
    let x = by_head::<B>(x, shape.heads, shape);
    let [before, taken] = [sums.before, sums.taken].map(|x| from_columns::<B>(x, shape));
    let skip = reshape::<B>(cast::<B>(inputs.skip.clone(), x.dtype()), [1, 1, shape.heads, 1, 1]);
    let share = column_of::<B>(B::float_mul(decays.steps.clone(), decays.until.clone()));
    let of_x = B::float_add(B::float_mul(share, taken.clone()), B::float_mul(skip, dy.clone()));
    let of_x = B::float_add(of_x, sums.inside);
    let [of_b, of_c] = [sums.b, sums.c].map(|[a, b]| B::float_add(a, b));
    let parts = [of_x, of_b, of_c].map(|part| in_sequence::<B>(part, shape)).into();
    let over_features = |a: &FloatTensor<B>, b: &FloatTensor<B>| summed::<B>(B::float_mul(a.clone(), b.clone()), 4);
    let combined = [over_features(&x, &taken), over_features(&dy, &before), over_features(&dy, &x)];
    (cast::<B>(B::float_cat(parts, 2), inputs.x.dtype()), combined)
}

/// Of step sizes before their function, `[s, b, h]`, and of their biases, the logarithms of rates, and the skips.
pub fn decays<B: LocalKernels>(
    inputs: &StepInputs<B>,
    decays: &Decays<B>,
    [later, earlier]: [FloatTensor<B>; 2],
    [of_taken, of_before, of_skip]: [FloatTensor<B>; 3],
    along: FloatTensor<B>,
    shape: SsdShape,
) -> [FloatTensor<B>; 4] {
    let Decays { steps, until, since, .. } = decays;
    let times = |a: &FloatTensor<B>, b: &FloatTensor<B>| B::float_mul(a.clone(), b.clone());
    let last = shape.chunk - 1;
    let taken = times(&times(steps, until), &of_taken);
    let of_sums = B::float_add(B::float_sub(later, times(steps, &earlier)), times(since, &of_before));
    let of_sums = B::float_sub(of_sums, taken.clone());
    // The sum up to the last position is in all shares that are left behind the chunk.
    let size = dims(&along);
    let state =
        times(&reshape::<B>(along, [size[0], size[1], size[2], 1]), &narrow::<B>(since.clone(), 3, last, last + 1));
    let of_last = B::float_add(B::sum_dim(taken, 3), state);
    // A position's logarithm is in the sums of all positions from it on.
    let up_to = B::float_sub(B::float_cumsum(of_sums.clone(), 3), of_sums.clone());
    let from_on = B::float_add(B::float_sub(B::sum_dim(of_sums, 3), up_to), of_last);
    let rates = rates::<B>(inputs);
    let of_steps = B::float_add(B::float_add(times(&from_on, &rates), earlier), times(until, &of_taken));
    let of_rates = times(&times(&from_on, steps), &rates);
    // `[b, chunks, h, chunk]` as `[s, b, h]`.
    let of_steps = B::float_permute(of_steps, &[1, 3, 0, 2]);
    let of_steps = reshape::<B>(of_steps, [shape.chunks() * shape.chunk, shape.samples, shape.heads]);
    let of_raw = B::float_mul(narrow::<B>(of_steps, 0, 0, shape.seq), step_slope::<B>(inputs));
    let over_all = |x: FloatTensor<B>| reshape::<B>(summed::<B>(summed::<B>(summed::<B>(x, 3), 0), 0), [shape.heads]);
    let of_bias = reshape::<B>(B::sum_dim(B::sum_dim(of_raw.clone(), 0), 1), [shape.heads]);
    let like = |x: FloatTensor<B>, like: &FloatTensor<B>| cast::<B>(x, like.dtype());
    [
        like(of_raw, &inputs.raw),
        like(of_bias, &inputs.bias),
        like(over_all(of_rates), &inputs.a_log),
        like(over_all(of_skip), &inputs.a_log),
    ]
}
