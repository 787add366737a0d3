//! Networks of sequences: recurrent, a decoder with rotary positions or biases of distance, encoder and decoder.

use std::ops::Range;

use burn::nn::attention::{
    CrossAttention, CrossAttentionConfig, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig,
    generate_autoregressive_mask,
};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::loss::{CTCLossConfig, CrossEntropyLossConfig, Reduction};
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BiLstm, BiLstmConfig, BiRnn, BiRnnConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig1d,
    PositionalEncoding, PositionalEncodingConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, SwiGlu,
    SwiGluConfig,
};
use burn::prelude::*;
use burn::tensor::activation::{gelu, log_softmax, softmax};
use burn_megatron::prelude::*;

use crate::sentences::sentences;
use crate::{ALL, PLAIN, classes, numbers, plan, proven};

pub const WIDTH: usize = 8;
pub const LENGTH: usize = 6;
pub const WORDS: usize = 12;

#[derive(Module, Debug)]
struct Speech {
    conv: Conv1d,
    lstm: BiLstm,
    gru: Gru,
    rnn: BiRnn,
    head: Linear,
}

#[test]
fn recurrent_networks_with_ctc() {
    let make = |device: &Device| Speech {
        conv: Conv1dConfig::new(4, 8, 3).with_padding(PaddingConfig1d::Same).init(device),
        lstm: BiLstmConfig::new(8, 4, true).init(device),
        gru: GruConfig::new(8, 8, true).init(device),
        rnn: BiRnnConfig::new(8, 4, true).init(device),
        head: LinearConfig::new(8, 5).init(device),
    };
    let loss = |model: &Speech, items: Range<usize>, device: &Device| {
        let n = items.len();
        let x = model.conv.forward(numbers(&items, [n, 4, LENGTH], 0, device)).swap_dims(1, 2);
        let (x, _) = model.lstm.forward(x, None);
        let x = model.gru.forward(x, None);
        let (x, _) = model.rnn.forward(x, None);
        let x = log_softmax(model.head.forward(x), 2).swap_dims(0, 1);
        let lengths = |length: i64| Tensor::<1, Int>::full([n], length, device);
        let targets = classes(&items, [n, 2], 4, device) + 1;
        let ctc = CTCLossConfig::new().init();
        ctc.forward_with_reduction(x, targets, lengths(LENGTH as i64), lengths(2), Reduction::Mean)
    };
    proven(
        make,
        loss,
        PLAIN,
        plan(Plan::default().columns("conv|lstm.*.input_transform|gru.*.input_transform").rows("head.weight")),
    );
    proven(make, loss, "TP2, TP4, TP2 DP2", plan(Plan::default().columns("lstm|gru|rnn|conv").rows("head.weight")));
}

/// A decoder with its output tied to the embedding, rotary positions or ALiBi.
#[derive(Module, Debug)]
struct Decoder {
    words: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    rotary: Option<RotaryEncoding>,
}

#[derive(Module, Debug)]
struct Layer {
    norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    feed: SwiGlu,
    down: Linear,
    n_heads: usize,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let linear = |out| LinearConfig::new(WIDTH, out).with_bias(false).init(device);
        Self {
            norm: RmsNormConfig::new(WIDTH).init(device),
            query: linear(WIDTH),
            key: linear(WIDTH),
            value: linear(WIDTH),
            output: linear(WIDTH),
            feed: SwiGluConfig::new(WIDTH, 16).init(device),
            down: LinearConfig::new(16, WIDTH).with_bias(false).init(device),
            n_heads: 4,
        }
    }

    fn forward(&self, x: Tensor<3>, rotary: &Option<RotaryEncoding>) -> Tensor<3> {
        let [n, length, width] = x.dims();
        let y = self.norm.forward(x.clone());
        let heads = |x: Tensor<3>| x.reshape([n, length, self.n_heads, width / self.n_heads]).swap_dims(1, 2);
        let (q, k) = (heads(self.query.forward(y.clone())), heads(self.key.forward(y.clone())));
        let (q, k) = match rotary {
            Some(rotary) => (rotary.forward(q), rotary.forward(k)),
            None => (q, k),
        };
        let scores = q.matmul(k.swap_dims(2, 3)) / ((width / self.n_heads) as f64).sqrt();
        let scores = if rotary.is_none() { scores + alibi(self.n_heads, length, &x.device()) } else { scores };
        let mask = Tensor::<2, Bool>::tril_mask([length, length], 0, &x.device()).unsqueeze::<4>();
        let weights = softmax(scores.mask_fill(mask.expand([n, self.n_heads, length, length]), f64::NEG_INFINITY), 3);
        let y = weights.matmul(heads(self.value.forward(y))).swap_dims(1, 2).reshape([n, length, width]);
        let x = x + self.output.forward(y);
        x.clone() + self.down.forward(self.feed.forward(self.norm.forward(x)))
    }
}

/// `[1, heads, length, length]`, of distances.
fn alibi(heads: usize, length: usize, device: &Device) -> Tensor<4> {
    let at = Tensor::<1, Int>::arange(0..length as i64, device);
    let distance = at.clone().reshape([1, length]) - at.reshape([length, 1]);
    let slopes = (Tensor::<1, Int>::arange(1..heads as i64 + 1, device).float() * -2.0 * 2f64.ln()).exp();
    distance.float().unsqueeze::<4>() * slopes.reshape([1, heads, 1, 1])
}

#[test]
fn decoders_with_a_tied_output() {
    for rotary in [true, false] {
        let make = move |device: &Device| Decoder {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            layers: (0..2).map(|_| Layer::new(device)).collect(),
            norm: RmsNormConfig::new(WIDTH).init(device),
            rotary: rotary.then(|| RotaryEncodingConfig::new(LENGTH, 2).init(device)),
        };
        let loss = |model: &Decoder, items: Range<usize>, device: &Device| {
            let n = items.len();
            let tokens = classes(&items, [n, LENGTH + 1], WORDS, device);
            let inputs = tokens.clone().slice(s![.., 0..LENGTH as i32]);
            let targets = tokens.slice(s![.., 1..]).reshape([n * LENGTH]);
            let x = model.words.forward(inputs);
            let x = model.layers.iter().fold(x, |x, layer| layer.forward(x, &model.rotary));
            let logits = model.norm.forward(x).matmul(model.words.weight.val().transpose().unsqueeze());
            CrossEntropyLossConfig::new().init(device).forward(logits.reshape([n * LENGTH, WORDS]), targets)
        };
        proven(make, loss, ALL, plan(Plan::auto().columns("query|key|value").rows("output|down")));
        proven(make, loss, "TP4, TP2 SP DP2 ZeRO3", plan(Plan::auto().rows("down")));
    }
}

/// `nn::transformer` in both halves, cross attention with fewer heads for keys.
#[derive(Module, Debug)]
struct Translator {
    words: Embedding,
    positions: PositionalEncoding,
    encoder: TransformerEncoder,
    decoder: TransformerDecoder,
    again: CrossAttention,
    last: MultiHeadAttention,
    head: Linear,
}

#[test]
fn encoder_and_decoder() {
    let make = |device: &Device| Translator {
        words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
        positions: PositionalEncodingConfig::new(WIDTH).with_max_sequence_size(LENGTH).init(device),
        encoder: TransformerEncoderConfig::new(WIDTH, 16, 4, 1).with_dropout(0.0).init(device),
        decoder: TransformerDecoderConfig::new(WIDTH, 16, 4, 2).with_dropout(0.0).init(device),
        again: CrossAttentionConfig::new(WIDTH, WIDTH, 4, 2, 2).with_dropout(0.0).init(device),
        last: MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0).with_quiet_softmax(true).init(device),
        head: LinearConfig::new(WIDTH, WORDS).init(device),
    };
    let loss = |model: &Translator, items: Range<usize>, device: &Device| {
        let n = items.len();
        let source = sentences(&items, 2, device);
        let target = classes(&items, [n, LENGTH], WORDS, device);
        let padding = source.clone().equal_elem(0);
        let embed =
            |tokens: Tensor<2, Int>| model.positions.forward(model.words.forward(tokens) * (WIDTH as f64).sqrt());
        let memory = model.encoder.forward(TransformerEncoderInput::new(embed(source)).mask_pad(padding.clone()));
        let causal = generate_autoregressive_mask(n, LENGTH, device);
        let input = TransformerDecoderInput::new(embed(target.clone()), memory.clone())
            .memory_mask_pad(padding.clone())
            .target_mask_attn(causal.clone());
        let x = model.decoder.forward(input);
        let x = x.clone() + model.again.forward(x, memory, Some(padding));
        let x = x.clone() + model.last.forward(MhaInput::self_attn(x).mask_attn(causal)).context;
        let logits = model.head.forward(gelu(x)).reshape([n * LENGTH, WORDS]);
        CrossEntropyLossConfig::new().init(device).forward(logits, target.reshape([n * LENGTH]))
    };
    proven(make, loss, ALL, Proof::default());
}
