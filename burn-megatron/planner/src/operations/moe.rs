//! The operations of an MoE layer under perfect load balance.

use layouts::recompute::Module;

use super::super::collective::Collective;
use super::super::decoder::Experts;
use super::{Activation, Chain, Communication, ID, Over, UnitBuilder};

impl UnitBuilder<'_> {
    /// Routing, dispatch, experts, combine.
    pub(super) fn moe(&self, chain: &mut Chain, experts: &Experts) {
        let local = self.local.experts;
        let (hidden, element, wide) = (self.local.hidden, self.element, self.element.max(4));
        chain.of("post_attention_layernorm").norm(Some(Module::Norms));
        if local.shared > 0 {
            let input = chain.at;
            self.plain_mlp(chain, "mlp.shared_experts", local.shared);
            chain.at = input;
        }
        // Without sequence parallelism each rank dispatches its shard of the tokens, and all ranks get all results.
        let alone = self.layout.tp > 1 && !self.layout.sequence_parallel();
        let gather = |forward, backward| {
            let bytes = self.local.tokens * hidden * element;
            Some(Communication { forward, backward, bytes, over: Over::Tensor, again: false })
        };
        if alone {
            let communication = gather(None, Some(Collective::AllGather));
            chain.op(local.tokens * hidden * element, |op| op.communication = communication);
        }
        let input = chain.at;
        let probabilities = chain.tensor(local.tokens * experts.count as u64 * wide, None);
        let places = chain.tensor(local.copies * ID, None);
        chain.of("mlp.router").op(local.copies * hidden * element, |op| {
            op.saves = vec![input, probabilities, places];
            op.matrix = experts.count as u64 * hidden;
            let gate = if experts.shared_gate { hidden } else { 0 };
            op.weight = op.matrix + gate + if experts.biases { experts.count as u64 } else { 0 };
        });
        self.to_experts(chain, local.rows);
        let input = chain.at;
        let (outputs, first) = self.first_layer(local.intermediate);
        let first = format!("mlp.experts.0.{first}_proj");
        self.grouped(chain.of(&first), outputs, hidden, experts.biases, input);
        if let Some(adapters) = self.adapters {
            chain.adapt_experts([outputs, hidden], self.gated(&adapters.expert_up), input);
        }
        let input = chain.at;
        let again = self.recompute.selects(Module::MlpActivation);
        chain.op_of(local.rows * local.intermediate * element, Some(Module::MlpActivation), |op| {
            op.saves = vec![input];
            op.again = again;
        });
        let (before, input) = (input, chain.at);
        self.grouped(chain.of("mlp.experts.0.down_proj"), hidden, local.intermediate, experts.biases, input);
        if let Some(adapters) = self.adapters {
            chain.adapt_experts(
                [hidden, local.intermediate],
                &[adapters.expert_down.then_some(0)],
                if again { before } else { input },
            );
        }
        self.to_experts(chain, local.copies);
        // Probabilities are applied before the second GEMM, so its output is not saved.
        chain.op(local.tokens * hidden * element, |op| op.saves = vec![places]);
        if alone {
            let communication = gather(Some(Collective::AllGather), None);
            chain.op(self.local.tokens * hidden * element, |op| op.communication = communication);
        }
        chain.add();
    }

    /// Dispatch or combine of token copies. Both send the same bytes, because the tensor-parallel ranks of an
    /// expert get the same copies and each returns its shard of the sum.
    fn to_experts(&self, chain: &mut Chain, rows: u64) {
        if self.layout.ep * self.layout.expert_tp() == 1 {
            return;
        }
        let row = self.local.hidden * self.element;
        let both = Some(Collective::AllToAll);
        let bytes = self.local.experts.rows * row;
        let communication = Communication { forward: both, backward: both, bytes, over: Over::Experts, again: false };
        chain.op(rows * row, |op| op.communication = Some(communication));
    }

    /// The same GEMM for every expert.
    fn grouped(&self, chain: &mut Chain<'_>, outputs: u64, inputs: u64, biases: bool, input: Activation) {
        let local = self.local.experts;
        let gemm = 2.0 * local.rows as f64 * outputs as f64 * inputs as f64;
        let weight = local.count * outputs * inputs;
        // Their tokens are padded.
        let fp8 = chain.fp8 && self.fp8_experts && chain.fits_fp8(0, [outputs, inputs]);
        let (saves, fp8) = chain.saved_by_gemm(fp8, input, weight, local.rows * outputs);
        chain.op(local.rows * outputs * self.element, |op| {
            op.saves = saves;
            op.fp8 = fp8;
            op.matrix = weight;
            op.weight = weight + if biases { local.count * outputs } else { 0 };
            op.expert = true;
            op.linear = true;
            op.flops = [gemm; 3];
        });
        chain.without_frozen_gradient(local.count, [outputs, inputs]);
    }
}
