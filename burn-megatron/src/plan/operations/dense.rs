//! The parts of a dense decoder: embedding, attention with whole keys and values, MLP.

use std::ops::Range;

use models::recompute::Module;

use super::super::traffic::Collective;
use super::{Chain, Exchange, ID, Maker, Over, Unit};
use crate::schedule::stages::Stage;

impl Maker<'_> {
    pub(super) fn embedding(&self) -> Unit {
        let (share, hidden) = (self.share, self.share.hidden);
        let mut chain = Chain::new(self, share.tokens * ID, false);
        let ids = chain.at;
        chain.op(share.tokens * hidden * self.element, |op| {
            op.keeps = vec![ids];
            op.weight = share.vocab * hidden;
        });
        chain.leave();
        if let Some(positions) = self.decoder.positions {
            chain.op(self.stream(), |op| op.weight = positions as u64 * hidden);
        }
        chain.unit(false, false, Vec::new())
    }

    /// Some of a stage's layers.
    pub(super) fn layers(&self, stage: &Stage, part: Range<usize>, recomputed: bool) -> Unit {
        let mut chain = Chain::new(self, self.stream(), true);
        let mut layers = Vec::new();
        for layer in part.map(|layer| stage.layers.start + layer) {
            let first = chain.ops.len();
            chain.fp8 = self.fp8.contains(&layer);
            self.block(&mut chain, layer);
            layers.push(first..chain.ops.len());
        }
        chain.unit(recomputed, false, layers)
    }

    /// Layer `layer`, counted over the whole model, modules of multi-token prediction behind the last one.
    pub(super) fn block(&self, chain: &mut Chain, layer: usize) {
        match &self.decoder.latent {
            Some(latent) => self.latent_attention(chain, latent),
            None => self.attention(chain),
        }
        match self.decoder.experts_of(layer) {
            Some(experts) => self.mixture(chain, experts),
            None => self.mlp(chain),
        }
    }

    fn attention(&self, chain: &mut Chain) {
        let (decoder, share) = (self.decoder, self.share);
        let bias = decoder.attention_bias;
        chain.norm(Some(Module::Norms));
        let input = chain.enter_again();
        chain.linear(share.queries + 2 * share.keys, share.hidden, bias, input);
        if decoder.head_norms {
            let input = chain.at;
            chain.op(input.bytes, |op| {
                op.keeps = vec![input];
                op.weight = 2 * decoder.head_dim as u64;
            });
        }
        if decoder.positions.is_none() {
            chain.op(chain.at.bytes, |_| {});
        }
        let (qkv, statistics) = (chain.at, share.tokens * share.heads * self.element.max(4));
        let lse = chain.tensor(statistics, Some(Module::CoreAttention));
        // Two products of queries with the keys they see; the gradient computes the scores again and has four more.
        let flops = 4.0 * share.tokens as f64 * share.queries as f64 * share.visible;
        let exchange = self.context(2 * share.tokens * share.keys * self.element);
        let again = self.recompute.selects(Module::CoreAttention);
        chain.op_of(share.tokens * share.queries * self.element, Some(Module::CoreAttention), |op| {
            op.keeps = vec![qkv, op.output, lse];
            op.flops = [flops, 2.5 * flops, 0.0];
            op.attention = true;
            op.again = again;
            op.exchange = exchange;
        });
        chain.linear(share.hidden, share.queries, bias, chain.at);
        chain.leave();
        chain.add();
    }

    /// Keys and values, so many bytes on each rank, go to the ranks that have other parts of the sequence.
    pub(super) fn context(&self, keys_and_values: u64) -> Option<Exchange> {
        (self.layout.cp > 1).then_some(Exchange {
            forward: Some(Collective::AllGather),
            backward: Some(Collective::ReduceScatter),
            bytes: keys_and_values * self.layout.cp as u64,
            over: Over::Context,
            again: true,
        })
    }

    fn mlp(&self, chain: &mut Chain) {
        chain.norm(Some(Module::Norms));
        self.plain_mlp(chain, self.share.intermediate);
        chain.add();
    }

    /// An MLP of which the rank has `width` features.
    pub(super) fn plain_mlp(&self, chain: &mut Chain, width: u64) {
        let (decoder, share) = (self.decoder, self.share);
        let input = chain.enter_again();
        chain.linear(if decoder.gated { 2 * width } else { width }, share.hidden, decoder.mlp_bias, input);
        let input = chain.at;
        let again = self.recompute.selects(Module::MlpActivation);
        chain.op_of(share.tokens * width * self.element, Some(Module::MlpActivation), |op| {
            op.keeps = vec![input];
            op.again = again;
        });
        chain.linear(share.hidden, width, decoder.mlp_bias, chain.at);
        chain.leave();
    }

    /// Bytes of the residual stream.
    pub(super) fn stream(&self) -> u64 {
        self.share.stream_tokens * self.share.hidden * self.element
    }
}
