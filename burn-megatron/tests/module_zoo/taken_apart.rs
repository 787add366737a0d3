//! Models that take the output of one matrix apart: nanoGPT's attention, gated MLPs, Mamba 2.

use std::ops::Range;

use burn::module::Param;
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig1d};
use burn::optim::MuonConfig;
use burn::prelude::*;
use burn::tensor::activation::{silu, softmax, softplus};
use burn_megatron::prelude::*;

use crate::{classes, numbers, plan, proven};

const WIDTH: usize = 16;
const HEADS: usize = 4;
const HIDDEN: usize = 8;
const LENGTH: usize = 8;
const WORDS: usize = 12;

const LAYOUTS: &str =
    "TP2, TP4, TP2 SP, TP4 SP, TP2 DP2, TP2 DP2 ZeRO1, TP2 SP DP2 ZeRO2, TP2 DP2 ZeRO3, TP4 SP DP2 ZeRO3";

#[derive(Module, Debug)]
struct Block {
    norm_1: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    norm_2: LayerNorm,
    gate_up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            norm_1: LayerNormConfig::new(WIDTH).init(device),
            c_attn: linear(WIDTH, 3 * WIDTH),
            c_proj: linear(WIDTH, WIDTH),
            norm_2: LayerNormConfig::new(WIDTH).init(device),
            gate_up: linear(WIDTH, 2 * HIDDEN),
            down: linear(HIDDEN, WIDTH),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [n, length, _] = x.dims();
        let qkv = self.c_attn.forward(self.norm_1.forward(x.clone())).split(WIDTH, 2);
        let heads = |i: usize| qkv[i].clone().reshape([n, length, HEADS, WIDTH / HEADS]).swap_dims(1, 2);
        let scores = heads(0).matmul(heads(1).transpose()) / (WIDTH as f64 / HEADS as f64).sqrt();
        let later = Tensor::<2, Bool>::tril_mask([length, length], 0, &x.device()).unsqueeze::<4>();
        let context = softmax(scores.mask_fill(later, f32::NEG_INFINITY), 3).matmul(heads(2));
        let x = x + self.c_proj.forward(context.swap_dims(1, 2).reshape([n, length, WIDTH]));
        let parts = self.gate_up.forward(self.norm_2.forward(x.clone())).chunk(2, 2);
        x + self.down.forward(silu(parts[0].clone()) * parts[1].clone())
    }
}

#[derive(Module, Debug)]
struct NanoGpt {
    words: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

fn nano_gpt(device: &Device) -> NanoGpt {
    NanoGpt {
        words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
        positions: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
        blocks: (0..2).map(|_| Block::new(device)).collect(),
        norm: LayerNormConfig::new(WIDTH).init(device),
    }
}

fn loss_of_words(model: &NanoGpt, items: Range<usize>, device: &Device) -> Tensor<1> {
    let n = items.len();
    let tokens = classes(&items, [n, LENGTH], WORDS, device);
    let positions = Tensor::<1, Int>::arange(0..LENGTH as i64, device).unsqueeze::<2>();
    let x = model.words.forward(tokens.clone()) + model.positions.forward(positions);
    let x = model.norm.forward(model.blocks.iter().fold(x, |x, block| block.forward(x)));
    let logits = x.matmul(model.words.weight.val().transpose().unsqueeze()).reshape([n * LENGTH, WORDS]);
    let next = tokens.roll(&[-1], &[1]).reshape([n * LENGTH]);
    CrossEntropyLossConfig::new().init(device).forward(logits, next)
}

fn of_blocks() -> Plan {
    Plan::auto().columns_in_parts("c_attn", 3).columns_in_parts("gate_up", 2).rows("c_proj|down")
}

#[test]
fn nano_gpt_by_parts() {
    proven(nano_gpt, loss_of_words, LAYOUTS, plan(of_blocks()));
}

/// Its steps are of whole matrices, in the model's own order.
#[test]
fn matrices_in_parts_by_muon() {
    let loss = |blocks: &Vec<Block>, items: Range<usize>, device: &Device| {
        let shape = [items.len(), LENGTH, WIDTH];
        let x = blocks.iter().fold(numbers(&items, shape, 0, device), |x, block| block.forward(x));
        (x - numbers(&items, shape, 1, device)).powi_scalar(2).mean()
    };
    let make = |device: &Device| vec![without_vectors(Block::new(device))];
    let proof = plan(of_blocks()).optimizer(|| MuonConfig::new().init());
    proven(make, loss, "TP2, TP4, TP2 DP2 ZeRO1, TP2 DP2 ZeRO3", proof);
}

/// Burn's Muon updates matrices alone.
fn without_vectors(block: Block) -> Block {
    let linear = |linear: Linear| Linear { bias: None, ..linear };
    Block {
        norm_1: block.norm_1.no_grad(),
        norm_2: block.norm_2.no_grad(),
        c_attn: linear(block.c_attn),
        c_proj: linear(block.c_proj),
        gate_up: linear(block.gate_up),
        down: linear(block.down),
    }
}

const INNER: usize = 16;
const STATE: usize = 8;
const CHANNELS: usize = INNER + 2 * STATE;

/// Mamba 2 with states that all heads share, and a quadratic form in place of the scan.
#[derive(Module, Debug)]
struct Mamba {
    in_proj: Linear,
    conv1d: Conv1d,
    dt_bias: Param<Tensor<1>>,
    out_proj: Linear,
}

impl Mamba {
    fn new(device: &Device) -> Self {
        let padding = PaddingConfig1d::Explicit(3, 3);
        Self {
            in_proj: LinearConfig::new(WIDTH, INNER + CHANNELS + HEADS).with_bias(false).init(device),
            conv1d: Conv1dConfig::new(CHANNELS, CHANNELS, 4).with_padding(padding).with_groups(CHANNELS).init(device),
            dt_bias: Param::from_tensor(Tensor::ones([HEADS], device)),
            out_proj: LinearConfig::new(INNER, WIDTH).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [n, length, _] = x.dims();
        let parts = self.in_proj.forward(x).split_with_sizes(vec![INNER, CHANNELS, HEADS], 2);
        let xbc = self.conv1d.forward(parts[1].clone().swap_dims(1, 2)).narrow(2, 0, length).swap_dims(1, 2);
        let of_channels = silu(xbc).split_with_sizes(vec![INNER, STATE, STATE], 2);
        let x = of_channels[0].clone().reshape([n, length, HEADS, INNER / HEADS]).swap_dims(1, 2);
        let dt = softplus(parts[2].clone() + self.dt_bias.val().unsqueeze(), 1.0).swap_dims(1, 2);
        // How much of each position is left at each later one.
        let sums = dt.clone().cumsum(2);
        let left = sums.clone().unsqueeze_dim::<4>(3) - sums.unsqueeze_dim::<4>(2);
        let later = Tensor::<2, Bool>::tril_mask([length, length], 0, &x.device()).unsqueeze::<4>();
        let left = (-left).mask_fill(later, f32::NEG_INFINITY).exp();
        let scores = of_channels[2].clone().matmul(of_channels[1].clone().transpose()).unsqueeze_dim::<4>(1);
        let y = (scores * left).matmul(x * dt.unsqueeze_dim::<4>(3)).swap_dims(1, 2).reshape([n, length, INNER]);
        self.out_proj.forward(y * silu(parts[0].clone()))
    }
}

#[test]
fn mamba_2_by_parts_of_different_sizes() {
    let loss = |blocks: &Vec<Mamba>, items: Range<usize>, device: &Device| {
        let shape = [items.len(), LENGTH, WIDTH];
        let x = numbers(&items, shape, 0, device);
        let x = blocks.iter().fold(x, |x, block| x.clone() + block.forward(x));
        (x - numbers(&items, shape, 1, device)).abs().mean()
    };
    let make = |device: &Device| vec![Mamba::new(device), Mamba::new(device)];
    let in_parts = Plan::default()
        .columns_in("in_proj", &[INNER, INNER, STATE, STATE, HEADS])
        .columns_in("conv1d", &[INNER, STATE, STATE])
        .columns("dt_bias")
        .rows("out_proj");
    proven(make, loss, LAYOUTS, plan(in_parts));
}
