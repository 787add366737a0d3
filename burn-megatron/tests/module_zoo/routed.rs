//! MoE as one writes it by hand: a list of experts or stacked weights, chosen by the best scores.

use std::ops::Range;

use burn::module::{Initializer, Param};
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::prelude::*;
use burn::tensor::activation::{silu, softmax};
use burn_megatron::prelude::*;

use crate::{ALL, numbers, plan, proven};

const WIDTH: usize = 8;
const HIDDEN: usize = 12;
const EXPERTS: usize = 4;
const TOP: usize = 2;
const LENGTH: usize = 4;

#[derive(Module, Debug)]
struct Expert {
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Each token through all experts, weighed by the normalized scores of its best.
#[derive(Module, Debug)]
struct Listed {
    norm: RmsNorm,
    router: Linear,
    experts: Vec<Expert>,
    shared: Expert,
}

impl Expert {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        Self { gate: linear(WIDTH, HIDDEN), up: linear(WIDTH, HIDDEN), down: linear(HIDDEN, WIDTH) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(silu(self.gate.forward(x.clone())) * self.up.forward(x))
    }
}

/// Weights of the best experts of each token, 0 of the others, and the mean square of the scores' logarithmic sum.
fn routes(logits: Tensor<2>) -> (Tensor<2>, Tensor<1>) {
    let [tokens, experts] = logits.dims();
    let z = logits.clone().exp().sum_dim(1).log().powi_scalar(2).mean();
    let (best, chosen) = softmax(logits, 1).topk_with_indices(TOP, 1);
    let best = best.clone() / best.sum_dim(1);
    let zeros = Tensor::zeros([tokens, experts], (&best.device(), best.dtype()));
    (zeros.scatter(1, chosen, best, burn::tensor::IndexingUpdateOp::Add), z)
}

impl Listed {
    fn new(device: &Device) -> Self {
        Self {
            norm: RmsNormConfig::new(WIDTH).init(device),
            router: LinearConfig::new(WIDTH, EXPERTS).with_bias(false).init(device),
            experts: (0..EXPERTS).map(|_| Expert::new(device)).collect(),
            shared: Expert::new(device),
        }
    }

    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        let [n, length, width] = x.dims();
        let normed = self.norm.forward(x.clone()).reshape([n * length, width]);
        let (weights, z) = routes(self.router.forward(normed.clone()));
        let start = self.shared.forward(normed.clone());
        let y =
            self.experts.iter().enumerate().fold(start, |sum, (at, expert)| {
                sum + expert.forward(normed.clone()) * weights.clone().narrow(1, at, 1)
            });
        let y = x + y.reshape([n, length, width]);
        y.powi_scalar(2).mean() + z * 0.1
    }
}

#[test]
fn a_list_of_experts() {
    let loss = |model: &Listed, items: Range<usize>, device: &Device| {
        model.loss(numbers(&items, [items.len(), LENGTH, WIDTH], 0, device))
    };
    proven(Listed::new, loss, ALL, plan(Plan::auto().columns("gate|up").rows("down")));
    proven(
        Listed::new,
        loss,
        "TP2, TP2 DP2 ZeRO3",
        plan(Plan::default().columns("router|shared.up").rows("shared.gate")),
    );
}

/// Weights of all experts in one tensor; each has room for some tokens, and those that come too late are dropped.
#[derive(Module, Debug)]
struct Stacked {
    router: Linear,
    up: Param<Tensor<3>>,
    down: Param<Tensor<3>>,
    bias: Param<Tensor<1>>,
    room: usize,
}

impl Stacked {
    fn new(device: &Device) -> Self {
        let normal = Initializer::Normal { mean: 0.0, std: 0.4 };
        Self {
            router: LinearConfig::new(WIDTH, EXPERTS).init(device),
            up: normal.init([EXPERTS, WIDTH, HIDDEN], device),
            down: normal.init([EXPERTS, HIDDEN, WIDTH], device),
            bias: Initializer::Zeros.init([EXPERTS], device),
            room: 5,
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let [tokens, width] = x.dims();
        let (weights, z) = routes(self.router.forward(x.clone()) + self.bias.val().unsqueeze());
        let is_chosen = weights.clone().greater_scalar(0.0);
        // The place of each token at its expert, from 1 on.
        let place = is_chosen.clone().int().cumsum(0) * is_chosen.clone().int();
        let fits = place.clone().lower_equal_scalar(self.room as i64).bool_and(is_chosen);
        let weights = weights * fits.clone().float();
        let slots = place.clamp_max(self.room as i64).one_hot::<3>(self.room + 1).narrow(2, 1, self.room).float();
        // `[tokens, experts, room]`.
        let dispatch = slots * fits.float().unsqueeze_dim::<3>(2);
        let sent = dispatch.clone().reshape([tokens, EXPERTS * self.room]).transpose().matmul(x.clone());
        let h = silu(sent.reshape([EXPERTS, self.room, width]).matmul(self.up.val()));
        let y = h.matmul(self.down.val()).reshape([EXPERTS * self.room, width]);
        let combine = (dispatch * weights.clone().unsqueeze_dim::<3>(2)).reshape([tokens, EXPERTS * self.room]);
        let y = x + combine.matmul(y);
        // Balance: the share of each expert's tokens times its mean score.
        let share = weights.clone().greater_scalar(0.0).float().mean_dim(0);
        y.powi_scalar(2).mean() + z * 0.1 + (share.detach() * weights.mean_dim(0)).sum() * 0.5
    }
}

#[test]
fn stacked_experts_with_room_for_some_tokens() {
    let loss = |model: &Stacked, items: Range<usize>, device: &Device| {
        let n = items.len();
        model.loss(numbers(&items, [n, LENGTH, WIDTH], 3, device).reshape([n * LENGTH, WIDTH]))
    };
    // Dimension 2 and dimension 1 of the stacks.
    proven(Stacked::new, loss, "TP1, TP2, TP4", plan(Plan::default().columns("up").rows("down")));
    proven(Stacked::new, loss, "TP2, TP4", plan(Plan::auto().columns("router|bias|up").rows("down")));
}
