//! Parameters that are held twice, of which one may be frozen, and those that some ranks use.

use std::ops::Range;

use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn_megatron::prelude::*;

use crate::{PLAIN, layouts, numbers, pair, plan, proven, through};

/// A network and a copy of it that learns slowly or never, as of DQN or BYOL: both have the same parameter ids.
#[derive(Module, Debug)]
struct Online {
    online: (Linear, Linear),
    target: (Linear, Linear),
}

#[derive(Module, Debug)]
struct Target {
    target: (Linear, Linear),
    online: (Linear, Linear),
}

fn byol(online: &(Linear, Linear), target: &(Linear, Linear), items: Range<usize>, device: &Device) -> Tensor<1> {
    let n = items.len();
    let [x, y] = [0, 1].map(|seed| numbers(&items, [n, 4], seed, device));
    let wanted = through(target, y.clone()).detach();
    (through(online, x) - wanted * 0.5).powi_scalar(2).mean() + through(target, y).powi_scalar(2).mean()
}

#[test]
fn a_copy_that_does_not_learn() {
    let make = |device: &Device| {
        let online = pair(device);
        Online { target: online.clone().no_grad(), online }
    };
    let loss = |model: &Online, items: Range<usize>, device: &Device| byol(&model.online, &model.target, items, device);
    proven(make, loss, PLAIN, plan(Plan::default().columns("0").rows("1.weight")));
}

#[test]
fn a_copy_that_does_not_learn_and_comes_first() {
    let make = |device: &Device| {
        let online = pair(device);
        Target { target: online.clone().no_grad(), online }
    };
    let loss = |model: &Target, items: Range<usize>, device: &Device| byol(&model.online, &model.target, items, device);
    proven(make, loss, PLAIN, plan(Plan::default().columns("0").rows("1.weight")));
}

/// Two fields of one parameter, both trained.
#[test]
fn a_parameter_in_two_fields() {
    let make = |device: &Device| {
        let first = pair(device);
        Online { target: first.clone(), online: first }
    };
    let loss = |model: &Online, items: Range<usize>, device: &Device| {
        let x = numbers(&items, [items.len(), 4], 0, device);
        let y = through(&model.target, through(&model.online, x.clone()));
        (y - through(&model.target, x)).powi_scalar(2).mean()
    };
    let proof = || plan(Plan::default().columns("0").rows("1.weight"));
    proven(make, loss, PLAIN, proof());
    proven(make, loss, "DP2, DP2 ZeRO1, TP2 DP2 ZeRO2", proof().overlap_grad_reduce());
}

/// Experts by the item's number: a rank's items may use only one of them.
#[derive(Module, Debug)]
struct Experts {
    router: Linear,
    experts: Vec<Linear>,
}

fn expert_loss(model: &Experts, items: Range<usize>, device: &Device) -> Tensor<1> {
    let n = items.len();
    let x = numbers(&items, [n, 4], 0, device);
    // The first half of the eight items of a step are one expert's.
    let of: Vec<i64> = items.map(|item| (item % 8 / 4) as i64).collect();
    let mut y = model.router.forward(x.clone()).tanh();
    for (at, expert) in model.experts.iter().enumerate() {
        let rows: Vec<i64> = (0..n).filter(|row| of[*row] == at as i64).map(|row| row as i64).collect();
        if rows.is_empty() {
            continue;
        }
        let rows = Tensor::<1, Int>::from_data(rows.as_slice(), device);
        let part = expert.forward(x.clone().select(0, rows.clone()));
        y = y.select_assign(0, rows, part, burn::tensor::IndexingUpdateOp::Add);
    }
    y.powi_scalar(2).mean()
}

fn experts(device: &Device) -> Experts {
    let linear = || LinearConfig::new(4, 4).init(device);
    Experts { router: linear(), experts: vec![linear(), linear()] }
}

#[test]
fn experts_that_some_ranks_use() {
    let list = "DP2, DP2 ZeRO1, DP2 ZeRO2, DP4 ZeRO1, TP2, TP4, TP2 DP2, TP2 DP2 ZeRO1, TP2 DP2 ZeRO2";
    proven(experts, expert_loss, list, plan(Plan::default().columns("experts")));
    proven(
        experts,
        expert_loss,
        "DP2, DP2 ZeRO1, DP2 ZeRO2, TP2 DP2 ZeRO2",
        plan(Plan::default().columns("experts")).overlap_grad_reduce(),
    );
}

#[test]
fn zero_3_refuses_experts_that_some_ranks_use() {
    for layout in ["DP2 ZeRO3", "TP2 DP2 ZeRO3"] {
        let proof = plan(Plan::default().columns("experts"));
        let error = verify_module_as(experts, expert_loss, &layouts(layout), &proof).unwrap_err().to_string();
        println!("{error}");
        assert!(error.contains("experts") || error.contains("parameters"), "{error}");
    }
}
