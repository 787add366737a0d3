//! Mamba-2 (models/src/layers/mamba, backend-dist/ops/src/ssd).

use layouts::recompute::Module;

use super::super::decoder::StateSpace;
use super::{Chain, UnitBuilder};

/// Positions of a chunk, of sequences that are as long: of the kernels in 16 bits, and else.
const CHUNKS: [u64; 2] = [128, 64];

impl UnitBuilder<'_> {
    /// Projects the hidden states, convolves, and passes states from chunk to chunk. The convolution saves its input, and
    /// the recurrence its inputs and the states in front of chunks; `tests/planned_memory` has what both need for the
    /// time of their backward passes.
    pub(super) fn mamba2(&self, chain: &mut Chain, mamba: &StateSpace) {
        let (local, tp, wide) = (self.local, self.layout.tp as u64, self.element.max(4));
        let [heads, head_dim, groups, state, kernel] =
            [mamba.heads, mamba.head_dim, mamba.groups, mamba.state, mamba.kernel].map(|n| n as u64);
        let (heads, groups) = (heads / tp, groups / tp.min(groups));
        let (inner, grouped) = (heads * head_dim, groups * state);
        let (convolved, states) = (inner + 2 * grouped, inner * state);
        chain.of("input_layernorm").norm(Some(Module::Norms));
        let input = chain.enter_saving_shard();
        chain.of("mamba.gate_proj").linear(2 * inner + 2 * grouped + heads, local.hidden, mamba.bias, input);
        if let Some(adapters) = self.adapters {
            let outputs = [inner, inner, grouped, grouped, heads];
            let outputs: Vec<_> = outputs.into_iter().zip(adapters.recurrent).collect();
            chain.adapt_columns(local.hidden, &outputs, input);
        }
        let projected = chain.at;
        // What a rank has of fewer groups than ranks that share the sequence, its neighbours have too.
        let grouped = grouped * self.copies(groups);
        self.head_all_to_all(chain, inner + 2 * grouped + heads);
        let own = chain.at;
        // Parts of the projection are views of it, or copies in its place.
        chain.op(local.tokens * (inner + 2 * grouped) * self.element, |op| {
            op.saves = vec![own];
            op.weight = convolved * (kernel + u64::from(mamba.conv_bias));
            op.temporary = 4 * local.tokens * convolved * wide;
        });
        let inputs = chain.at;
        let chunk = if self.element == 2 { CHUNKS[0] } else { CHUNKS[1] };
        let in_front = chain.tensor(local.tokens * states / chunk * self.element, None);
        // B with C for each group, their scores with x, the states and what they answer.
        let multiplied = chunk * (grouped + inner) + 2 * states;
        let flops = 2.0 * local.tokens as f64 * multiplied as f64;
        chain.op(local.tokens * inner * self.element, |op| {
            op.saves = vec![inputs, in_front];
            op.weight = 3 * heads;
            op.flops = [flops, 3.0 * flops, 0.0];
            // Weights between the positions of a chunk and what they are made of, and operands.
            op.temporary = local.tokens * (13 * heads * chunk + 14 * inner) / 4 * self.element;
        });
        self.head_all_to_all(chain, inner);
        let (answers, gate) = (chain.at, self.gate(chain, projected, inner));
        // A group of several ranks is gated and normalised step by step: the gate in SiLU and behind it, the norm's input
        // and what it multiplies.
        let steps = if mamba.groups as u64 >= tp { 0 } else { 4 * local.tokens * inner * wide };
        let steps = chain.tensor(steps, None);
        chain.op(local.tokens * inner * self.element, |op| {
            op.saves = [answers, steps].into_iter().chain(gate).collect();
            op.weight = inner;
            op.temporary = 5 * local.tokens * inner * wide;
        });
        let input = chain.at;
        chain.of("mamba.out_proj").linear(local.hidden, inner, mamba.bias, input);
        if let Some(adapters) = self.adapters {
            chain.adapt_rows(inner, local.hidden, adapters.recurrent_out, input);
        }
        chain.leave();
        chain.add();
    }
}
