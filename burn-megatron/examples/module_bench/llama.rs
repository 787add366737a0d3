//! A Llama written with burn-nn alone: RMS norms, rotary positions, grouped-query attention, SwiGLU, and an output layer
//! that is the embedding.

use burn::module::Initializer;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
    SwiGlu, SwiGluConfig,
};
use burn::prelude::*;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;

/// That of Llama 3.
const VOCABULARY: usize = 128_256;
const HEAD_DIM: usize = 64;
/// Heads of queries that share one of keys and values.
const GROUP: usize = 4;

#[derive(Module, Debug)]
pub struct Llama {
    embedding: Embedding,
    blocks: Vec<Block>,
    pub norm: RmsNorm,
    rope: RotaryEncoding,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    mlp_norm: RmsNorm,
    gate: SwiGlu,
    down: Linear,
}

impl Llama {
    /// Llama 3.2 1B has width 2048 and 16 layers.
    pub fn new(width: usize, layers: usize, sequence: usize, device: &Device) -> Self {
        let kv_width = width / GROUP;
        let norm = || RmsNormConfig::new(width).init(device);
        let linear = |input, output| LinearConfig::new(input, output).with_bias(false).init(device);
        let block = |_| Block {
            attention_norm: norm(),
            wq: linear(width, width),
            wk: linear(width, kv_width),
            wv: linear(width, kv_width),
            wo: linear(width, width),
            mlp_norm: norm(),
            gate: SwiGluConfig::new(width, 4 * width).init(device),
            down: linear(4 * width, width),
        };
        let embedding = EmbeddingConfig::new(VOCABULARY, width);
        Self {
            embedding: embedding.with_initializer(Initializer::Normal { mean: 0.0, std: 0.02 }).init(device),
            blocks: (0..layers).map(block).collect(),
            norm: norm(),
            rope: RotaryEncodingConfig::new(sequence, HEAD_DIM).with_theta(500_000.0).init(device),
        }
    }

    /// The cross-entropy of each token of `[batch, sequence + 1]` but the first, after those before it.
    pub fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = tokens.dims();
        let length = length - 1;
        let labels = tokens.clone().narrow(1, 1, length).reshape([batch * length]);
        let mut x = self.embedding.forward(tokens.narrow(1, 0, length));
        for block in &self.blocks {
            x = block.forward(x, &self.rope);
        }
        let head = self.embedding.weight.val().transpose().unsqueeze();
        let logits = self.norm.forward(x).matmul(head).reshape([batch * length, VOCABULARY]);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding) -> Tensor<3> {
        let x = x.clone() + self.attention(self.attention_norm.forward(x), rope);
        x.clone() + self.down.forward(self.gate.forward(self.mlp_norm.forward(x)))
    }

    fn attention(&self, x: Tensor<3>, rope: &RotaryEncoding) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let heads = |x: Tensor<3>| {
            let heads = x.dims()[2] / HEAD_DIM;
            x.reshape([batch, length, heads, HEAD_DIM]).swap_dims(1, 2)
        };
        let q = rope.forward(heads(self.wq.forward(x.clone())));
        let k = rope.forward(heads(self.wk.forward(x.clone())));
        let v = heads(self.wv.forward(x));
        let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
        let out = attention(q, k, v, None, None, causal);
        self.wo.forward(out.swap_dims(1, 2).reshape([batch, length, width]))
    }
}

/// Tokens `[items, sequence + 1]` that are computed where they are used.
pub fn tokens(items: &[usize], sequence: usize, device: &Device) -> Tensor<2, Int> {
    let (first, count) = (items[0] as i64, items.len() as i64);
    let item = Tensor::<1, Int>::arange(first..first + count, device).reshape([items.len(), 1]);
    let at = Tensor::<1, Int>::arange(0..sequence as i64 + 1, device).reshape([1, sequence + 1]);
    ((item + 1) * (at * 7919 + 31)).remainder_scalar(VOCABULARY as i64)
}
