//! Attention over latents (MLA): the cache has one short row per position, from which keys and values of all heads follow.
//!
//! A single token attends to the rows themselves. Its scores `q_h . (W_UK,h c)` are `(W_UK,h' q_h) . c`, and the sum of
//! values `W_UV,h c` is `W_UV,h` of the sum of latents `c`: both matrices are absorbed in the query and in the output
//! (DeepSeek-V2, <https://arxiv.org/abs/2405.04434>, section 2.1.2). Chunks of more tokens have so many queries that
//! keys and values of whole heads, which are narrower, take fewer operations.

use backend_dist::ops::{
    AttentionOptions, LinearOptions, Prologue, attention, embedding, latent_keys, linear_with, matmul,
};
use burn::tensor::Tensor;

use super::{PagedKvCache, Step, attend};

/// What makes keys and values of latents: the rank's heads.
#[derive(Debug)]
pub(crate) struct LatentHeads {
    /// `[heads (unrotated + value), latent]`; of each head the rows of its key, then those of its value.
    pub up: Tensor<2>,
    /// Heads.
    pub heads: usize,
    /// Features of the rotated key, which all heads share.
    pub rotated: usize,
    /// Features of a head's key besides.
    pub unrotated: usize,
    /// Features of a head's value.
    pub value: usize,
}

impl LatentHeads {
    /// Attention of one query `[b, 1, heads, rotated + unrotated]` of each sequence to `rows [b, t, rotated + latent]`.
    fn absorbed(&self, q: Tensor<4>, rows: Tensor<3>, bias: Tensor<3>, options: AttentionOptions) -> Tensor<4> {
        let Self { heads, rotated, unrotated, value, .. } = *self;
        let (b, latent) = (q.dims()[0], rows.dims()[2] - rotated);
        let up = self.up.clone().reshape([heads, unrotated + value, latent]);
        let of_keys = up.clone().narrow(1, 0, unrotated);
        let own = q.clone().narrow(3, rotated, unrotated).reshape([b, heads, unrotated]);
        let own = matmul(own.swap_dims(0, 1), of_keys).swap_dims(0, 1).reshape([b, 1, heads, latent]);
        let q = Tensor::cat(vec![q.narrow(3, 0, rotated), own], 3);
        let latents = rows.clone().narrow(2, rotated, latent);
        let of = attend::single_tokens(q, [rows, latents], bias, options, None);
        let of = of.reshape([b, heads, latent]).swap_dims(0, 1);
        let of_values = up.narrow(1, unrotated, value).swap_dims(1, 2);
        matmul(of, of_values).swap_dims(0, 1).reshape([b, 1, heads, value])
    }

    /// Keys `[t, 1, heads, rotated + unrotated]` and values `[t, 1, heads, value]` of `rows [t, 1, rotated + latent]`.
    fn expanded(&self, rows: Tensor<3>) -> [Tensor<4>; 2] {
        let Self { heads, rotated, unrotated, value, .. } = *self;
        let [t, _, width] = rows.dims();
        let latents = rows.clone().narrow(2, rotated, width - rotated);
        let kv = linear_with(latents, Prologue::None, self.up.clone(), None, LinearOptions::default());
        // The key in the row is rotated already.
        let no_angle = ([t, rotated / 2], (&rows.device(), rows.dtype()));
        let angles = [Tensor::ones(no_angle.0, no_angle.1), Tensor::zeros(no_angle.0, no_angle.1)];
        let kv = kv.reshape([t, 1, heads, unrotated + value]);
        latent_keys(kv, rows.narrow(2, 0, rotated), angles, unrotated)
    }
}

impl PagedKvCache {
    /// Writes the rows of the step's tokens, `[n, 1, rotated + latent]`, each the rotated key and the normalised latent, and
    /// attends with their queries `[n, 1, heads, rotated + unrotated]`, each token to its own sequence. Returns
    /// `[n, 1, heads, value]`.
    ///
    /// # Panics
    /// If the tensors record gradients.
    pub(crate) fn attend_latents(
        &mut self,
        layer: usize,
        step: &Step,
        [q, rows]: [Tensor<4>; 2],
        of: &LatentHeads,
        options: AttentionOptions,
    ) -> Tensor<4> {
        assert!(!rows.is_autodiff(), "a cache needs a model that records no gradients: take `model.valid()`");
        let device = q.device();
        let [pool] = self.write(layer, step, [rows]);
        let single = step.leading_single_tokens();
        let mut outputs = Vec::new();
        if single > 0 {
            let q = q.clone().narrow(0, 0, single);
            let gather = self.gather_of_single_tokens(step, single, options.window, 1, &q);
            let rows = gather.read(&pool, 1);
            outputs.push(of.absorbed(q, rows, gather.bias, options));
        }
        let mut first = single;
        for (index, chunk) in step.chunks().iter().enumerate().skip(single) {
            let new = chunk.positions.len();
            let [k, v] = of.expanded(embedding(pool.clone(), self.ids_of_chunk(index, chunk, &device), 0));
            outputs.push(attention(q.clone().narrow(0, first, new), k, v, options));
            first += new;
        }
        if outputs.len() == 1 { outputs.swap_remove(0) } else { Tensor::cat(outputs, 0) }
    }
}
