//! The operations of a mixture of experts, every expert being used alike.

use models::recompute::Module;

use super::super::decoder::Experts;
use super::super::traffic::Collective;
use super::{Activation, Chain, Exchange, ID, Maker, Over};

impl Maker<'_> {
    /// Tokens are routed, sent to the ranks of their experts, computed, sent back and summed up.
    pub(super) fn mixture(&self, chain: &mut Chain, experts: &Experts) {
        let share = self.share.experts;
        let (hidden, element, wide) = (self.share.hidden, self.element, self.element.max(4));
        chain.norm(Some(Module::Norms));
        if share.shared > 0 {
            let input = chain.at;
            self.plain_mlp(chain, share.shared);
            chain.at = input;
        }
        // Without sequence parallelism each rank takes its part of the tokens, and all get all results.
        let alone = self.layout.tp > 1 && !self.layout.sequence_parallel();
        let gather = |forward, backward| {
            let bytes = self.share.tokens * hidden * element;
            Some(Exchange { forward, backward, bytes, over: Over::Tensor, again: false })
        };
        if alone {
            let exchange = gather(None, Some(Collective::AllGather));
            chain.op(share.tokens * hidden * element, |op| op.exchange = exchange);
        }
        let input = chain.at;
        let probabilities = chain.tensor(share.tokens * experts.count as u64 * wide, None);
        let places = chain.tensor(share.copies * ID, None);
        chain.op(share.copies * hidden * element, |op| {
            op.keeps = vec![input, probabilities, places];
            op.weight = experts.count as u64 * hidden;
            op.matrix = op.weight;
        });
        self.to_experts(chain, share.rows);
        let input = chain.at;
        self.grouped(chain, 2 * share.intermediate, hidden, input);
        let input = chain.at;
        let again = self.recompute.selects(Module::MlpActivation);
        chain.op_of(share.rows * share.intermediate * element, Some(Module::MlpActivation), |op| {
            op.keeps = vec![input];
            op.again = again;
        });
        let input = chain.at;
        self.grouped(chain, hidden, share.intermediate, input);
        self.to_experts(chain, share.copies);
        // Probabilities are multiplied in front of the second product, so its result is not kept.
        chain.op(share.tokens * hidden * element, |op| op.keeps = vec![places]);
        if alone {
            let exchange = gather(Some(Collective::AllGather), None);
            chain.op(self.share.tokens * hidden * element, |op| op.exchange = exchange);
        }
        chain.add();
    }

    /// Copies of tokens go to the ranks of their experts, or back; the same bytes either way, because the parts of an
    /// expert get the same copies and each sends back its part of the sum.
    fn to_experts(&self, chain: &mut Chain, rows: u64) {
        if self.layout.ep * self.layout.expert_tp() == 1 {
            return;
        }
        let row = self.share.hidden * self.element;
        let both = Some(Collective::AllToAll);
        let bytes = self.share.experts.rows * row;
        let exchange = Exchange { forward: both, backward: both, bytes, over: Over::Experts, again: false };
        chain.op(rows * row, |op| op.exchange = Some(exchange));
    }

    /// The same matrix product for every expert.
    fn grouped(&self, chain: &mut Chain, outputs: u64, inputs: u64, input: Activation) {
        let share = self.share.experts;
        let product = 2.0 * share.rows as f64 * outputs as f64 * inputs as f64;
        let weight = share.count * outputs * inputs;
        let fp8 = chain.fp8 && self.fp8_experts;
        let (keeps, fp8) = chain.kept_by_product(fp8, input, weight, share.rows * outputs);
        chain.op(share.rows * outputs * self.element, |op| {
            op.keeps = keeps;
            op.fp8 = fp8;
            op.weight = weight;
            op.matrix = op.weight;
            op.expert = true;
            op.linear = true;
            op.flops = [product; 3];
        });
    }
}
