//! Linear attention in its plain form (models/src/layers/gated_delta).

use models::recompute::Module;

use super::super::decoder::Linear;
use super::{Chain, UnitBuilder};

/// Positions of a chunk, of sequences that are as long.
const CHUNK: u64 = 64;

impl UnitBuilder<'_> {
    /// Projects the hidden states, convolves, and applies the delta rule chunk by chunk. What autodiff saves on the way
    /// is counted as wide tensors of the sizes that occur, as often as `tests/planned_memory.rs` finds them.
    pub(super) fn linear_attention(&self, chain: &mut Chain, linear: &Linear) {
        let (local, tp, wide) = (self.local, self.layout.tp as u64, self.element.max(4));
        let [key_heads, heads, dk, dv, kernel] =
            [linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, linear.kernel].map(|n| n as u64);
        let (keys, values, heads) = (key_heads * dk / tp, heads * dv / tp, heads / tp);
        let (convolved, queries, state) = (2 * keys + values, heads * dk, heads * dk * dv);
        chain.of("input_layernorm").norm(Some(Module::Norms));
        let input = chain.enter_saving_shard();
        chain.of("linear_attention.q_proj").linear(2 * keys + 2 * values + 2 * heads, local.hidden, false, input);
        let projected = chain.at;
        let own_keys = keys * self.copies(key_heads / tp);
        self.head_all_to_all(chain, 2 * own_keys + values + 2 * heads);
        let own = chain.at;
        // What is convolved is a part of the projection; of its output the values are read by what follows.
        let saved = chain.tensor(local.tokens * values * wide, None);
        chain.op(local.tokens * (2 * own_keys + values) * wide, |op| {
            op.saves = vec![own, saved];
            op.weight = convolved * kernel;
            op.temporary = 4 * local.tokens * convolved * wide;
        });
        let square = heads * CHUNK;
        let between_chunks = (2 * queries * dk + 3 * state) / CHUNK;
        let per_token = 8 * queries + 2 * values + 8 * square + between_chunks;
        let saved = chain.tensor(local.tokens * per_token * wide, None);
        let inverse = u64::from(CHUNK.ilog2());
        // Keys with keys and queries, the triangular system and what it solves, the states and what they answer.
        let multiplied = 4 * CHUNK * queries
            + 2 * CHUNK * values
            + square * CHUNK * 2 * inverse
            + 2 * state
            + queries * dk
            + (2 * state * dk + queries * dk * dk) / CHUNK;
        let flops = 2.0 * local.tokens as f64 * multiplied as f64;
        chain.op(local.tokens * values * self.element, |op| {
            op.saves = vec![saved];
            op.weight = 2 * heads;
            op.flops = [flops, 2.0 * flops, 0.0];
        });
        self.head_all_to_all(chain, values);
        let (answers, before) = (chain.at, self.gate(chain, projected, values));
        // The norm's input, the gate before and behind SiLU, what it multiplies.
        let gate = chain.tensor(3 * local.tokens * values * wide, None);
        chain.op(answers.bytes, |op| {
            op.saves = [answers, gate].into_iter().chain(before).collect();
            op.weight = dv;
        });
        let input = chain.at;
        chain.of("linear_attention.o_proj").linear(local.hidden, values, false, input);
        chain.leave();
        chain.add();
    }
}
