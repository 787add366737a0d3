//! The operations of MoE layers.

use std::sync::Arc;

use backend_dist::ops::moe::{
    ClampedSwiGlu, ExpertActivation, RowMap, gather_rows, grouped_activated_linear, grouped_clamped_linear,
    grouped_linear, inject, router_logits,
};
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{PassContext, linear, squared_relu, swiglu};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Device, Tensor};

use crate::compare::{leaf, numbers, same, values};

/// Row 1 is copied twice, row 3 never; one row has no source.
const SOURCES: [Option<usize>; 6] = [Some(1), Some(4), None, Some(0), Some(1), Some(2)];

#[test]
fn rows_are_copied_and_their_gradients_added() {
    let device = Device::flex().autodiff();
    let map = RowMap::picking(5, &SOURCES, &device);
    let pick = |x: Tensor<2>| {
        let zero = x.clone().slice([0..1, 0..3]) * 0.0;
        let row = |source: &Option<usize>| source.map_or(zero.clone(), |row| x.clone().slice([row..row + 1, 0..3]));
        Tensor::cat(SOURCES.iter().map(row).collect(), 0)
    };
    let fused = |x: Vec<Tensor<1>>| gather_rows(x[0].clone().reshape([5, 3]), &map).reshape([18]);
    same("gather_rows", &[15], fused, |x| pick(x[0].clone().reshape([5, 3])).reshape([18]));
    let back = |x: Vec<Tensor<1>>| gather_rows(x[0].clone().reshape([6, 3]), &map.reversed()).reshape([15]);
    same("gather_rows, reversed", &[18], back, |x| {
        let x = x[0].clone().reshape([6, 3]);
        let row = |input: usize| {
            let rows = SOURCES.iter().enumerate().filter(|(_, source)| **source == Some(input));
            let sum = rows.map(|(at, _)| x.clone().slice([at..at + 1, 0..3])).reduce(|a, b| a + b);
            sum.unwrap_or_else(|| x.clone().slice([0..1, 0..3]) * 0.0)
        };
        Tensor::cat((0..5).map(row).collect(), 0).reshape([15])
    });
}

/// A group in the middle and one at the end are empty.
const COUNTS: [usize; 4] = [2, 0, 3, 0];

fn by_group(x: Tensor<2>, w: Tensor<2>) -> Tensor<2> {
    let ([_, inner], out) = (x.dims(), w.dims()[0] / COUNTS.len());
    let (mut parts, mut start) = (vec![], 0);
    for (group, &count) in COUNTS.iter().enumerate().filter(|(_, count)| **count > 0) {
        let rows = x.clone().slice([start..start + count, 0..inner]);
        parts.push(rows.matmul(w.clone().slice([group * out..(group + 1) * out, 0..inner]).transpose()));
        start += count;
    }
    Tensor::cat(parts, 0)
}

#[test]
fn each_group_has_its_matrix() {
    let counts: Arc<[usize]> = COUNTS.into();
    let shaped = |x: &[Tensor<1>]| (x[0].clone().reshape([5, 3]), x[1].clone().reshape([16, 3]));
    let fused = |x: Vec<Tensor<1>>| {
        let (x, w) = shaped(&x);
        grouped_linear(x, w, &counts, &PassContext::default()).reshape([20])
    };
    same("grouped_linear", &[15, 48], fused, |x| {
        let (x, w) = shaped(&x);
        by_group(x, w).reshape([20])
    });
}

#[test]
fn factors_stand_in_front_of_the_second_matrix() {
    let counts: Arc<[usize]> = COUNTS.into();
    type Plain = fn(Tensor<2>) -> Tensor<2>;
    let acts = [(ExpertActivation::SwiGlu, swiglu as Plain), (ExpertActivation::SquaredRelu, squared_relu)];
    for ((act, plain), recompute) in acts.into_iter().flat_map(|act| [(act, false), (act, true)]) {
        let features = 3 * act.inputs();
        let fused = |x: Vec<Tensor<1>>| {
            let (w, p, pass) = (x[2].clone().reshape([16, 3]), x[1].clone(), PassContext::default());
            let x = x[0].clone().reshape([5, features]);
            grouped_activated_linear(x, p, w, act, &counts, recompute, &pass).reshape([20])
        };
        same(&format!("experts behind {act:?}"), &[5 * features, 5, 48], fused, |x| {
            let h = plain(x[0].clone().reshape([5, features])) * x[1].clone().reshape([5, 1]);
            by_group(h, x[2].clone().reshape([16, 3])).reshape([20])
        });
    }
}

#[test]
fn biases_stand_around_a_clamped_activation() {
    let counts: Arc<[usize]> = COUNTS.into();
    // Many of the compared numbers are beyond the limit.
    let act = ClampedSwiGlu { alpha: 1.7, limit: 0.6 };
    let of_rows = |bias: Tensor<1>, n: usize| {
        let bias = bias.reshape([COUNTS.len(), n]);
        let row = |group: usize| bias.clone().slice([group..group + 1, 0..n]);
        let rows = COUNTS.iter().enumerate().flat_map(|(group, count)| std::iter::repeat_n(group, *count));
        Tensor::cat(rows.map(row).collect(), 0)
    };
    for recompute in [false, true] {
        let fused = |x: Vec<Tensor<1>>| {
            let (w, p, biases) = (x[2].clone().reshape([16, 3]), x[1].clone(), [x[3].clone(), x[4].clone()]);
            let (x, pass) = (x[0].clone().reshape([5, 6]), PassContext::default());
            grouped_clamped_linear(x, p, w, biases, act, &counts, recompute, &pass).reshape([20])
        };
        same("grouped_clamped_linear", &[30, 5, 48, 24, 16], fused, |x| {
            let (p, h) = (x[1].clone().reshape([5, 1]), x[0].clone().reshape([5, 6]) + of_rows(x[3].clone(), 6));
            let (gate, up) = (h.clone().narrow(1, 0, 3).clamp_max(0.6), h.narrow(1, 3, 3).clamp(-0.6, 0.6));
            let h = (up + 1.0) * gate.clone() * sigmoid(gate * 1.7) * p.clone();
            (by_group(h, x[2].clone().reshape([16, 3])) + of_rows(x[4].clone(), 4) * p).reshape([20])
        });
    }
}

#[test]
fn router_logits_are_gemms() {
    let shaped = |x: &[Tensor<1>]| (x[0].clone().reshape([5, 3]), x[1].clone().reshape([4, 3]));
    let fused = |x: Vec<Tensor<1>>| {
        let (x, w) = shaped(&x);
        router_logits(x, w).reshape([20])
    };
    same("router_logits", &[15, 12], fused, |x| {
        let (x, w) = shaped(&x);
        linear(x, w).reshape([20])
    });
}

/// The product of two bf16 numbers is exact in f32: only the final gradients are rounded to bf16.
#[test]
fn router_logits_of_bf16_are_f32() {
    let narrow = |seed, n: usize| values(leaf(&numbers(n, seed), DType::BF16, false));
    let (x, w) = (narrow(1, 15), narrow(2, 12));
    let run = |dtype| {
        let (x, w) = (leaf(&x, dtype, true), leaf(&w, dtype, true));
        let y = router_logits(x.clone().reshape([5, 3]), w.clone().reshape([4, 3]));
        let grads = y.clone().powi_scalar(2).sum().backward();
        (y.dtype(), values(y), x.grad(&grads).unwrap(), w.grad(&grads).unwrap())
    };
    let (dtype, y, dx, dw) = run(DType::BF16);
    let (_, expected, _, _) = run(DType::F32);
    assert_eq!((dtype, dx.dtype(), dw.dtype()), (DType::F32, DType::BF16, DType::BF16));
    assert_eq!(y, expected);
}

#[test]
fn grouped_weight_gradients_can_wait() {
    let counts: Arc<[usize]> = COUNTS.into();
    let x = leaf(&numbers(15, 1), DType::F64, false).reshape([5, 3]);
    let w = leaf(&numbers(48, 2), DType::F64, false).reshape([16, 3]).inner();
    let w = Tensor::<2>::from_inner(w).require_grad();
    let pass = PassContext { weight_grads: Deferral::possible(), ..PassContext::default() };
    let loss = || grouped_linear(x.clone(), w.clone(), &counts, &pass).powi_scalar(2).sum();
    let at_once = w.grad(&loss().backward()).unwrap();
    let (grads, late) = pass.weight_grads.deferred(|| loss().backward());
    assert!(w.grad(&grads).is_none() && late.len() == 1);
    assert_eq!(values(w.grad(&late.run()).unwrap()), values(at_once));
}

#[test]
fn an_injected_loss_is_only_a_gradient() {
    let (x, a) = (leaf(&numbers(4, 1), DType::F64, true), leaf(&[3.0], DType::F64, true));
    let y = inject(x.clone(), a.clone() * a.clone(), 0.25);
    assert_eq!(values(y.clone()), values(x.clone()));
    let grads = (y * 2.0).sum().backward();
    assert_eq!(values(x.grad(&grads).unwrap()), [2.0; 4]);
    assert_eq!(values(a.grad(&grads).unwrap()), [1.5]);
}
