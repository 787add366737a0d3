//! Multi-head latent attention (models/src/layers/mla.rs).

use models::recompute::Module;

use super::super::decoder::Latent;
use super::{Chain, Maker};

impl Maker<'_> {
    /// From the hidden states down to latents, which are normalised and become queries, and keys and values; all heads
    /// share the rotated part of their keys. The core is not computed again.
    pub(super) fn latent_attention(&self, chain: &mut Chain, latent: &Latent) {
        let share = self.share;
        let [keys, rotated, unrotated, value] =
            [latent.keys, latent.rotated, latent.unrotated, latent.value].map(|features| features as u64);
        let (queries, head) = (latent.queries.map(|features| features as u64), rotated + unrotated);
        let (stream, norms) = (share.stream_tokens, Some(Module::Norms));
        let x = chain.at;
        chain.norm(norms);
        chain.linear_of(stream, [queries.unwrap_or(0) + keys + rotated, share.hidden], false, chain.at);
        let latents = chain.at;
        let inputs = match queries {
            Some(features) => {
                chain.norm_of(norms, features, stream * features * self.element);
                features
            }
            None => {
                chain.at = x;
                chain.norm_again(norms);
                share.hidden
            }
        };
        let input = chain.enter_again_with(inputs);
        chain.linear(share.heads * head, inputs, false, input);
        chain.op(chain.at.bytes, |_| {});
        let queries = chain.at;
        chain.at = latents;
        chain.norm_of(norms, keys, stream * keys * self.element);
        let input = chain.enter_again_with(keys);
        chain.linear(share.heads * (unrotated + value), keys, false, input);
        let keys_and_values = chain.at;
        chain.at = latents;
        chain.enter_with(rotated);
        chain.at = keys_and_values;
        chain.op(share.tokens * share.heads * head * self.element, |_| {});
        let keys = chain.at;
        let lse = chain.tensor(share.tokens * share.heads * self.element.max(4), None);
        let exchange = self.context(share.tokens * share.heads * (head + value) * self.element);
        // One product of queries with the keys they see, one with the values; the gradient computes the scores again.
        let scores = 2.0 * (share.tokens * share.heads) as f64 * share.visible;
        let (forward, backward) = (scores * (head + value) as f64, scores * (3 * head + 2 * value) as f64);
        chain.op(share.tokens * share.heads * value * self.element, |op| {
            op.keeps = vec![queries, keys, keys_and_values, op.output, lse];
            op.flops = [forward, backward, 0.0];
            op.attention = true;
            op.exchange = exchange;
        });
        chain.linear(share.hidden, share.heads * value, false, chain.at);
        chain.leave();
        chain.add();
    }
}
