//! Multi-head latent attention (models/src/layers/mla.rs).

use layouts::recompute::Module;

use super::super::decoder::Latent;
use super::{Chain, UnitBuilder};

impl UnitBuilder<'_> {
    /// Projects the hidden states to latents, normalises them and projects them to queries, keys and values. All
    /// heads share the RoPE part of their keys.
    pub(super) fn latent_attention(&self, chain: &mut Chain, latent: &Latent) {
        let local = self.local;
        let [keys, rotated, unrotated, value] =
            [latent.keys, latent.rotated, latent.unrotated, latent.value].map(|features| features as u64);
        let (queries, head) = (latent.queries.map(|features| features as u64), rotated + unrotated);
        let (stream, norms) = (local.stream_tokens, Some(Module::Norms));
        let x = chain.at;
        chain.norm(norms);
        let normed = chain.at;
        let down = [queries.unwrap_or(0) + keys + rotated, local.hidden];
        chain.of("attention.kv_a_proj_with_mqa").linear_of(stream, down, false, normed);
        let latents = chain.at;
        let inputs = match queries {
            Some(features) => {
                chain.norm_of(norms, features, stream * features * self.element);
                features
            }
            None => {
                chain.at = x;
                chain.norm_sharing_weight(norms);
                local.hidden
            }
        };
        let input = chain.enter_saving_shard_of(inputs);
        let of_queries = if latent.queries.is_some() { "attention.q_b_proj" } else { "attention.q_proj" };
        chain.of(of_queries).linear(local.heads * head, inputs, false, input);
        chain.op(chain.at.bytes, |_| {});
        let queries = chain.at;
        chain.at = latents;
        chain.norm_of(norms, keys, stream * keys * self.element);
        let input = chain.enter_saving_shard_of(keys);
        chain.of("attention.kv_b_proj").linear(local.heads * (unrotated + value), keys, false, input);
        let keys_and_values = chain.at;
        chain.at = latents;
        chain.enter_with(rotated);
        chain.at = keys_and_values;
        chain.op(local.tokens * local.heads * head * self.element, |_| {});
        let keys = chain.at;
        let again = self.recompute.selects(Module::CoreAttention);
        let core = again.then_some(Module::CoreAttention);
        let lse = chain.tensor(local.tokens * local.heads * self.element.max(4), core);
        let communication = self.context(local.tokens * local.heads * (head + value) * self.element);
        // One matmul with the visible keys, one with the values; backward recomputes the scores.
        let scores = 2.0 * (local.tokens * local.heads) as f64 * local.visible;
        let (forward, backward) = (scores * (head + value) as f64, scores * (3 * head + 2 * value) as f64);
        chain.op_of(local.tokens * local.heads * value * self.element, core, |op| {
            op.saves = vec![queries, keys, keys_and_values, op.output, lse];
            op.flops = [forward, backward, 0.0];
            op.attention = true;
            op.again = again;
            op.communication = communication;
        });
        let input = chain.at;
        chain.of("attention.o_proj").linear(local.hidden, local.heads * value, false, input);
        chain.leave();
        chain.add();
    }
}
