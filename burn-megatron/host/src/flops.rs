//! Floating-point operations per token and MFU, in the two conventions in use.
//!
//! Megatron counts a causal attention once (half of the score matrix), torchtitan and others count it in full; numbers
//! of one convention must not be compared with numbers of the other. Formula of Megatron:
//! `num_floating_point_operations` in megatron/training/training.py.

/// What the count needs to know of a decoder.
#[derive(Clone, Copy, Debug)]
pub struct FlopShape {
    /// Layers with a dense MLP.
    pub dense_layers: usize,
    /// Layers with routed experts.
    pub moe_layers: usize,
    /// Layers with softmax attention.
    pub attention_layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads × head size.
    pub query_width: usize,
    /// Key/value heads × head size.
    pub kv_width: usize,
    /// What queries, keys and values come from, if not from the hidden states; then `kv_width` does not count.
    pub latent: Option<LatentFlops>,
    /// Layers with linear attention or Mamba-2 in the place of attention, if there are such.
    pub linear: Option<LinearFlops>,
    /// Attention's output has a gate as wide as the queries.
    pub output_gate: bool,
    /// Modules of multi-token prediction, whose layers are among the others.
    pub mtp: usize,
    /// Inner width of the dense MLP.
    pub ffn: usize,
    /// Inner width of one expert.
    pub expert_ffn: usize,
    /// Experts that a token visits.
    pub top_k: usize,
    /// Inner width of the shared expert, 0 without one.
    pub shared_ffn: usize,
    /// Whether the MLP is gated (three matrices instead of two).
    pub gated: bool,
    /// Vocabulary size with padding.
    pub padded_vocab: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Whether the weights are frozen, as under LoRA: their gradients are not computed. Adapters are not counted.
    pub frozen: bool,
}

/// Features of latent attention, over all heads.
#[derive(Clone, Copy, Debug)]
pub struct LatentFlops {
    /// Of the latent of queries, if there is one.
    pub queries: Option<usize>,
    /// Of the latent of keys and values.
    pub keys: usize,
    /// Of the rotated key that all heads share.
    pub shared: usize,
    /// Of all value heads.
    pub values: usize,
    /// That come from the latent of keys and values.
    pub up: usize,
}

/// Layers with a recurrent state: linear attention (Gated DeltaNet) or Mamba-2.
#[derive(Clone, Copy, Debug)]
pub struct LinearFlops {
    /// Layers that have it.
    pub layers: usize,
    /// Elements of a layer's projections and convolution.
    pub weights: usize,
    /// FLOPs of a token with a layer's states, as Megatron-LM counts them. Gated DeltaNet: four GEMMs of the size of the
    /// states, for decay and correction, key and key, value and key, state and query. Mamba-2: seven times the states.
    pub state_flops: usize,
}

/// How much of a causal score matrix is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionCount {
    /// Only the lower triangle, as Megatron-LM.
    Causal,
    /// All of it, as torchtitan and NeMo up to 25.07.
    Full,
}

impl FlopShape {
    /// FLOPs of forward and backward per token: GEMMs only, recomputation not counted.
    pub fn per_token(&self, count: AttentionCount) -> f64 {
        let [h, q, kv, f, fe, fs] =
            [self.hidden, self.query_width, self.kv_width, self.ffn, self.expert_ffn, self.shared_ffn]
                .map(|n| n as f64);
        let (dense, moe) = (self.dense_layers as f64, self.moe_layers as f64);
        let matrices = if self.gated { 3.0 } else { 2.0 };
        // Two FLOPs for each weight forward, for the gradient of the input, and for the weight's own.
        let passes = if self.frozen { 4.0 } else { 6.0 };
        let mlp = passes * h * matrices * (f * dense + (fe * self.top_k as f64 + fs) * moe);
        let gate = if self.output_gate { h * q } else { 0.0 };
        let (attention, values) = match self.latent {
            None => (h * (q + 2.0 * kv) + q * h + gate, q),
            Some(LatentFlops { queries, keys, shared, values, up }) => {
                let [keys, shared, values, up] = [keys, shared, values, up].map(|n| n as f64);
                let queries = queries.map_or(h * q, |rank| rank as f64 * (h + q));
                (queries + h * (keys + shared) + keys * up + values * h, values)
            }
        };
        let linear_layers = self.linear.map_or(0.0, |linear| linear.layers as f64);
        let [by_weights, with_state] =
            self.linear.map_or([0.0; 2], |linear| [linear.weights, linear.state_flops].map(|n| n as f64));
        let linear = linear_layers * (passes * by_weights + 3.0 * with_state);
        let attentions = self.attention_layers as f64;
        let projections = passes * (attentions * attention + self.mtp as f64 * 2.0 * h * h);
        let logits = passes * h * self.padded_vocab as f64 * (1 + self.mtp) as f64;
        let triangle = 3.0 * (q + values) * self.seq as f64 * attentions;
        let scores = match count {
            AttentionCount::Causal => triangle,
            AttentionCount::Full => 2.0 * triangle,
        };
        mlp + projections + linear + logits + scores
    }

    /// Model FLOPs utilisation: the share of `peak` FLOP/s per device that `tokens_per_second` per device amounts to.
    pub fn mfu(&self, tokens_per_second: f64, peak: f64, count: AttentionCount) -> f64 {
        tokens_per_second * self.per_token(count) / peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama3_8b(seq: usize) -> FlopShape {
        FlopShape {
            dense_layers: 32,
            moe_layers: 0,
            attention_layers: 32,
            hidden: 4096,
            query_width: 4096,
            kv_width: 1024,
            latent: None,
            linear: None,
            output_gate: false,
            mtp: 0,
            ffn: 14336,
            expert_ffn: 0,
            top_k: 0,
            shared_ffn: 0,
            gated: true,
            padded_vocab: 128256,
            seq,
            frozen: false,
        }
    }

    fn giga(shape: FlopShape, count: AttentionCount) -> f64 {
        shape.per_token(count) / 1e9
    }

    // Published test vectors: Megatron's own unit test of the formula and torchtitan's Llama-3-8B number.
    #[test]
    fn both_conventions_give_the_published_numbers() {
        assert!((giga(llama3_8b(8192), AttentionCount::Causal) - 51.470).abs() < 5e-4);
        assert!((giga(llama3_8b(8192), AttentionCount::Full) - 57.91).abs() < 5e-3);
        let (dense_layers, attention_layers, hidden) = (80, 80, 8192);
        let llama3_70b =
            FlopShape { dense_layers, attention_layers, hidden, query_width: hidden, ffn: 28672, ..llama3_8b(8192) };
        assert!((giga(llama3_70b, AttentionCount::Causal) - 449.22).abs() < 5e-3);
        let mixtral = FlopShape {
            dense_layers: 0,
            moe_layers: 32,
            expert_ffn: 14336,
            top_k: 2,
            padded_vocab: 32000,
            ..llama3_8b(4096)
        };
        assert!((giga(mixtral, AttentionCount::Causal) - 79.71).abs() < 5e-3);
    }

    #[test]
    fn frozen_weights_cost_two_thirds_and_attention_stays() {
        let [trained, frozen] =
            [false, true].map(|frozen| giga(FlopShape { frozen, ..llama3_8b(8192) }, AttentionCount::Causal));
        let scores = giga(llama3_8b(8192), AttentionCount::Full) - trained;
        assert!((frozen - scores - (trained - scores) * 2.0 / 3.0).abs() < 1e-9, "{frozen} of {trained}");
    }

    #[test]
    fn published_throughput_gives_the_published_teraflops() {
        // 14,451 tokens/s/GPU of Llama-3-8B at 8192 were published as 744 TFLOP/s; an H100's bf16 peak is 989.
        let mfu = llama3_8b(8192).mfu(14_451.0, 989e12, AttentionCount::Causal);
        assert!((mfu * 989.0 - 744.0).abs() < 1.0, "{mfu}");
    }
}
