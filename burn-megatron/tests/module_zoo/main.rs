//! `verify_module` of models as Burn's own repository and model zoo build them, in double precision.

mod annealed;
mod by_hand;
mod copies;
mod custom;
mod detector;
mod diffusion;
mod fields;
mod formulas;
mod metrics;
mod optimizers;
mod passes;
mod routed;
mod sentences;
mod sequences;
mod state_space;
mod taken_apart;
mod thawing;
mod training;
mod translation;
#[path = "../support/values.rs"]
mod values;
mod vision;
mod wrappers;

use std::ops::Range;

use burn::module::{Module, ModuleDisplay};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron::prelude::*;

/// Data-parallel ranks with every ZeRO stage, tensor and sequence parallelism, and both.
const ALL: &str = "DP2, DP2 ZeRO1, DP2 ZeRO2, DP2 ZeRO3, TP2, TP2 SP, TP2 DP2, TP2 DP2 ZeRO3, TP2 SP DP2 ZeRO1";

/// The same without sequences.
const PLAIN: &str = "DP2, DP2 ZeRO1, DP2 ZeRO2, DP2 ZeRO3, TP2, TP4, TP2 DP2, TP2 DP2 ZeRO3, TP2 DP2 ZeRO1";

/// For models that mix the items of a batch.
const TENSOR: &str = "TP1, TP2, TP4, TP2 SP";

fn layouts(list: &str) -> Vec<ParallelLayout> {
    list.split(", ").map(|layout| layout.parse().unwrap()).collect()
}

/// All layouts ran, and something was compared.
fn proven<M: Module + ModuleDisplay + 'static>(
    make_model: impl FnOnce(&Device) -> M,
    loss: impl Fn(&M, Range<usize>, &Device) -> Tensor<1> + Send + Sync + 'static,
    list: &str,
    proof: Proof,
) {
    let layouts = layouts(list);
    let report = verify_module_as(make_model, loss, &layouts, &proof).unwrap_or_else(|error| panic!("{error}"));
    println!("{report}");
    assert_eq!(report.worst().count(), layouts.len());
}

fn plan(plan: Plan) -> Proof {
    Proof::default().plan(plan)
}

/// Numbers that differ between items.
fn numbers<const D: usize>(items: &Range<usize>, shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let size = shape[1..].iter().product::<usize>();
    assert_eq!(shape[0], items.len());
    let value = |item: usize, at: usize| ((item * 31 + seed * 17 + at * (item % 5 + 2)) as f64 * 0.37).sin();
    let values: Vec<f64> = items.clone().flat_map(|item| (0..size).map(move |at| value(item, at))).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Classes below `below`.
fn classes<const D: usize>(items: &Range<usize>, shape: [usize; D], below: usize, device: &Device) -> Tensor<D, Int> {
    let size = shape[1..].iter().product::<usize>();
    let value = |item: usize, at: usize| ((item * 7 + at * (item % 3 + 2) + at * at) % below) as i64;
    let values: Vec<i64> = items.clone().flat_map(|item| (0..size).map(move |at| value(item, at))).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Two layers.
fn pair(device: &Device) -> (Linear, Linear) {
    (LinearConfig::new(4, 8).init(device), LinearConfig::new(8, 4).init(device))
}

fn through((first, second): &(Linear, Linear), x: Tensor<2>) -> Tensor<2> {
    second.forward(first.forward(x).tanh())
}
