//! The states between chunks: a linear recurrence, in as many steps as the logarithm of the number of chunks.

use backend_dist::ops::matmul;
use burn::tensor::Tensor;

/// The states in front of each of `n` chunks, of which each turns a state `S` into `P S + U`: `factors [r, n, k, k]`,
/// `summands [r, n, k, v]`, `first [r, k, v]` to `[r, n, k, v]`.
///
/// Two neighbouring chunks are one of twice the length, `P₂ P₁ S + (P₂ U₁ + U₂)`. So the states in front of pairs follow
/// from half as many chunks, and those inside pairs from these. Autodiff adds the gradients of a part of a tensor as a
/// tensor of the whole size: a loop over chunks would cost the square of their number.
pub(in crate::layers) fn states(factors: Tensor<4>, summands: Tensor<4>, first: Tensor<3>) -> Tensor<4> {
    let chunks = summands.dims()[1];
    if chunks == 1 {
        return first.unsqueeze_dim(1);
    }
    let pairs = chunks.div_ceil(2);
    // What an odd last chunk does to the state is of no interest here.
    let paired = |x: Tensor<4>| {
        let [heads, _, height, width] = x.dims();
        let zeros = Tensor::zeros([heads, 2 * pairs - chunks, height, width], (&x.device(), x.dtype()));
        let x = if 2 * pairs > chunks { Tensor::cat(vec![x, zeros], 1) } else { x };
        let x = x.reshape([heads, pairs, 2, height, width]);
        [0, 1].map(|part| x.clone().narrow(2, part, 1).reshape([heads, pairs, height, width]))
    };
    let [heads, _, keys, values] = summands.dims();
    let ([p_1, p_2], [u_1, u_2]) = (paired(factors), paired(summands));
    let both = matmul(p_2.clone(), p_1.clone());
    let of_pairs = states(both, matmul(p_2, u_1.clone()) + u_2, first);
    let inside = matmul(p_1, of_pairs.clone()) + u_1;
    let all = Tensor::stack::<5>(vec![of_pairs, inside], 2).reshape([heads, 2 * pairs, keys, values]);
    all.narrow(1, 0, chunks)
}
