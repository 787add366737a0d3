//! The operations of the head: final norm, logits and loss, and multi-token prediction modules.

use std::ops::Range;

use backend_dist::ops::positions_at_once;

use super::super::collective::Collective;
use super::{Chain, Communication, ID, Over, Unit, UnitBuilder};

impl UnitBuilder<'_> {
    pub(super) fn head(&self) -> Unit {
        let mut chain = Chain::new(self, self.stream(), true);
        chain.norm(None);
        let mut hidden = chain.at;
        self.losses(&mut chain, self.local.vocab * self.local.hidden);
        let mut modules = Vec::with_capacity(self.decoder.mtp);
        for module in 0..self.decoder.mtp {
            chain.at = hidden;
            modules.push(self.predictor(&mut chain, self.decoder.layers + module));
            hidden = chain.at;
            self.losses(&mut chain, 0);
        }
        chain.unit(false, true, modules)
    }

    /// Logits, whose weight has the given number of own elements, and their losses. Logits that are computed in
    /// chunks are recomputed instead of saved (backend-dist/ops/src/head.rs).
    fn losses(&self, chain: &mut Chain, weight: u64) {
        let (local, wide) = (self.local, self.element.max(4));
        let positions = positions_at_once(local.tokens as usize, local.vocab as usize, self.logits_at_once) as u64;
        let chunked = positions < local.tokens;
        let input = match chunked {
            true => chain.enter_saving_shard(),
            false => {
                chain.enter();
                chain.at
            }
        };
        chain.linear(local.vocab, local.hidden, false, input);
        let gemm = chain.ops.last_mut().expect("it was just added");
        (gemm.weight, gemm.matrix, gemm.frozen) = (weight, weight, 0);
        if self.adapters.is_some() {
            gemm.freeze(self.element);
        }
        if chunked {
            gemm.again = true;
            gemm.linear = false;
            gemm.output.bytes = positions * local.vocab * self.element;
            chain.at = gemm.output;
        }
        let logits = chain.at;
        let statistics = chain.tensor(local.tokens * wide, None);
        let labels = chain.tensor(local.tokens * ID, None);
        let communication = chain.parallel().then_some(Communication {
            forward: Some(Collective::AllReduce),
            backward: None,
            bytes: 3 * local.tokens * wide,
            over: Over::Tensor,
            again: false,
        });
        chain.op(local.tokens * wide, |op| {
            op.saves = if chunked { vec![statistics, labels] } else { vec![logits, statistics, labels] };
            op.communication = communication;
        });
    }

    /// A multi-token prediction module, with the number of a layer: from the hidden states before it to its own,
    /// normalised. Embedding and output layer are the model's. Returns its operations.
    fn predictor(&self, chain: &mut Chain, layer: usize) -> Range<usize> {
        let (first, hidden, features) = (chain.ops.len(), chain.at, self.local.hidden);
        let ids = chain.tensor(self.local.tokens * ID, None);
        chain.at = ids;
        chain.op(self.local.tokens * features * self.element, |op| op.saves = vec![ids]);
        chain.leave();
        chain.norm(None);
        chain.at = hidden;
        chain.norm(None);
        chain.op(2 * self.stream(), |_| {});
        chain.linear_of(self.local.stream_tokens, [features, 2 * features], false, chain.at);
        self.block(chain, layer);
        chain.norm(None);
        first..chain.ops.len()
    }
}
