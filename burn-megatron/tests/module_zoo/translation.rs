//! A recurrent translator: a bidirectional encoder, a decoder with attention that runs word by word, an output that is tied.

use std::ops::Range;

use burn::nn::gru::{BiGru, BiGruConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::{log_softmax, sigmoid, softmax};
use burn_megatron::prelude::*;

use crate::{ALL, PLAIN, classes, plan, proven};

const WORDS: usize = 12;
const WIDTH: usize = 8;
const LENGTH: usize = 5;

/// A gated recurrent unit of one's own: the three gates by one matrix each of input and state.
#[derive(Module, Debug)]
struct Cell {
    input: Linear,
    state: Linear,
    norm: LayerNorm,
}

impl Cell {
    fn forward(&self, x: Tensor<2>, h: Tensor<2>) -> Tensor<2> {
        let (x, s) = (self.input.forward(x).chunk(3, 1), self.state.forward(h.clone()).split(WIDTH, 1));
        let reset = sigmoid(x[0].clone() + s[0].clone());
        let update = sigmoid(x[1].clone() + s[1].clone());
        let new = (x[2].clone() + reset * s[2].clone()).tanh();
        self.norm.forward(update.clone() * h + (-update + 1.0) * new)
    }
}

#[derive(Module, Debug)]
struct Translator {
    words: Embedding,
    encoder: BiGru,
    bridge: Linear,
    cell: Cell,
    /// Scores of Bahdanau's attention.
    query: Linear,
    memory: Linear,
    score: Linear,
    output: Linear,
}

impl Translator {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            encoder: BiGruConfig::new(WIDTH, WIDTH / 2, true).init(device),
            bridge: linear(WIDTH, WIDTH),
            cell: Cell {
                input: linear(2 * WIDTH, 3 * WIDTH),
                state: linear(WIDTH, 3 * WIDTH),
                norm: LayerNormConfig::new(WIDTH).init(device),
            },
            query: linear(WIDTH, WIDTH),
            memory: linear(WIDTH, WIDTH),
            score: LinearConfig::new(WIDTH, 1).with_bias(false).init(device),
            output: linear(2 * WIDTH, WIDTH),
        }
    }

    /// Log-probabilities `[batch, length, words]` of the target's words after each but the last.
    fn forward(&self, source: Tensor<2, Int>, target: Tensor<2, Int>) -> Tensor<3> {
        let [n, _] = source.dims();
        let is_padding = source.clone().equal_scalar(0);
        let (memory, _) = self.encoder.forward(self.words.forward(source), None);
        let keys = self.memory.forward(memory.clone());
        let weight = is_padding.clone().bool_not().float().unsqueeze_dim::<3>(2);
        let mean = (memory.clone() * weight.clone()).sum_dim(1) / weight.sum_dim(1).clamp_min(1.0);
        let mut h = self.bridge.forward(mean.squeeze_dim::<2>(1)).tanh();
        let mut context = h.zeros_like();
        let words = self.words.forward(target.narrow(1, 0, LENGTH - 1));
        let mut states = Vec::new();
        for x in words.iter_dim(1) {
            h = self.cell.forward(Tensor::cat(vec![x.squeeze_dim::<2>(1), context], 1), h);
            let scores = self.score.forward((keys.clone() + self.query.forward(h.clone()).unsqueeze_dim(1)).tanh());
            let scores = scores.squeeze_dim::<2>(2).mask_fill(is_padding.clone(), -1e9);
            let weights = softmax(scores, 1).unsqueeze_dim::<3>(1);
            context = weights.matmul(memory.clone()).squeeze_dim::<2>(1);
            states.push(self.output.forward(Tensor::cat(vec![h.clone(), context.clone()], 1)).tanh());
        }
        let states: Tensor<3> = Tensor::stack(states, 1);
        let logits = states.reshape([n * (LENGTH - 1), WIDTH]).matmul(self.words.weight.val().transpose());
        log_softmax(logits.reshape([n, LENGTH - 1, WORDS]), 2)
    }
}

#[test]
fn word_by_word() {
    let loss = |model: &Translator, items: Range<usize>, device: &Device| {
        let n = items.len();
        let words = classes(&items, [n, LENGTH], WORDS - 1, device) + 1;
        let ends = classes(&items, [n, 1], LENGTH - 2, device) + 2;
        let at = Tensor::<1, Int>::arange(0..LENGTH as i64, device).reshape([1, LENGTH]).repeat_dim(0, n);
        let source = words.clone().mask_fill(at.greater_equal(ends.repeat_dim(1, LENGTH)), 0);
        let target = words.flip([1]);
        let next = target.clone().narrow(1, 1, LENGTH - 1).unsqueeze_dim::<3>(2);
        -model.forward(source, target).gather(2, next).mean()
    };
    let plans = [
        (ALL, Plan::auto().columns("query|memory|bridge").rows("score|output.weight")),
        (PLAIN, Plan::auto().columns("input|state|encoder.*.input_transform").rows("output.weight")),
        ("TP2, TP2 DP2 ZeRO1", Plan::default().columns("encoder|cell.norm.gamma|cell.norm.beta").rows("words")),
        ("TP2, TP2 DP2 ZeRO3", Plan::default().columns("words.weight|output")),
    ];
    for (list, of) in plans {
        proven(Translator::new, loss, list, plan(of));
    }
}
