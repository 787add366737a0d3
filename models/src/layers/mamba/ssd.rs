//! The recurrence in chunks of positions (state-space duality, arXiv 2405.21060, section 6 and listing 1).
//!
//! A head's state `S [n, p]` answers `C` with `Sᵀ C`. At each position it decays and takes up the position's value:
//! `S ← exp(Δ A) S + B (Δ x)ᵀ`. Inside a chunk all positions are computed at once, with GEMMs. Heads of a group share B and
//! C, so the GEMMs with the state are those of a group, whose heads are columns.

use backend_dist::ops::matmul;
use burn::tensor::Tensor;

use crate::layers::recurrent::{Borders, Chunks, Decays, apply, states};

/// What the recurrence reads of all positions, in at least fp32.
pub(super) struct Inputs {
    /// `[b, h, s, p]`.
    pub x: Tensor<4>,
    /// The step size Δ, `[b, h, s]`.
    pub dt: Tensor<3>,
    /// A, negative, `[h]`.
    pub a: Tensor<1>,
    /// `[b, groups, s, n]`.
    pub b: Tensor<4>,
    /// `[b, groups, s, n]`.
    pub c: Tensor<4>,
}

/// The states' answers `[b, h, s, p]`, without `D x`, and if asked for the states behind the last position,
/// `[b, groups, n, h/groups p]`. Without a `first` state it is zero at the beginning; it is zero wherever a document
/// begins.
pub(super) fn ssd(
    inputs: Inputs,
    first: Option<Tensor<4>>,
    borders: Option<&Borders>,
    with_last: bool,
) -> (Tensor<4>, Option<Tensor<4>>) {
    let Inputs { x, dt, a, b, c } = inputs;
    let ([samples, heads, seq, p], [_, groups, _, n]) = (x.dims(), b.dims());
    let (device, dtype, serves) = (x.device(), x.dtype(), heads / groups);
    let (chunks, of_groups, columns) = (Chunks::of(seq), samples * groups, serves * p);
    let Chunks { size: chunk, count, .. } = chunks;
    let Decays { between, since } = Decays::new(dt.clone() * a.reshape([1, heads, 1]), chunks, borders);
    let x = chunks.split(x * dt.unsqueeze_dim(3));
    let [b, c] = [b, c].map(|x| chunks.split(x).reshape([of_groups * count, chunk, n]));
    // The heads of a group as its columns, and back.
    let as_columns = |x: Tensor<5>| {
        let x = x.reshape([of_groups, serves, count, chunk, p]).permute([0, 2, 3, 1, 4]);
        x.reshape([of_groups * count, chunk, columns])
    };
    let as_heads = |x: Tensor<3>| {
        let x = x.reshape([of_groups, count, chunk, serves, p]).permute([0, 3, 1, 2, 4]);
        x.reshape([samples, heads, count, chunk, p])
    };

    // What positions of the same chunk answer.
    let scores = matmul(c.clone(), b.clone().swap_dims(1, 2)).reshape([of_groups, 1, count, chunk, chunk]);
    let weights = scores * between.clone().reshape([of_groups, serves, count, chunk, chunk]);
    let all = samples * heads * count;
    let inside = matmul(weights.reshape([all, chunk, chunk]), x.clone().reshape([all, chunk, p]));
    let inside = inside.reshape([samples, heads, count, chunk, p]);

    // What a chunk does to the state in front of it: S ← P S + U.
    let until_end = between.narrow(3, chunk - 1, 1).reshape([samples, heads, count, chunk, 1]);
    let summands = matmul(b.swap_dims(1, 2), as_columns(x * until_end)).reshape([of_groups, count, n, columns]);
    let factors = since.clone().narrow(3, chunk - 1, 1).reshape([of_groups, serves, count, 1]);
    let factors = factors.permute([0, 2, 1, 3]).expand([of_groups, count, serves, p]);
    let factors = factors.reshape([of_groups, count, 1, columns]);
    let first = match first {
        Some(first) => first.reshape([of_groups, n, columns]),
        None => Tensor::zeros([of_groups, n, columns], (&device, dtype)),
    };
    let in_front = states(factors.clone(), summands.clone(), first);
    let last = with_last.then(|| {
        let of = |x: Tensor<4>| x.narrow(1, count - 1, 1);
        let last = apply(of(factors), of(in_front.clone())) + of(summands);
        last.reshape([samples, groups, n, columns])
    });
    let before = as_heads(matmul(c, in_front.reshape([of_groups * count, n, columns]))) * since.unsqueeze_dim(4);
    (chunks.join(inside + before), last)
}

#[cfg(test)]
mod tests;
