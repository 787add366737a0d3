//! Modules around modules: generic ones, without names of fields, with sizes in their types; a copy for validation within the
//! pass; threads within the pass.

use std::ops::Range;
use std::thread;

use burn::module::{Initializer, ModuleDisplay, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use burn_megatron::prelude::*;

use crate::{PLAIN, numbers, plan, proven};

/// What a layer computes.
trait Layer: Module + ModuleDisplay {
    fn apply(&self, x: Tensor<2>) -> Tensor<2>;
}

impl Layer for Linear {
    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        self.forward(x)
    }
}

#[derive(Module, Debug)]
struct Residual<L: Module> {
    norm: LayerNorm,
    inner: L,
    scale: Param<Tensor<1>>,
}

impl<L: Layer> Layer for Residual<L> {
    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.inner.apply(self.norm.forward(x)) * self.scale.val().unsqueeze()
    }
}

#[derive(Module, Debug)]
struct Chain<A: Module, B: Module> {
    first: A,
    second: B,
}

impl<A: Layer, B: Layer> Layer for Chain<A, B> {
    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.apply(gelu(self.first.apply(x)))
    }
}

/// Heads that run one after the other, as many as the type says.
#[derive(Module, Debug)]
struct Heads<L: Module, const N: usize> {
    heads: [L; N],
    weights: Param<Tensor<1>>,
}

impl<L: Layer + Sync, const N: usize> Layer for Heads<L, N> {
    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        let weights = self.weights.val();
        let parts = self
            .heads
            .iter()
            .enumerate()
            .map(|(at, head)| head.apply(x.clone()) * weights.clone().slice(s![at..at + 1]).unsqueeze::<2>());
        parts.reduce(|sum, part| sum + part).unwrap()
    }
}

type Feed = Residual<Chain<Linear, Linear>>;
type Net = Heads<Chain<Feed, Residual<Linear>>, 3>;

fn net(device: &Device) -> Net {
    let linear = |from, to| LinearConfig::new(from, to).init(device);
    let norm = || LayerNormConfig::new(4).init(device);
    let scale = || Initializer::Constant { value: 0.5 }.init([4], device);
    let head = || Chain {
        first: Residual { norm: norm(), inner: Chain { first: linear(4, 8), second: linear(8, 4) }, scale: scale() },
        second: Residual { norm: norm(), inner: linear(4, 4), scale: scale() },
    };
    Heads { heads: [(); 3].map(|()| head()), weights: Initializer::Constant { value: 0.3 }.init([3], device) }
}

fn split() -> Proof {
    plan(Plan::default().columns("first.inner.first").rows("first.inner.second.weight"))
}

#[test]
fn generic_wrappers() {
    let loss = |model: &Net, items: Range<usize>, device: &Device| {
        let y = model.apply(numbers(&items, [items.len(), 4], 0, device));
        (y - numbers(&items, [items.len(), 4], 1, device)).powi_scalar(2).mean()
    };
    proven(net, loss, PLAIN, split());
    proven(net, loss, "DP2, DP2 ZeRO1, TP2 DP2", split().overlap_grad_reduce());
}

/// Targets are what the model says itself, without gradients.
#[test]
fn a_copy_for_validation_within_the_pass() {
    let loss = |model: &Net, items: Range<usize>, device: &Device| {
        let x = numbers(&items, [items.len(), 4], 0, device);
        let target = model.valid().apply(x.clone().inner() * 0.5);
        (model.apply(x) - Tensor::from_inner(target.tanh())).powi_scalar(2).mean()
    };
    proven(net, loss, "DP2, DP2 ZeRO1, DP2 ZeRO2, TP2, TP4, TP2 DP2", split());
    proven(net, loss, "DP2, DP2 ZeRO1, TP2 DP2", split().overlap_grad_reduce());
    let detached = |model: &Net, items: Range<usize>, device: &Device| {
        let x = numbers(&items, [items.len(), 4], 0, device);
        let target = model.clone().no_grad().apply(x.clone() * 0.5).detach();
        (model.apply(x) - target.tanh()).powi_scalar(2).mean()
    };
    proven(net, detached, PLAIN, split());
}

/// Each head on a thread of its own, one at a time.
#[test]
fn threads_within_the_pass() {
    let loss = |model: &Net, items: Range<usize>, device: &Device| {
        let x = numbers(&items, [items.len(), 4], 0, device);
        let weights = model.weights.val();
        let part = |at: usize, head: &Chain<Feed, Residual<Linear>>| {
            let y = thread::scope(|scope| scope.spawn(|| head.apply(x.clone())).join().unwrap());
            y * weights.clone().slice(s![at..at + 1]).unsqueeze::<2>()
        };
        let y = model.heads.iter().enumerate().map(|(at, head)| part(at, head)).reduce(|sum, part| sum + part).unwrap();
        (y - numbers(&items, [items.len(), 4], 1, device)).powi_scalar(2).mean()
    };
    proven(net, loss, PLAIN, split());
    proven(net, loss, "DP2, DP2 ZeRO1, TP2 DP2", split().overlap_grad_reduce());
}
