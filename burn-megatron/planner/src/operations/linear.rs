//! Linear attention (models/src/layers/gated_delta, backend-dist/ops/src/gated_delta).

use layouts::recompute::Module;

use super::super::decoder::Linear;
use super::{Chain, UnitBuilder};

/// Positions of a chunk, of sequences that are as long.
const CHUNK: u64 = 64;

impl UnitBuilder<'_> {
    /// Projects the hidden states, convolves, and applies the delta rule chunk by chunk. The convolution and the rule save
    /// their inputs; `tests/planned_memory` has what both need for the time of their backward passes.
    pub(super) fn linear_attention(&self, chain: &mut Chain, linear: &Linear) {
        let (local, tp, wide) = (self.local, self.layout.tp as u64, self.element.max(4));
        let [key_heads, heads, dk, dv, kernel] =
            [linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, linear.kernel].map(|n| n as u64);
        let (keys, values, heads) = (key_heads * dk / tp, heads * dv / tp, heads / tp);
        let (convolved, queries, state) = (2 * keys + values, heads * dk, heads * dk * dv);
        chain.of("input_layernorm").norm(Some(Module::Norms));
        let input = chain.enter_saving_shard();
        chain.of("linear_attention.q_proj").linear(2 * keys + 2 * values + 2 * heads, local.hidden, false, input);
        if let Some(adapters) = self.adapters {
            let outputs = [keys, keys, values, values, heads, heads];
            let outputs: Vec<_> = outputs.into_iter().zip(adapters.recurrent).collect();
            chain.adapt_columns(local.hidden, &outputs, input);
        }
        let projected = chain.at;
        let own_keys = keys * self.copies(key_heads / tp);
        self.head_all_to_all(chain, 2 * own_keys + values + 2 * heads);
        let own = chain.at;
        // Parts of the projection are views of it, or copies in its place.
        chain.op(local.tokens * (2 * own_keys + values) * self.element, |op| {
            op.saves = vec![own];
            op.weight = convolved * kernel;
            op.temporary = 4 * local.tokens * convolved * wide;
        });
        let inputs = chain.at;
        let [of_groups, of_heads] = [own_keys / dk, heads].map(|heads| heads * CHUNK);
        let states = state / CHUNK;
        // Scores, what systems solve, what positions of a chunk and states answer, and what is written into these.
        let solved = CHUNK * (2 * own_keys + values + queries) + 2 * state;
        let forward = solved + CHUNK * values + state;
        // All but the answers inside chunks again, and the gradients of both operands of all that is multiplied.
        let backward = solved + state + CHUNK * (3 * own_keys + 4 * values + 2 * queries + 2 * of_heads) + 7 * state;
        chain.op(local.tokens * values * self.element, |op| {
            op.saves = vec![inputs];
            op.weight = 2 * heads;
            op.flops = [2.0 * (local.tokens * forward) as f64, 2.0 * (local.tokens * backward) as f64, 0.0];
            // Where states are passed back, or systems: operands, states, and what is between the positions of a chunk.
            let operands = 2 * own_keys + 2 * of_groups + 4 * of_heads + 4 * values + queries + states;
            let passed = 4 * values + 2 * queries + of_heads + 3 * states;
            // Scores of groups that serve several heads are copied for each, and their copies are written over.
            let scores = if of_groups == of_heads { 8 } else { 7 };
            let systems = 3 * values + queries + scores * of_heads + states;
            op.temporary = local.tokens * (operands + passed.max(systems)) * self.element;
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
        if let Some(adapters) = self.adapters {
            chain.adapt_rows(values, local.hidden, adapters.recurrent_out, input);
        }
        chain.leave();
        chain.add();
    }
}
