//! The model, as one writes it with Burn for one device.

use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer};
use burn::tensor::{Bool, Device, Int, Tensor};

use super::attention::{KeysValues, T5Attention};
use super::config::T5Config;
use super::feed_forward::T5FeedForward;
use super::positions::T5Positions;
use crate::encoders::{Padding, RmsNorm};
use crate::hf::IGNORED;

/// An encoder, a decoder, and a head over the vocabulary.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use models::{T5, T5Config};
///
/// let device = Device::flex();
/// let config = T5Config { vocab_size: 40, d_model: 16, d_kv: 8, d_ff: 32, num_heads: 2, ..T5Config::small() };
/// let model = T5::new(&config, &device);
/// let tokens = Tensor::<2, Int>::from_data([[5, 6, 7, 1]], &device);
/// let written = model.generate(tokens, None, 8, config.eos_token_id);
/// assert!((1..=8).contains(&written[0].len()));
/// ```
#[derive(Module, Debug)]
pub struct T5 {
    /// `[vocabulary, d_model]`, of the encoder, the decoder and perhaps the head.
    pub shared: Embedding,
    /// Reads the input.
    pub encoder: T5Encoder,
    /// Writes the output.
    pub decoder: T5Decoder,
    /// The head's weight `[vocabulary, d_model]`, if it is not that of `shared`.
    pub head: Option<Embedding>,
    /// What hidden states are multiplied by before the head.
    scale: f64,
    pub(super) start_token: usize,
    pub(super) pad_token: usize,
}

/// Every token of the input sees every other.
#[derive(Module, Debug)]
pub struct T5Encoder {
    /// What distances add to scores, in all blocks.
    pub positions: T5Positions,
    /// The layers.
    pub blocks: Vec<T5EncoderBlock>,
    /// After the last block.
    pub norm: RmsNorm,
    /// Of embeddings, and after the norm.
    pub dropout: Dropout,
}

/// A layer of the encoder, with norms before its parts.
#[derive(Module, Debug)]
pub struct T5EncoderBlock {
    /// Before attention.
    pub attention_norm: RmsNorm,
    /// To all tokens.
    pub attention: T5Attention,
    /// Before the feed-forward network.
    pub feed_forward_norm: RmsNorm,
    /// Of each token.
    pub feed_forward: T5FeedForward,
    /// Of what is added.
    pub dropout: Dropout,
}

/// A token of the output sees those before it, and the encoder's.
#[derive(Module, Debug)]
pub struct T5Decoder {
    /// What distances add to scores of self-attention, in all blocks.
    pub positions: T5Positions,
    /// The layers.
    pub blocks: Vec<T5DecoderBlock>,
    /// After the last block.
    pub norm: RmsNorm,
    /// Of embeddings, and after the norm.
    pub dropout: Dropout,
}

/// A layer of the decoder, with norms before its parts.
#[derive(Module, Debug)]
pub struct T5DecoderBlock {
    /// Before attention.
    pub attention_norm: RmsNorm,
    /// To the tokens before.
    pub attention: T5Attention,
    /// Before cross-attention.
    pub cross_attention_norm: RmsNorm,
    /// To the encoder's tokens.
    pub cross_attention: T5Attention,
    /// Before the feed-forward network.
    pub feed_forward_norm: RmsNorm,
    /// Of each token.
    pub feed_forward: T5FeedForward,
    /// Of what is added.
    pub dropout: Dropout,
}

/// What a decoder keeps of the tokens that it has read, and of the encoder's.
#[derive(Clone, Debug)]
pub struct T5Cache {
    length: usize,
    /// Of each block: its own keys and values, and those of the encoder's tokens.
    blocks: Vec<(Option<KeysValues>, KeysValues)>,
    /// Which of the encoder's tokens are padding, `[batch, 1, 1, sequence]`.
    padding: Option<Tensor<4, Bool>>,
}

impl T5 {
    /// A model with random weights.
    pub fn new(config: &T5Config, device: &Device) -> Self {
        let normal = |std: f64| Initializer::Normal { mean: 0.0, std: config.initializer_factor * std };
        let table = || {
            let embedding = EmbeddingConfig::new(config.vocab_size, config.d_model);
            embedding.with_initializer(normal(1.0)).init(device)
        };
        let norm = || RmsNorm::new(config.d_model, config.layer_norm_epsilon, device);
        let dropout = || DropoutConfig::new(config.dropout_rate).init();
        let positions = |bidirectional: bool| {
            let sizes = [config.relative_attention_num_buckets, config.num_heads];
            let normal = normal(1.0 / (config.d_model as f64).sqrt());
            T5Positions::new(sizes, config.relative_attention_max_distance, bidirectional, &normal, device)
        };
        let encoder_block = |_| T5EncoderBlock {
            attention_norm: norm(),
            attention: T5Attention::new(config, device),
            feed_forward_norm: norm(),
            feed_forward: T5FeedForward::new(config, device),
            dropout: dropout(),
        };
        let decoder_block = |_| T5DecoderBlock {
            attention_norm: norm(),
            attention: T5Attention::new(config, device),
            cross_attention_norm: norm(),
            cross_attention: T5Attention::new(config, device),
            feed_forward_norm: norm(),
            feed_forward: T5FeedForward::new(config, device),
            dropout: dropout(),
        };
        Self {
            shared: table(),
            encoder: T5Encoder {
                positions: positions(true),
                blocks: (0..config.num_layers).map(encoder_block).collect(),
                norm: norm(),
                dropout: dropout(),
            },
            decoder: T5Decoder {
                positions: positions(false),
                blocks: (0..config.num_decoder_layers).map(decoder_block).collect(),
                norm: norm(),
                dropout: dropout(),
            },
            head: (!config.tie_word_embeddings).then(table),
            scale: if config.scale_decoder_outputs { 1.0 / (config.d_model as f64).sqrt() } else { 1.0 },
            start_token: config.decoder_start_token_id,
            pad_token: config.pad_token_id,
        }
    }

    /// What tensor parallelism shards: heads, with their numbers for distances, feed-forward networks, and the embedding
    /// and the head along the vocabulary.
    pub fn plan() -> Plan {
        Plan::auto()
            .columns("attention.query|attention.key|attention.value|feed_forward.inner|positions.bias")
            .rows("attention.output|feed_forward.outer")
    }

    /// Hidden states `[batch, sequence, d_model]` of the input's tokens `[batch, sequence]`; `padding` says which are none.
    pub fn encode(&self, tokens: Tensor<2, Int>, padding: Padding) -> Tensor<3> {
        let ([_, length], encoder) = (tokens.dims(), &self.encoder);
        let bias = encoder.positions.forward(0, length, length);
        let x = encoder.dropout.forward(self.shared.forward(tokens));
        encoder.finish(encoder.blocks.iter().fold(x, |x, block| block.forward(x, bias.clone(), padding.clone())))
    }

    /// What the decoder needs of the encoder's hidden states, and of their padding.
    pub fn cache(&self, memory: Tensor<3>, padding: Padding) -> T5Cache {
        let of_block = |block: &T5DecoderBlock| (None, block.cross_attention.keys_values(memory.clone()));
        let blocks = self.decoder.blocks.iter().map(of_block).collect();
        T5Cache { length: 0, blocks, padding: padding.map(of_keys) }
    }

    /// Logits `[batch, sequence, vocabulary]` of what follows each of the output's tokens `[batch, sequence]`, which follow
    /// those that the cache has.
    pub fn decode(&self, tokens: Tensor<2, Int>, cache: &mut T5Cache) -> Tensor<3> {
        let ([_, length], decoder) = (tokens.dims(), &self.decoder);
        let (past, keys) = (cache.length, cache.length + length);
        let bias = decoder.positions.forward(past, length, keys);
        let mask = (length > 1).then(|| after(past, length, &tokens.device()));
        let mut x = decoder.dropout.forward(self.shared.forward(tokens));
        for (block, (own, encoder)) in decoder.blocks.iter().zip(&mut cache.blocks) {
            let to_own = (bias.clone(), mask.clone());
            x = block.after_cache(x, own, to_own, (encoder.clone(), cache.padding.clone()));
        }
        cache.length = keys;
        self.logits(x)
    }

    /// Logits `[batch, sequence, vocabulary]` of what comes out of the decoder's last block.
    pub fn logits(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.decoder.dropout.forward(self.decoder.norm.forward(x)) * self.scale;
        let head = self.head.as_ref().unwrap_or(&self.shared).weight.val();
        x.matmul(head.transpose().unsqueeze_dim::<3>(0))
    }

    /// Logits `[batch, output, vocabulary]` of what follows each token of `output [batch, output]`, given
    /// `input [batch, input]`.
    pub fn forward(&self, input: Tensor<2, Int>, padding: Padding, output: Tensor<2, Int>) -> Tensor<3> {
        let memory = self.encode(input, padding.clone());
        self.decode(output, &mut self.cache(memory, padding))
    }

    /// What the decoder reads to predict `labels [batch, sequence]`: the start token, then the labels but the last, with
    /// padding instead of -100.
    pub fn shifted(&self, labels: Tensor<2, Int>) -> Tensor<2, Int> {
        let [batch, length] = labels.dims();
        let start = Tensor::full([batch, 1], self.start_token as i64, &labels.device());
        let ignored = labels.clone().equal_elem(IGNORED);
        let labels = labels.mask_fill(ignored, self.pad_token as i64);
        Tensor::cat(vec![start, labels], 1).narrow(1, 0, length)
    }
}

impl T5Encoder {
    /// The encoder's hidden states of what comes out of its last block.
    pub fn finish(&self, x: Tensor<3>) -> Tensor<3> {
        self.dropout.forward(self.norm.forward(x))
    }
}

impl T5EncoderBlock {
    /// From and to `[batch, sequence, d_model]`. `bias` is what [`T5Positions`] adds to scores; `padding [batch, sequence]`.
    pub fn forward(&self, x: Tensor<3>, bias: Tensor<4>, padding: Padding) -> Tensor<3> {
        let normed = self.attention_norm.forward(x.clone());
        let own = self.attention.keys_values(normed.clone());
        let attended = self.attention.forward(normed, own, Some(bias), padding.map(of_keys));
        let x = x + self.dropout.forward(attended);
        let normed = self.feed_forward_norm.forward(x.clone());
        x + self.dropout.forward(self.feed_forward.forward(normed))
    }
}

impl T5DecoderBlock {
    /// From and to `[batch, output, d_model]`, of whole outputs. `bias` is what [`T5Positions`] adds to scores of
    /// self-attention; `memory [batch, input, d_model]` are the encoder's hidden states, with their `padding [batch, input]`.
    pub fn forward(&self, x: Tensor<3>, bias: Tensor<4>, memory: Tensor<3>, padding: Padding) -> Tensor<3> {
        let mask = after(0, x.dims()[1], &x.device());
        let encoder = self.cross_attention.keys_values(memory);
        self.after_cache(x, &mut None, (bias, Some(mask)), (encoder, padding.map(of_keys)))
    }

    /// The same of tokens that follow those whose keys and values are in `own`, which gets theirs.
    fn after_cache(
        &self,
        x: Tensor<3>,
        own: &mut Option<KeysValues>,
        (bias, mask): (Tensor<4>, Option<Tensor<4, Bool>>),
        (encoder, padding): (KeysValues, Option<Tensor<4, Bool>>),
    ) -> Tensor<3> {
        let normed = self.attention_norm.forward(x.clone());
        let new = self.attention.keys_values(normed.clone());
        let all = match own.take() {
            Some([keys, values]) => {
                let [new_keys, new_values] = new;
                [Tensor::cat(vec![keys, new_keys], 2), Tensor::cat(vec![values, new_values], 2)]
            }
            None => new,
        };
        *own = Some(all.clone());
        let attended = self.attention.forward(normed, all, Some(bias), mask);
        let x = x + self.dropout.forward(attended);
        let normed = self.cross_attention_norm.forward(x.clone());
        let attended = self.cross_attention.forward(normed, encoder, None, padding);
        let x = x + self.dropout.forward(attended);
        let normed = self.feed_forward_norm.forward(x.clone());
        x + self.dropout.forward(self.feed_forward.forward(normed))
    }
}

/// Padding `[batch, keys]` for scores.
fn of_keys(padding: Tensor<2, Bool>) -> Tensor<4, Bool> {
    let [batch, keys] = padding.dims();
    padding.reshape([batch, 1, 1, keys])
}

/// Which keys are after each of `length` queries, of which the first is at `past`: `[1, 1, length, past + length]`.
fn after(past: usize, length: usize, device: &Device) -> Tensor<4, Bool> {
    let position = |from: usize, to: usize| Tensor::<1, Int>::arange(from as i64..to as i64, device);
    let queries = position(past, past + length).reshape([1, 1, length, 1]);
    position(0, past + length).reshape([1, 1, 1, past + length]).greater(queries)
}
