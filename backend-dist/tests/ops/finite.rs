//! Gradients against differences of the function itself, independent of any autodiff.

use crate::compare::{numbers, run};
use backend_dist::ops::{
    AttentionDropout, AttentionOptions, GeluKind, attention, gelu, layer_norm, linear, rms_norm, rope, squared_relu,
    swiglu,
};
use burn::tensor::{DType, Tensor};

fn check(name: &str, sizes: &[usize], f: impl Fn(Vec<Tensor<1>>) -> Tensor<1>) {
    let inputs: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, &n)| numbers(n, i)).collect();
    let tracked = vec![true; sizes.len()];
    let (out, grads) = run(&f, &inputs, &tracked, DType::F64);
    let weights = numbers(out.len(), 99);
    let loss = |inputs: &[Vec<f64>]| -> f64 {
        let (out, _) = run(&f, inputs, &vec![false; sizes.len()], DType::F64);
        out.iter().zip(&weights).map(|(a, b)| a * b).sum()
    };
    let step = 1e-5;
    for (i, grad) in grads.iter().enumerate() {
        let grad = grad.as_ref().expect("every input is tracked");
        for j in 0..grad.len() {
            let moved = |by: f64| {
                let mut inputs = inputs.clone();
                inputs[i][j] += by;
                loss(&inputs)
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            assert!((grad[j] - slope).abs() < 1e-8, "{name}: input {i} element {j}: {} but slope {slope}", grad[j]);
        }
    }
}

#[test]
fn gradients_are_slopes() {
    check("linear", &[6, 8], |x| linear(x[0].clone().reshape([3, 2]), x[1].clone().reshape([4, 2])).reshape([12]));
    check("rms_norm", &[6, 3], |x| rms_norm(x[0].clone().reshape([2, 3]), x[1].clone(), 1e-5).reshape([6]));
    check("layer_norm", &[8, 4, 4], |x| {
        layer_norm(x[0].clone().reshape([2, 4]), x[1].clone(), x[2].clone(), 1e-5).reshape([8])
    });
    check("swiglu", &[8], |x| swiglu(x[0].clone().reshape([2, 4])).reshape([4]));
    check("gelu erf", &[5], |x| gelu(x[0].clone(), GeluKind::Erf));
    check("gelu tanh", &[5], |x| gelu(x[0].clone(), GeluKind::Tanh));
    check("squared relu", &[5], |x| squared_relu(x[0].clone()));
    check("rope", &[8], |x| {
        let angle = Tensor::<2>::from_data([[0.3], [1.1]], (&x[0].device(), DType::F64));
        rope(x[0].clone().reshape([2, 1, 1, 4]), angle.clone().cos(), angle.sin()).reshape([8])
    });
    check("attention", &[16, 8, 8], |x| {
        let [k, v] = [1, 2].map(|i: usize| x[i].clone().reshape([4, 1, 1, 2]));
        let options = AttentionOptions { window: Some(3), ..AttentionOptions::causal(2) };
        attention(x[0].clone().reshape([4, 1, 2, 2]), k, v, options).reshape([16])
    });
    check("attention with dropout", &[16, 8, 12], |x| {
        let (k, v) = (x[1].clone().reshape([4, 1, 1, 2]), x[2].clone().reshape([4, 1, 1, 3]));
        let dropout = AttentionDropout { p: 0.3, seed: 2, first_sample: 0, first_head: 0, heads: 2 };
        let options = AttentionOptions { dropout: Some(dropout), ..AttentionOptions::causal(2) };
        attention(x[0].clone().reshape([4, 1, 2, 2]), k, v, options).reshape([24])
    });
}
