//! What programs do in a forward pass: routes, a backward pass, reads, tensors on other devices.

use std::ops::Range;

use burn::module::{Initializer, Param, RunningState};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn_megatron::prelude::*;

use crate::{PLAIN, classes, layouts, numbers, pair, plan, proven, through};

/// A learned router: the best of four, by one-hot and by gather.
#[derive(Module, Debug)]
struct Routed {
    router: Linear,
    up: Param<Tensor<3>>,
    down: Param<Tensor<3>>,
    counts: RunningState<Tensor<1>>,
}

#[test]
fn routed_by_a_learned_gate() {
    let make = |device: &Device| Routed {
        router: LinearConfig::new(4, 4).with_bias(false).init(device),
        up: Initializer::Normal { mean: 0.0, std: 0.5 }.init([4, 4, 8], device),
        down: Initializer::Normal { mean: 0.0, std: 0.5 }.init([4, 8, 4], device),
        counts: RunningState::new(Tensor::zeros([4], device)),
    };
    let loss = |model: &Routed, items: Range<usize>, device: &Device| {
        let n = items.len();
        let x = numbers(&items, [n, 4], 0, device);
        let scores = burn::tensor::activation::softmax(model.router.forward(x.clone()), 1);
        let (weights, chosen) = scores.clone().topk_with_indices(2, 1);
        let weights = weights.clone() / weights.sum_dim(1);
        let hot: Tensor<3> = chosen.clone().float().one_hot(4);
        let gates = (hot.clone() * weights.clone().unsqueeze_dim::<3>(2)).sum_dim(1).reshape([n, 4]);
        // [4, n, 4] x [4, 4, 8] x [4, 8, 4]
        let each = x.unsqueeze_dim::<3>(0).repeat_dim(0, 4).matmul(model.up.val()).tanh().matmul(model.down.val());
        let y = (each * gates.swap_dims(0, 1).unsqueeze_dim::<3>(2)).sum_dim(0).reshape([n, 4]);
        let load = hot.sum_dim(1).reshape([n, 4]).mean_dim(0).detach();
        model.counts.update(model.counts.value_sync() + load.clone().reshape([4]));
        let balance = (load * scores.mean_dim(0)).sum();
        y.powi_scalar(2).mean() + balance * 0.0 + weights.powi_scalar(2).mean()
    };
    proven(make, loss, PLAIN, plan(Plan::default().columns("up|down")));
    proven(make, loss, PLAIN, plan(Plan::default().rows("up|down")));
}

/// Adversarial training: a backward pass for the input inside of the forward pass.
#[test]
fn a_backward_pass_within_the_forward_pass() {
    let loss = |(a, b): &(Linear, Linear), items: Range<usize>, device: &Device| {
        let n = items.len();
        let x: Tensor<2> = numbers(&items, [n, 4], 0, device);
        let model = (a.clone(), b.clone());
        let x = x.require_grad();
        let first = through(&model, x.clone()).powi_scalar(2).mean();
        let grads = first.backward();
        let direction = x.grad(&grads).unwrap().sign();
        let moved = Tensor::from_inner(x.inner() + direction * 0.1);
        through(&model, moved).powi_scalar(2).mean()
    };
    let proof = || plan(Plan::default().columns("0").rows("1.weight"));
    proven(pair, loss, "DP2, DP2 ZeRO1, DP2 ZeRO2, TP2, TP2 DP2", proof());
    for layout in ["DP2 ZeRO3", "TP2 DP2 ZeRO3"] {
        let error = verify_module_as(pair, loss, &layouts(layout), &proof()).unwrap_err().to_string();
        assert!(error.contains("ZeRO 3 needs steps with one backward pass; nearest legal: ZeRO 2"), "{error}");
    }
}

/// Parts without a graph, values read in between, and a loss that depends on them.
#[test]
fn values_that_are_read_in_between() {
    let loss = |model: &(Linear, Linear), items: Range<usize>, device: &Device| {
        let n = items.len();
        let x: Tensor<2> = numbers(&items, [n, 4], 0, device);
        let teacher = through(&model.valid(), x.clone().inner());
        let first: f64 = model.0.weight.val().slice(s![0..1, 0..1]).into_scalar();
        let data = model.1.weight.val().into_data();
        let back = Tensor::<2>::from_data(data, device);
        let y = through(model, x.clone() * if first > 0.0 { 1.5 } else { 0.5 });
        let host = back.clone().sum().to_device(&Device::flex()).into_scalar::<f64>();
        let labels = classes(&items, [n, 4], 3, device);
        let wanted = Tensor::from_inner(teacher) * 0.5 + labels.float() * 0.1;
        (y - wanted).powi_scalar(2).mean() + x.matmul(model.0.weight.val()).mean() * back.sum() * host * 0.01
    };
    proven(pair, loss, "DP2, DP2 ZeRO1, TP2, TP4, TP2 DP2", plan(Plan::default().columns("0").rows("1.weight")));
}

/// A constant that Burn does not move with the module, and tensors of the default device.
#[derive(Module, Debug)]
struct Left {
    linear: Linear,
    #[module(skip)]
    constant: Tensor<1>,
}

#[test]
fn a_tensor_on_another_device_is_named() {
    let make = |device: &Device| Left {
        linear: LinearConfig::new(4, 4).init(device),
        constant: Tensor::from_data([1.0, 2.0, 3.0, 4.0], device),
    };
    let loss = |model: &Left, items: Range<usize>, device: &Device| {
        let x: Tensor<2> = numbers(&items, [items.len(), 4], 0, device);
        (model.linear.forward(x) * model.constant.clone().unsqueeze()).powi_scalar(2).mean()
    };
    proven(make, loss, "DP2, DP2 ZeRO1", Proof::default());
    let proof = plan(Plan::default().columns("linear"));
    for (layout, advice) in [("TP2", "make tensors on `x.device()`"), ("DP2 ZeRO3", "nearest legal: `detach` instead")]
    {
        let error = verify_module_as(make, loss, &layouts(layout), &proof).unwrap_err().to_string();
        assert!(error.contains(advice), "{error}");
    }
    // An index, which Burn's message calls a tensor on the wrong backend.
    let picked = |model: &Left, items: Range<usize>, device: &Device| {
        let x: Tensor<2> = numbers(&items, [items.len(), 4], 0, device);
        let first = Tensor::<1, Int>::from_data([0, 1], &Device::default());
        model.linear.forward(x).select(1, first).powi_scalar(2).mean()
    };
    let error = verify_module_as(make, picked, &layouts("TP2"), &proof).unwrap_err().to_string();
    assert!(error.contains("make tensors on `x.device()`"), "{error}");
}
