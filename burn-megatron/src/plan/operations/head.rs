//! The head: final norm, logits and loss, and the modules that predict further tokens.

use std::ops::Range;

use backend_dist::ops::positions_at_once;

use super::super::traffic::Collective;
use super::{Chain, Exchange, ID, Maker, Over, Unit};

impl Maker<'_> {
    pub(super) fn head(&self) -> Unit {
        let mut chain = Chain::new(self, self.stream(), true);
        chain.norm(None);
        let mut hidden = chain.at;
        self.losses(&mut chain, self.share.vocab * self.share.hidden);
        let mut modules = Vec::with_capacity(self.decoder.mtp);
        for module in 0..self.decoder.mtp {
            chain.at = hidden;
            modules.push(self.predictor(&mut chain, self.decoder.layers + module));
            hidden = chain.at;
            self.losses(&mut chain, 0);
        }
        chain.unit(false, true, modules)
    }

    /// Logits, whose weight has this many elements of its own, and their losses. Logits that are computed piece by
    /// piece are not kept but computed again (backend-dist/src/ops/head.rs).
    fn losses(&self, chain: &mut Chain, weight: u64) {
        let (share, wide) = (self.share, self.element.max(4));
        let positions = positions_at_once(share.tokens as usize, share.vocab as usize, self.logits_at_once) as u64;
        let in_pieces = positions < share.tokens;
        let input = match in_pieces {
            true => chain.enter_again(),
            false => {
                chain.enter();
                chain.at
            }
        };
        chain.linear(share.vocab, share.hidden, false, input);
        let product = chain.ops.last_mut().expect("it was just added");
        (product.weight, product.matrix) = (weight, weight);
        if in_pieces {
            product.again = true;
            product.linear = false;
            product.output.bytes = positions * share.vocab * self.element;
            chain.at = product.output;
        }
        let logits = chain.at;
        let statistics = chain.tensor(share.tokens * wide, None);
        let labels = chain.tensor(share.tokens * ID, None);
        let exchange = chain.parallel().then_some(Exchange {
            forward: Some(Collective::AllReduce),
            backward: None,
            bytes: 3 * share.tokens * wide,
            over: Over::Tensor,
            again: false,
        });
        chain.op(share.tokens * wide, |op| {
            op.keeps = if in_pieces { vec![statistics, labels] } else { vec![logits, statistics, labels] };
            op.exchange = exchange;
        });
    }

    /// A module of multi-token prediction, which has the number of a layer: from the hidden states before it to its
    /// own, normalised. Its embedding and output layer are the model's. Gives its operations.
    fn predictor(&self, chain: &mut Chain, layer: usize) -> Range<usize> {
        let (first, hidden, features) = (chain.ops.len(), chain.at, self.share.hidden);
        let ids = chain.tensor(self.share.tokens * ID, None);
        chain.at = ids;
        chain.op(self.share.tokens * features * self.element, |op| op.keeps = vec![ids]);
        chain.leave();
        chain.norm(None);
        chain.at = hidden;
        chain.norm(None);
        chain.op(2 * self.stream(), |_| {});
        chain.linear_of(self.share.stream_tokens, [features, 2 * features], false, chain.at);
        self.block(chain, layer);
        chain.norm(None);
        first..chain.ops.len()
    }
}
