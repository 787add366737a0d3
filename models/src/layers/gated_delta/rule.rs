//! The gated delta rule in chunks of positions (arXiv 2412.06464, section 3.3).
//!
//! A head's state `S [dk, dv]` answers a query `q` with `Sᵀ q`. At each position it decays, and what it answers to the
//! position's key moves towards the position's value: `S ← α (I − β k kᵀ) S + β k vᵀ`. Inside a chunk all positions are
//! computed at once, with GEMMs.

use backend_dist::ops::matmul;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};

use crate::layers::recurrent::{Borders, Chunks, Decays, states};

/// What the rule reads of all positions, in at least fp32. Heads are those of values.
pub(super) struct Inputs {
    /// Queries `[b, h, s, dk]`, with the factor of the scores.
    pub queries: Tensor<4>,
    /// Keys `[b, h, s, dk]`, of length one.
    pub keys: Tensor<4>,
    /// Values `[b, h, s, dv]`.
    pub values: Tensor<4>,
    /// Logarithm of the share of the state that stays, `log α [b, h, s]`.
    pub decay: Tensor<3>,
    /// How far a key's answer moves towards its value, `β [b, h, s]`.
    pub beta: Tensor<3>,
}

/// Answers `[b, h, s, dv]`, and if asked for the state behind the last position, `[b, h, dk, dv]`. Without a `first` state
/// it is zero at the beginning; it is zero wherever a document begins.
pub(super) fn gated_delta_rule(
    inputs: Inputs,
    first: Option<Tensor<4>>,
    borders: Option<&Borders>,
    with_last: bool,
) -> (Tensor<4>, Option<Tensor<4>>) {
    let ([b, h, seq, dk], dv) = (inputs.keys.dims(), inputs.values.dims()[3]);
    let (device, dtype) = (inputs.keys.device(), inputs.keys.dtype());
    let chunks @ Chunks { size: chunk, count: n, .. } = Chunks::of(seq);
    let heads = b * h;
    let all = heads * n;
    let by_chunk = |x: Tensor<4>| {
        let features = x.dims()[3];
        chunks.split(x).reshape([all, chunk, features])
    };
    let [q, k, v] = [inputs.queries, inputs.keys, inputs.values].map(by_chunk);
    let beta = by_chunk(inputs.beta.unsqueeze_dim(3));
    let Decays { between, since } = Decays::new(inputs.decay, chunks, borders);
    let between = between.reshape([all, chunk, chunk]);
    let since = since.reshape([all, chunk, 1]);

    // Each position corrects what the earlier ones of its chunk have written: a triangular system.
    let k_beta = k.clone() * beta.clone();
    let diagonal = Tensor::<2, Bool>::tril_mask([chunk, chunk], -1, &device).unsqueeze::<3>();
    let system = matmul(k_beta.clone(), k.clone().swap_dims(1, 2)) * between.clone();
    let solve = inverse(system.mask_fill(diagonal.expand([all, chunk, chunk]), 0.0), chunk, &device);
    let written = matmul(solve.clone(), v * beta);
    let read = matmul(solve, k_beta * since.clone());

    // What a chunk does to the state in front of it: S ← P S + U.
    let stays = since.clone().narrow(1, chunk - 1, 1);
    let k_until_end = (k.clone() * between.clone().narrow(1, chunk - 1, 1).swap_dims(1, 2)).swap_dims(1, 2);
    let eye = Tensor::<2>::eye(dk, &device).cast(dtype).unsqueeze::<3>();
    let factors = (eye * stays - matmul(k_until_end.clone(), read.clone())).reshape([heads, n, dk, dk]);
    let summands = matmul(k_until_end, written.clone()).reshape([heads, n, dk, dv]);
    let first = match first {
        Some(first) => first.reshape([heads, dk, dv]),
        None => Tensor::zeros([heads, dk, dv], (&device, dtype)),
    };
    let in_front = states(factors.clone(), summands.clone(), first);
    let last = with_last.then(|| {
        let of = |x: Tensor<4>| x.narrow(1, n - 1, 1);
        (matmul(of(factors), of(in_front.clone())) + of(summands)).reshape([b, h, dk, dv])
    });

    let scores = matmul(q.clone(), k.swap_dims(1, 2)) * between;
    let from_state = q * since - matmul(scores.clone(), read);
    let answers = matmul(scores, written) + matmul(from_state, in_front.reshape([all, dk, dv]));
    (chunks.join(answers.reshape([b, h, n, chunk, dv])), last)
}

/// `(I + L)⁻¹ = T` of strictly lower triangular `L [m, chunk, chunk]`, whose differential is `−T dL T`: the backward pass
/// needs nothing but `T`, so no step towards it is recorded.
fn inverse(lower: Tensor<3>, chunk: usize, device: &Device) -> Tensor<3> {
    if !lower.is_autodiff() {
        return by_blocks(lower, chunk, device);
    }
    let value = lower.clone().detach();
    let inverse = by_blocks(value.clone(), chunk, device).detach();
    // The difference is zero; its gradient is not.
    inverse.clone() - matmul(matmul(inverse.clone(), lower - value), inverse)
}

/// The inverse by blocks of twice the size in each step: that of `[[A, 0], [C, B]]` is `[[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]`. A
/// sum of powers of `L` would cancel digits where keys are alike.
fn by_blocks(lower: Tensor<3>, chunk: usize, device: &Device) -> Tensor<3> {
    let (all, dtype) = (lower.dims()[0], lower.dtype());
    let mut inverse = Tensor::<2>::eye(chunk, device).cast(dtype).unsqueeze::<3>().expand([all, chunk, chunk]);
    let mut block = 1;
    while block < chunk {
        let below = matmul(lower.clone() * below_diagonal(chunk, block, device, dtype), inverse.clone());
        inverse = inverse.clone() - matmul(inverse, below);
        block *= 2;
    }
    inverse
}

/// 1 in the lower left block, of size `block`, of each block of twice the size on the diagonal, else 0: `[1, n, n]`.
fn below_diagonal(n: usize, block: usize, device: &Device, dtype: DType) -> Tensor<3> {
    let is_there = |row: usize, column: usize| {
        row / (2 * block) == column / (2 * block)
            && !(row / block).is_multiple_of(2)
            && (column / block).is_multiple_of(2)
    };
    let at = |row| (0..n).map(move |column| f32::from(u8::from(is_there(row, column))));
    let values: Vec<f32> = (0..n).flat_map(at).collect();
    Tensor::from_data(TensorData::new(values, [1, n, n]), (device, dtype))
}

#[cfg(test)]
mod tests;
