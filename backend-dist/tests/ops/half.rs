//! bf16 and f16: every operation computes in f32 inside, so that outputs and gradients are those of `f64` on the same
//! inputs but for the rounding of the result.

use crate::compare::{distance, leaf, numbers, run, values};
use backend_dist::comm::Group;
use backend_dist::ops::{
    AttentionOptions, DropoutMask, GeluKind, LinearOptions, PackedHeads, Prologue, Rms, attention, attention_packed,
    dropout, embedding, gelu, layer_norm, linear, linear_with, rms_norm, rope, squared_relu, swiglu,
    vocab_parallel_cross_entropy,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Types and half the distance of 1 and the next larger number.
const TYPES: [(DType, f64); 2] = [(DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)];

/// The operation on inputs that both types hold exactly. A gradient may be off by the rounding of itself, of the
/// output's gradient and of what the forward pass has kept.
fn check(name: &str, sizes: &[usize], op: impl Fn(Vec<Tensor<1>>) -> Tensor<1>) {
    let tracked = vec![true; sizes.len()];
    for (dtype, eps) in TYPES {
        let inputs: Vec<Vec<f64>> =
            sizes.iter().enumerate().map(|(i, &n)| values(leaf(&numbers(n, i), dtype, false))).collect();
        let (out, grads) = run(&op, &inputs, &tracked, dtype);
        let (expected, expected_grads) = run(&op, &inputs, &tracked, DType::F64);
        let off = distance(&out, &expected);
        assert!(off <= eps, "{name} {dtype:?}: output off by {off:e}");
        for (i, (grad, expected)) in grads.iter().zip(&expected_grads).enumerate() {
            let off = distance(grad.as_ref().unwrap(), expected.as_ref().unwrap());
            assert!(off <= 4.0 * eps, "{name} {dtype:?}: gradient {i} off by {off:e}");
        }
    }
}

#[test]
fn gemms_and_norms() {
    let n = 6 * 2 * 64;
    let input = |x: &Tensor<1>| x.clone().reshape([6, 2, 64]);
    let weight = |x: &Tensor<1>| x.clone().reshape([32, 64]);
    check("linear", &[n, 32 * 64], |x| linear(input(&x[0]), weight(&x[1])).flatten(0, 2));
    check("rms_norm", &[n, 64], |x| rms_norm(input(&x[0]), x[1].clone(), 1e-5).flatten(0, 2));
    let plus_one = Rms { eps: 1e-5, plus_one: true };
    check("rms_norm of 1 + w", &[n, 64], |x| rms_norm(input(&x[0]), x[1].clone(), plus_one).flatten(0, 2));
    let layer = |x: Vec<Tensor<1>>| layer_norm(input(&x[0]), x[1].clone(), x[2].clone(), 1e-5).flatten(0, 2);
    check("layer_norm", &[n, 64, 64], layer);
    check("swiglu", &[n], |x| swiglu(input(&x[0])).flatten(0, 2));
    for kind in [GeluKind::Erf, GeluKind::Tanh] {
        check("gelu", &[n], |x| gelu(input(&x[0]), kind).flatten(0, 2));
    }
    check("squared relu", &[n], |x| squared_relu(input(&x[0])).flatten(0, 2));
    check("dropout", &[n], |x| dropout(input(&x[0]), 0.25, DropoutMask::new(3)).flatten(0, 2));
    for recompute in [false, true] {
        let fused = |x: Vec<Tensor<1>>| {
            let prologue = Prologue::RmsNorm { weight: x[1].clone(), rms: 1e-5.into() };
            linear_with(input(&x[0]), prologue, weight(&x[2]), None, LinearOptions { recompute, ..Default::default() })
                .flatten(0, 2)
        };
        check("linear with a norm", &[n, 64, 32 * 64], fused);
    }
}

/// In bf16 `1 + w` is 1.
#[test]
fn a_norm_adds_one_to_small_weights_in_f32() {
    let (x, w) = (numbers(12 * 64, 0), vec![0.0029; 64]);
    let [found, expected] = [DType::BF16, DType::F64].map(|dtype| {
        let [x, w] = [&x, &w].map(|of| leaf(&values(leaf(of, DType::BF16, false)), dtype, false));
        let normed: Tensor<2> = rms_norm(x.reshape([12, 64]), w, Rms { eps: 1e-5, plus_one: true });
        values(normed).iter().map(|y| y.abs()).sum::<f64>()
    });
    assert!((found / expected - 1.0).abs() < 3e-4, "{found} and {expected}");
}

#[test]
fn attention_and_positions() {
    let heads = PackedHeads { heads: 4, kv_heads: 2 };
    let options = AttentionOptions::causal(16);
    let packed = |x: &Tensor<1>| x.clone().reshape([9, 2, 8, 16]);
    check("packed attention", &[9 * 2 * 8 * 16], |x| attention_packed(packed(&x[0]), heads, options).flatten(0, 3));
    check("attention", &[9 * 2 * 4 * 16, 9 * 2 * 2 * 16, 9 * 2 * 2 * 16], |x| {
        let [k, v] = [1, 2].map(|i| x[i].clone().reshape([9, 2, 2, 16]));
        attention(x[0].clone().reshape([9, 2, 4, 16]), k, v, options).flatten(0, 3)
    });
    check("rope", &[9 * 2 * 8 * 16], |x| {
        let angles = |i| leaf(&numbers(9 * 8, i), x[0].dtype(), false).reshape([9, 8]);
        rope(packed(&x[0]), angles(50), angles(51)).flatten(0, 3)
    });
}

#[test]
fn tables_and_losses() {
    let ids = |device: &Device| {
        let ids: Vec<i64> = (0..12).map(|i| i * 5 % 11).collect();
        Tensor::<2, Int>::from_data(TensorData::new(ids, [6, 2]), device)
    };
    check("embedding", &[11 * 16], |x| embedding(x[0].clone().reshape([11, 16]), ids(&x[0].device()), 0).flatten(0, 2));
    check("cross-entropy", &[6 * 2 * 12], |x| {
        let (logits, labels) = (x[0].clone().reshape([6, 2, 12]), ids(&x[0].device()));
        let loss: Tensor<1> = vocab_parallel_cross_entropy(logits, labels, 0, 11, &Group::single()).flatten(0, 1);
        let wide = if x[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        assert_eq!(loss.dtype(), wide);
        // The comparison's sum has the type of the inputs.
        loss.cast(burn::tensor::FloatDType::from(x[0].dtype()))
    });
}
