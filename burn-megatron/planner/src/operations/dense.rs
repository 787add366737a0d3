//! The operations of a dense decoder: embedding, attention, MLP.

use std::ops::Range;

use layouts::recompute::Module;

use super::super::collective::Collective;
use super::{Chain, Communication, ID, Over, Unit, UnitBuilder};
use host::schedule::stages::Stage;

impl UnitBuilder<'_> {
    pub(super) fn embedding(&self) -> Unit {
        let (local, hidden) = (self.local, self.local.hidden);
        let mut chain = Chain::new(self, local.tokens * ID, false);
        let ids = chain.at;
        chain.of("embed_tokens").op(local.tokens * hidden * self.element, |op| {
            op.saves = vec![ids];
            op.weight = local.vocab * hidden;
        });
        chain.leave();
        if let Some(positions) = self.decoder.positions {
            chain.of("embed_positions").op(self.stream(), |op| op.weight = positions as u64 * hidden);
        }
        chain.unit(false, false, Vec::new())
    }

    /// A range of a stage's layers.
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

    /// Layer `layer` of the whole model; multi-token prediction modules follow the last layer.
    pub(super) fn block(&self, chain: &mut Chain, layer: usize) {
        chain.place = format!("layers.{layer}.");
        let decoder = self.decoder;
        match (&decoder.latent, decoder.linear_of(layer), decoder.mamba_of(layer)) {
            (Some(latent), ..) => self.latent_attention(chain, latent),
            (None, Some(linear), _) => self.linear_attention(chain, linear),
            (None, None, Some(mamba)) => self.mamba2(chain, mamba),
            (None, None, None) if decoder.has_keys(layer) => self.attention(chain),
            (None, None, None) => {}
        }
        match decoder.experts_of(layer) {
            Some(experts) => self.moe(chain, experts),
            None if decoder.has_mlp(layer) => self.mlp(chain),
            None => {}
        }
    }

    fn attention(&self, chain: &mut Chain) {
        let (decoder, local) = (self.decoder, self.local);
        let [input_bias, output_bias] = decoder.attention_bias;
        if decoder.norms[0] {
            chain.of("input_layernorm").norm(Some(Module::Norms));
        }
        let input = chain.enter_saving_shard();
        let gate = if decoder.output_gate { local.queries } else { 0 };
        chain.of("attention.q_proj").linear(local.queries + gate + 2 * local.keys, local.hidden, input_bias, input);
        if let Some(adapters) = self.adapters {
            let outputs = [local.queries + gate, local.keys, local.keys];
            let outputs: Vec<_> = outputs.into_iter().zip(adapters.qkv).collect();
            chain.adapt_columns(local.hidden, &outputs, input);
        }
        if decoder.head_norm || decoder.projection_norm {
            let input = chain.at;
            let heads = 2 * decoder.head_dim as u64;
            let weight = if decoder.head_norm { heads } else { local.queries + local.keys };
            chain.of("attention.q_norm").op(input.bytes, |op| {
                op.saves = vec![input];
                op.weight = weight;
            });
        }
        if decoder.rope {
            chain.op(chain.at.bytes, |_| {});
        }
        let (qkv, statistics) = (chain.at, local.tokens * local.heads * self.element.max(4));
        // What is multiplied by a gate is an operation of its own, whose output is kept.
        let core = (!decoder.output_gate).then_some(Module::CoreAttention);
        let lse = chain.tensor(statistics, core);
        // Two matmuls over the visible keys; backward recomputes the scores and has four more.
        let flops = 4.0 * local.tokens as f64 * local.queries as f64 * local.visible;
        let communication = self.context(2 * local.tokens * local.keys * self.element);
        let again = core.is_some_and(|core| self.recompute.selects(core));
        chain.of("attention.sinks").op_of(local.tokens * local.queries * self.element, core, |op| {
            op.saves = vec![qkv, op.output, lse];
            op.flops = [flops, 2.5 * flops, 0.0];
            op.attention = true;
            op.weight = if decoder.sinks { local.heads } else { 0 };
            op.again = again;
            op.communication = communication;
        });
        if decoder.output_gate {
            // The output, the gate and its sigmoid.
            let (answers, gates) = (chain.at, chain.tensor(2 * chain.at.bytes, None));
            chain.op(answers.bytes, |op| op.saves = vec![answers, gates]);
        }
        let input = chain.at;
        chain.of("attention.o_proj").linear(local.hidden, local.queries, output_bias, input);
        if let Some(adapters) = self.adapters {
            chain.adapt_rows(local.queries, local.hidden, adapters.out, input);
        }
        chain.leave();
        if decoder.norms[1] {
            chain.of("post_self_attn_layernorm").norm(None);
        }
        chain.add();
    }

    /// Keys and values, with the given bytes on each rank, are sent to the other context-parallel ranks.
    pub(super) fn context(&self, keys_and_values: u64) -> Option<Communication> {
        (self.layout.cp > 1).then_some(Communication {
            forward: Some(Collective::AllGather),
            backward: Some(Collective::ReduceScatter),
            bytes: keys_and_values * self.layout.cp as u64,
            over: Over::Context,
            again: true,
        })
    }

    fn mlp(&self, chain: &mut Chain) {
        if self.decoder.norms[0] {
            chain.of("post_attention_layernorm").norm(Some(Module::Norms));
        }
        self.plain_mlp(chain, "mlp", self.local.intermediate);
        if self.decoder.norms[1] {
            chain.of("post_mlp_layernorm").norm(None);
        }
        chain.add();
    }

    /// Outputs of the first layer of an MLP or expert of this intermediate size, and its first matrix.
    pub(super) fn first_layer(&self, width: u64) -> (u64, &'static str) {
        if self.decoder.gated { (2 * width, "gate") } else { (width, "up") }
    }

    /// Of gate and up what the first layer of an MLP or expert has.
    pub(super) fn gated<'a, T>(&self, both: &'a [T; 2]) -> &'a [T] {
        if self.decoder.gated { both } else { &both[1..] }
    }

    /// An MLP with a local intermediate size of `width`, by its name in a layer.
    pub(super) fn plain_mlp(&self, chain: &mut Chain, name: &str, width: u64) {
        let (decoder, local) = (self.decoder, self.local);
        let input = chain.enter_saving_shard();
        let (outputs, first) = self.first_layer(width);
        chain.of(&format!("{name}.{first}_proj")).linear(outputs, local.hidden, decoder.mlp_bias, input);
        if let Some(adapters) = self.adapters {
            let outputs: Vec<_> = self.gated(&adapters.up).iter().map(|read| (width, *read)).collect();
            chain.adapt_columns(local.hidden, &outputs, input);
        }
        let input = chain.at;
        let again = self.recompute.selects(Module::MlpActivation);
        chain.op_of(local.tokens * width * self.element, Some(Module::MlpActivation), |op| {
            op.saves = vec![input];
            op.again = again;
        });
        let input = chain.at;
        chain.of(&format!("{name}.down_proj")).linear(local.hidden, width, decoder.mlp_bias, input);
        if let Some(adapters) = self.adapters {
            chain.adapt_rows(width, local.hidden, adapters.down, input);
        }
        chain.leave();
    }

    /// Bytes of the residual stream.
    pub(super) fn stream(&self) -> u64 {
        self.local.stream_tokens * self.local.hidden * self.element
    }
}
