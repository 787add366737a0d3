//! Mamba-2 in its plain form (models/src/layers/mamba).

use models::recompute::Module;

use super::super::decoder::StateSpace;
use super::{Chain, UnitBuilder};

/// Positions of a chunk, of sequences that are as long.
const CHUNK: u64 = 64;

impl UnitBuilder<'_> {
    /// Projects the hidden states, convolves, and passes states from chunk to chunk. What autodiff saves on the way is
    /// counted as wide tensors of the sizes that occur, as often as `tests/planned_memory.rs` finds them.
    pub(super) fn mamba2(&self, chain: &mut Chain, mamba: &StateSpace) {
        let (local, tp, wide) = (self.local, self.layout.tp as u64, self.element.max(4));
        let [heads, head_dim, groups, state, kernel] =
            [mamba.heads, mamba.head_dim, mamba.groups, mamba.state, mamba.kernel].map(|n| n as u64);
        let (heads, groups) = (heads / tp, groups / tp.min(groups));
        let (inner, grouped) = (heads * head_dim, groups * state);
        let (convolved, states) = (inner + 2 * grouped, inner * state);
        chain.norm(Some(Module::Norms));
        let input = chain.enter_saving_shard();
        chain.linear(2 * inner + 2 * grouped + heads, local.hidden, mamba.bias, input);
        let projected = chain.at;
        // The convolution's input and its output before and in SiLU.
        let saved = chain.tensor(3 * local.tokens * convolved * wide, None);
        chain.op(local.tokens * convolved * wide, |op| {
            op.saves = vec![projected, saved];
            op.weight = convolved * (kernel + u64::from(mamba.conv_bias));
        });
        let square = heads * CHUNK;
        // Three shares that stay, and masks of a byte.
        let squares = 7 * square / 2 + groups * CHUNK;
        let per_token = 4 * inner + 2 * grouped + squares + 2 * states / CHUNK;
        let saved = chain.tensor(local.tokens * per_token * wide, None);
        // B with C for each group, their scores with x, the states and what they answer.
        let multiplied = CHUNK * (grouped + inner) + 2 * states;
        let flops = 2.0 * local.tokens as f64 * multiplied as f64;
        chain.op(local.tokens * inner * wide, |op| {
            op.saves = vec![saved];
            op.weight = 3 * heads;
            op.flops = [flops, 2.0 * flops, 0.0];
        });
        let answers = chain.at;
        // The gate in SiLU and behind it, the norm's input and what it multiplies.
        let gate = chain.tensor(4 * local.tokens * inner * wide, None);
        chain.op(local.tokens * inner * self.element, |op| {
            op.saves = vec![answers, gate];
            op.weight = inner;
        });
        let input = chain.at;
        chain.linear(local.hidden, inner, mamba.bias, input);
        chain.leave();
        chain.add();
    }
}
