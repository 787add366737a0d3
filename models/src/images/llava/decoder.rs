//! A Llama or Qwen2 as a plain Burn module.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig};
use burn::tensor::activation::silu;
use burn::tensor::{Device, Int, Tensor};

use crate::LlamaConfig;
use crate::encoders::RmsNorm;
use crate::images::attention::{attend, split_heads};
use crate::layers::{Angles, RopeConfig, RotaryEmbedding};

/// A Llama or Qwen2: token embedding, blocks, and logits.
#[derive(Module, Debug)]
pub struct Decoder {
    embedding: Embedding,
    blocks: Vec<DecoderBlock>,
    norm: RmsNorm,
    /// Of the logits, if it is not the embedding.
    head: Option<Embedding>,
    #[module(skip)]
    rope: RopeConfig,
}

/// Keys and values of a block at the positions so far, `[batch, key-value heads, length, head_dim]`.
#[derive(Clone, Debug)]
pub struct KeyValues {
    keys: Tensor<4>,
    values: Tensor<4>,
}

#[derive(Module, Debug)]
struct DecoderBlock {
    attention_norm: RmsNorm,
    attention: GroupedAttention,
    mlp_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct GroupedAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    n_heads: usize,
    n_heads_kv: usize,
}

impl Decoder {
    /// With initial weights from the generator of `device`, whose float type the parameters have.
    pub fn new(config: &LlamaConfig, device: &Device) -> Self {
        let normal = Initializer::Normal { mean: 0.0, std: config.initializer_range };
        let linear =
            |from, to, bias| LinearConfig::new(from, to).with_bias(bias).with_initializer(normal.clone()).init(device);
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let [heads, key_value_heads] =
            [config.num_attention_heads, config.num_key_value_heads].map(|heads| heads * config.head_dim);
        let table = || EmbeddingConfig::new(config.vocab_size, hidden).with_initializer(normal.clone()).init(device);
        let [input_bias, output_bias] = config.attention_biases();
        let block = |_| DecoderBlock {
            attention_norm: RmsNorm::new(config.hidden_size, config.rms_norm_eps, device),
            attention: GroupedAttention {
                query: linear(hidden, heads, input_bias),
                key: linear(hidden, key_value_heads, input_bias),
                value: linear(hidden, key_value_heads, input_bias),
                output: linear(heads, hidden, output_bias),
                n_heads: config.num_attention_heads,
                n_heads_kv: config.num_key_value_heads,
            },
            mlp_norm: RmsNorm::new(config.hidden_size, config.rms_norm_eps, device),
            gate: linear(hidden, inner, config.mlp_bias),
            up: linear(hidden, inner, config.mlp_bias),
            down: linear(inner, hidden, config.mlp_bias),
        };
        Self {
            embedding: table(),
            blocks: (0..config.num_hidden_layers).map(block).collect(),
            norm: RmsNorm::new(config.hidden_size, config.rms_norm_eps, device),
            head: (!config.tie_word_embeddings).then(table),
            rope: RopeConfig { head_dim: config.head_dim, theta: config.rope_theta, scaling: config.rope_scaling },
        }
    }

    /// Number of tokens that it knows.
    pub fn vocabulary(&self) -> usize {
        self.embedding.weight.lazy_shape().dims::<2>()[0]
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the embedding is the output layer too.
    pub fn is_tied(&self) -> bool {
        self.head.is_none()
    }

    /// `[batch, length, hidden]` of `tokens [batch, length]`.
    pub fn embed(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.embedding.forward(tokens)
    }

    /// Block `index` of `x [batch, length, hidden]`, whose first position is 0.
    pub fn block(&self, index: usize, x: Tensor<3>) -> Tensor<3> {
        self.block_after(index, x, &mut None)
    }

    /// Block `index` of `x [batch, length, hidden]`, which follows the positions of `past`. Those of `x` are added to it.
    pub fn block_after(&self, index: usize, x: Tensor<3>, past: &mut Option<KeyValues>) -> Tensor<3> {
        let block = &self.blocks[index];
        let x = x.clone() + block.attention.forward(block.attention_norm.forward(x), self.rope, past);
        let normed = block.mlp_norm.forward(x.clone());
        x + block.down.forward(silu(block.gate.forward(normed.clone())) * block.up.forward(normed))
    }

    /// Logits `[batch, length, vocabulary]` of what comes out of the last block.
    pub fn logits(&self, x: Tensor<3>) -> Tensor<3> {
        let head = self.head.as_ref().unwrap_or(&self.embedding).weight.val();
        self.norm.forward(x).matmul(head.transpose().unsqueeze())
    }
}

impl GroupedAttention {
    /// Each position sees itself and those before it.
    fn forward(&self, x: Tensor<3>, rope: RopeConfig, past: &mut Option<KeyValues>) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let start = past.as_ref().map_or(0, |past| past.keys.dims()[2]);
        let end = start + length;
        let angles = RotaryEmbedding::new(&rope).angles(start..end, x.dtype(), &x.device());
        let q = rotated(split_heads(self.query.forward(x.clone()), self.n_heads), &angles);
        let k = rotated(split_heads(self.key.forward(x.clone()), self.n_heads_kv), &angles);
        let v = split_heads(self.value.forward(x), self.n_heads_kv);
        let (k, v) = match past.take() {
            Some(past) => (Tensor::cat(vec![past.keys, k], 2), Tensor::cat(vec![past.values, v], 2)),
            None => (k, v),
        };
        *past = Some(KeyValues { keys: k.clone(), values: v.clone() });
        let (groups, d) = (self.n_heads / self.n_heads_kv, rope.head_dim);
        let repeated = |x: Tensor<4>| {
            let x = x.reshape([batch, self.n_heads_kv, 1, end, d]);
            x.expand([batch, self.n_heads_kv, groups, end, d]).reshape([batch, self.n_heads, end, d])
        };
        let later = Tensor::<2, Int>::ones([length, end], &q.device()).triu(1 + start as i64).bool();
        self.output.forward(attend(q, repeated(k), repeated(v), Some(later.unsqueeze())))
    }
}

/// Rotates `x [batch, heads, length, d]`: the first half of a head's features with the second.
fn rotated(x: Tensor<4>, angles: &Angles) -> Tensor<4> {
    let half = x.dims()[3] / 2;
    let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
    let (cos, sin) = (angles.cos.clone().unsqueeze::<4>(), angles.sin.clone().unsqueeze::<4>());
    let turned = first.clone() * cos.clone() - second.clone() * sin.clone();
    Tensor::cat(vec![turned, second * cos + first * sin], 3)
}
