//! The convolution and its gradients are those of the definition, one tensor operation after another.

use burn::tensor::activation::silu;
use burn::tensor::{DType, Device, TensorData};

use super::*;

const SAMPLES: usize = 2;
const FEATURES: usize = 5;

fn noise<const D: usize>(seed: f64, shape: [usize; D]) -> Tensor<D> {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i| (i as f64 * 0.731 + seed).sin() * 1.5).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex().autodiff(), DType::F64)).require_grad()
}

/// Positions that are in front of each position in its document, with documents that begin at `starts`.
fn ages(seq: usize, starts: &[usize]) -> Tensor<2> {
    let age = |at: usize| (at - starts.iter().copied().filter(|start| *start <= at).max().unwrap_or(0)) as f32;
    let values: Vec<f32> = (0..seq).flat_map(|at| [age(at); SAMPLES]).collect();
    Tensor::from_data(TensorData::new(values, [seq, SAMPLES]), (&Device::flex().autodiff(), DType::F32))
}

/// One document after the other, each from zeros.
fn by_position(x: Tensor<3>, w: Tensor<2>, bias: Option<Tensor<1>>, starts: &[usize]) -> Tensor<3> {
    let ([seq, ..], [_, kernel]) = (x.dims(), w.dims());
    let position = |at: usize| {
        let start = starts.iter().copied().filter(|start| *start <= at).max().unwrap_or(0);
        let zeros = Tensor::zeros([1, SAMPLES, FEATURES], (&x.device(), DType::F64));
        let sum = (0..kernel.min(at - start + 1)).fold(zeros, |sum, d| {
            let tap = w.clone().narrow(1, kernel - 1 - d, 1).reshape([1, 1, FEATURES]);
            sum + x.clone().narrow(0, at - d, 1) * tap
        });
        silu(match &bias {
            Some(bias) => sum + bias.clone().reshape([1, 1, FEATURES]),
            None => sum,
        })
    };
    Tensor::cat((0..seq).map(position).collect(), 0)
}

#[test]
fn values_and_gradients_are_the_definitions() {
    for (seq, kernel, biased, starts) in [
        (9, 4, true, None),
        (9, 4, false, Some(vec![0, 1, 4, 8])),
        (2, 4, true, Some(vec![0, 1])),
        (7, 1, true, None),
        (12, 3, true, Some(vec![0, 5, 7])),
    ] {
        let (x, w) = (noise(0.3, [seq, SAMPLES, FEATURES]), noise(1.7, [FEATURES, kernel]));
        let bias = biased.then(|| noise(2.9, [FEATURES]));
        let divided = starts.as_ref().map(|starts| ages(seq, starts));
        let found = causal_convolution(x.clone(), w.clone(), bias.clone(), divided);
        let expected = by_position(x.clone(), w.clone(), bias.clone(), &starts.unwrap_or(vec![0]));
        let slope = noise(4.1, [seq, SAMPLES, FEATURES]).detach();
        let [found_grads, expected_grads] = [&found, &expected].map(|y| (y.clone() * slope.clone()).sum().backward());
        let mut pairs = vec![(found.into_data(), expected.into_data())];
        pairs.push((x.grad(&found_grads).unwrap().into_data(), x.grad(&expected_grads).unwrap().into_data()));
        pairs.push((w.grad(&found_grads).unwrap().into_data(), w.grad(&expected_grads).unwrap().into_data()));
        pairs.extend(
            bias.map(|b| (b.grad(&found_grads).unwrap().into_data(), b.grad(&expected_grads).unwrap().into_data())),
        );
        for (found, expected) in pairs {
            for (a, b) in found.iter::<f64>().zip(expected.iter::<f64>()) {
                assert!((a - b).abs() <= 1e-12, "kernel {kernel} of {seq}: {a} instead of {b}");
            }
        }
    }
}
