//! Sequences without attention: a selective state space as in Mamba, and the delta rule.

use std::ops::Range;

use burn::module::{Initializer, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig1d};
use burn::prelude::*;
use burn::tensor::activation::{sigmoid, silu, softplus};
use burn_megatron::prelude::*;

use crate::{ALL, classes, numbers, plan, proven};

const WIDTH: usize = 8;
const INNER: usize = 16;
const STATE: usize = 4;
const RANK: usize = 2;
const LENGTH: usize = 6;
const WORDS: usize = 10;

/// What goes in is split into a gate and a sequence, which a filter for each channel and a scan over time see.
#[derive(Module, Debug)]
struct Mamba {
    norm: LayerNorm,
    in_proj: Linear,
    conv: Conv1d,
    x_proj: Linear,
    dt_proj: Linear,
    a_log: Param<Tensor<2>>,
    d: Param<Tensor<1>>,
    out_proj: Linear,
}

impl Mamba {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let rates = Tensor::<1, Int>::arange(1..STATE as i64 + 1, device).float().unsqueeze::<2>().repeat_dim(0, INNER);
        let padding = PaddingConfig1d::Explicit(3, 3);
        Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            in_proj: linear(WIDTH, 2 * INNER),
            conv: Conv1dConfig::new(INNER, INNER, 4).with_padding(padding).with_groups(INNER).init(device),
            x_proj: linear(INNER, RANK + 2 * STATE),
            dt_proj: LinearConfig::new(RANK, INNER).init(device),
            a_log: Param::from_tensor(rates.log()),
            d: Initializer::Ones.init([INNER], device),
            out_proj: linear(INNER, WIDTH),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [n, length, _] = x.dims();
        let parts = self.in_proj.forward(self.norm.forward(x.clone())).split_with_sizes(vec![INNER, INNER], 2);
        let y = self.conv.forward(parts[0].clone().swap_dims(1, 2)).narrow(2, 0, length).swap_dims(1, 2);
        let y = silu(y);
        let of_input = self.x_proj.forward(y.clone()).split_with_sizes(vec![RANK, STATE, STATE], 2);
        let dt = softplus(self.dt_proj.forward(of_input[0].clone()), 1.0);
        let decay = (dt.clone().unsqueeze_dim::<4>(3) * -self.a_log.val().exp().unsqueeze::<4>()).exp();
        let input = (dt * y.clone()).unsqueeze_dim::<4>(3) * of_input[1].clone().unsqueeze_dim::<4>(2);
        let mut state = Tensor::<3>::zeros([n, INNER, STATE], (&y.device(), y.dtype()));
        let mut outputs = Vec::new();
        for at in 0..length {
            let now = |x: &Tensor<4>| x.clone().narrow(1, at, 1).squeeze_dim::<3>(1);
            state = now(&decay) * state + now(&input);
            let read = of_input[2].clone().narrow(1, at, 1).swap_dims(1, 2);
            outputs.push(state.clone().matmul(read).squeeze_dim::<2>(2));
        }
        let y = Tensor::stack::<3>(outputs, 1) + y * self.d.val().unsqueeze();
        x + self.out_proj.forward(y * silu(parts[1].clone()))
    }
}

type Model = (Embedding, Vec<Mamba>);

#[test]
fn a_selective_state_space() {
    let make = |device: &Device| {
        (EmbeddingConfig::new(WORDS, WIDTH).init(device), vec![Mamba::new(device), Mamba::new(device)])
    };
    let loss = |(words, blocks): &Model, items: Range<usize>, device: &Device| {
        let n = items.len();
        let tokens = classes(&items, [n, LENGTH], WORDS, device);
        let x = blocks.iter().fold(words.forward(tokens.clone()), |x, block| block.forward(x));
        let logits = x.matmul(words.weight.val().transpose().unsqueeze()).reshape([n * LENGTH, WORDS]);
        let next = tokens.roll(&[-1], &[1]).reshape([n * LENGTH]);
        CrossEntropyLossConfig::new().init(device).forward(logits, next)
    };
    proven(make, loss, ALL, plan(Plan::auto().columns("in_proj").rows("out_proj")));
    let channels = Plan::default().columns("conv|dt_proj").rows("a_log|x_proj|out_proj");
    proven(make, loss, "TP2, TP4, TP2 SP, TP2 DP2 ZeRO3", plan(channels));
}

/// A matrix for each head, which learns what it did not know.
#[derive(Module, Debug)]
struct Delta {
    query: Linear,
    key: Linear,
    value: Linear,
    beta: Linear,
    decay: Param<Tensor<2>>,
    output: Linear,
    n_heads: usize,
}

impl Delta {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let ([n, length, width], heads) = (x.dims(), self.n_heads);
        let size = width / heads;
        let split = |x: Tensor<3>| x.reshape([n, length, heads, size]);
        let (q, v) = (split(self.query.forward(x.clone())), split(self.value.forward(x.clone())));
        let k = split(self.key.forward(x.clone()));
        let k = k.clone() / (k.powi_scalar(2).sum_dim(3) + 1e-6).sqrt();
        let beta = sigmoid(self.beta.forward(x.clone()));
        let decay = (sigmoid(self.decay.val()) * 0.5 + 0.5).reshape([1, heads, size, 1]);
        let mut state = Tensor::<4>::zeros([n, heads, size, size], (&x.device(), x.dtype()));
        let mut outputs = Vec::new();
        for at in 0..length {
            let column = |x: &Tensor<4>| x.clone().slice(s![.., at..at + 1, .., ..]).reshape([n, heads, size, 1]);
            let strength = beta.clone().slice(s![.., at..at + 1, ..]).reshape([n, heads, 1, 1]);
            state = state * decay.clone();
            let known = state.clone().swap_dims(2, 3).matmul(column(&k));
            let new = (column(&v) - known) * strength;
            state = state + column(&k).matmul(new.swap_dims(2, 3));
            outputs.push(column(&q).swap_dims(2, 3).matmul(state.clone()).reshape([n, 1, width]));
        }
        x + self.output.forward(Tensor::cat(outputs, 1))
    }
}

#[test]
fn the_delta_rule() {
    let make = |device: &Device| {
        let linear = |to| LinearConfig::new(WIDTH, to).init(device);
        let one = || Delta {
            query: linear(WIDTH),
            key: linear(WIDTH),
            value: linear(WIDTH),
            beta: linear(2),
            decay: Initializer::Uniform { min: 0.0, max: 2.0 }.init([2, WIDTH / 2], device),
            output: linear(WIDTH),
            n_heads: 2,
        };
        vec![one(), one()]
    };
    let loss = |model: &Vec<Delta>, items: Range<usize>, device: &Device| {
        let n = items.len();
        let x = model.iter().fold(numbers(&items, [n, LENGTH, WIDTH], 0, device), |x, block| block.forward(x));
        (x - numbers(&items, [n, LENGTH, WIDTH], 1, device)).abs().mean()
    };
    proven(make, loss, ALL, plan(Plan::default().columns("query|key|value").rows("output")));
    proven(make, loss, "TP2, TP2 SP, TP2 DP2 ZeRO3", plan(Plan::default().columns("query|beta").rows("decay|output")));
}
