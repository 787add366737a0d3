//! The operations of the head: final norm, logits and loss, and multi-token prediction modules.

use std::ops::Range;

use layouts::sizes::positions_at_once;

use super::super::collective::Collective;
use super::super::post_training::LossOf;
use super::{Activation, Chain, Communication, ID, Op, Over, Unit, UnitBuilder};

/// Tensors of the logits' size that are saved for backward, and others in the widest moment: of logits divided by a
/// temperature, with a teacher's logits, with the likeliest tokens of a file.
const TEMPERED: [u64; 2] = [1, 1];
const TAUGHT: [u64; 2] = [3, 2];
const LIKELIEST: [u64; 2] = [3, 1];

impl UnitBuilder<'_> {
    pub(super) fn head(&self) -> Unit {
        let mut chain = Chain::new(self, self.stream(), true);
        chain.of("norm").norm(None);
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
    /// chunks are recomputed instead of saved (backend-dist/ops/src/tensor_parallel/head.rs).
    fn losses(&self, chain: &mut Chain, weight: u64) {
        match self.job.post_training.loss {
            LossOf::Label => {}
            LossOf::TemperedLogits => return self.losses_of_logits(chain, weight, TEMPERED),
            LossOf::Teacher(_) => return self.losses_of_logits(chain, weight, TAUGHT),
            LossOf::TopK => return self.losses_of_logits(chain, weight, LIKELIEST),
        }
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
        let gemm = self.logits(chain, weight, input);
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
        // The kernel (backend-dist/ops/src/cuda/cross_entropy.rs).
        let in_place = self.job.gpu && self.element == 2;
        chain.op(local.tokens * wide, |op| {
            op.saves = if chunked { vec![statistics, labels] } else { vec![logits, statistics, labels] };
            op.in_place = in_place;
            op.communication = communication;
        });
    }

    /// The GEMM of the logits, whose weight has the given number of own elements.
    fn logits<'a>(&self, chain: &'a mut Chain, weight: u64, input: Activation) -> &'a mut Op {
        let table = if self.decoder.tied { "embed_tokens" } else { "lm_head" };
        chain.of(table).linear(self.local.vocab, self.local.hidden, false, input);
        let gemm = chain.ops.last_mut().expect("it was just added");
        let is_frozen = gemm.frozen > 0;
        (gemm.weight, gemm.matrix, gemm.frozen) = (weight, weight, 0);
        if is_frozen {
            gemm.freeze(self.element);
        }
        gemm
    }

    /// The losses of whole logits, which every tensor-parallel rank has, by plain operations. What autodiff saves, and what
    /// is there besides in the widest moment, is counted in wide tensors of the logits' size, as often as
    /// `tests/planned_memory` finds them.
    fn losses_of_logits(&self, chain: &mut Chain, weight: u64, [saved, others]: [u64; 2]) {
        let (local, wide) = (self.local, self.element.max(4));
        let whole = local.tokens * self.decoder.vocab as u64;
        chain.enter();
        let input = chain.at;
        self.logits(chain, weight, input);
        if chain.parallel() {
            let (forward, backward) = (Some(Collective::AllGather), None);
            let bytes = whole * self.element;
            let communication = Some(Communication { forward, backward, bytes, over: Over::Tensor, again: false });
            chain.op(bytes, |op| op.communication = communication);
        }
        let taught = if matches!(self.job.post_training.loss, LossOf::Teacher(_)) { self.element } else { 0 };
        let kept = chain.tensor(whole * (saved * wide + taught), None);
        chain.op(local.tokens * wide, |op| {
            op.saves = vec![kept];
            op.temporary = others * whole * wide;
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
