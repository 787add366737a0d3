//! In chunks and position by position the rule is the same, with the same gradients.

use burn::tensor::activation::{sigmoid, softplus};
use burn::tensor::{DType, Device, TensorData};

use super::*;

const HEADS: GatedDeltaHeads = GatedDeltaHeads { key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 3 };

/// Noise that records gradients.
fn noise<const D: usize>(seed: f64, shape: [usize; D]) -> Tensor<D> {
    let value = |i: usize| ((i as f64 * 12.9898 + seed).sin() * 43758.5453).fract() * 2.0;
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex().autodiff(), DType::F64)).require_grad()
}

/// Keys that are much alike, decays from a few percent to nearly all.
fn given(seq: usize, samples: usize) -> GatedDeltaInputs {
    let keys = HEADS.key_heads * HEADS.key_dim;
    let x = noise(1.0, [seq, samples, HEADS.width()]).detach();
    let alike = x.clone().narrow(2, keys, keys).add_scalar(2.0);
    GatedDeltaInputs {
        x: x.slice_assign([0..seq, 0..samples, keys..2 * keys], alike).detach().require_grad(),
        beta: noise(2.0, [seq, samples, HEADS.value_heads]),
        dt: noise(3.0, [seq, samples, HEADS.value_heads]),
        dt_bias: noise(4.0, [HEADS.value_heads]),
        a_log: noise(5.0, [HEADS.value_heads]),
        ages: None,
    }
}

/// The definition: a document begins wherever `begins` says so. States are `[b, h, p, n]`.
fn by_position(
    inputs: &GatedDeltaInputs,
    first: Option<Tensor<4>>,
    begins: impl Fn(usize) -> bool,
) -> (Tensor<3>, Tensor<4>) {
    let GatedDeltaHeads { key_heads, value_heads, key_dim: n, value_dim: p } = HEADS;
    let ([seq, samples, _], serves) = (inputs.x.dims(), value_heads / key_heads);
    let like = (&inputs.x.device(), DType::F64);
    let mut state = first.unwrap_or_else(|| Tensor::zeros([samples, value_heads, p, n], like));
    let dt = softplus(inputs.dt.clone() + inputs.dt_bias.clone().unsqueeze(), 1.0);
    let decay = (dt * inputs.a_log.clone().exp().neg().unsqueeze::<3>()).exp();
    let beta = sigmoid(inputs.beta.clone());
    let mut answers = Vec::new();
    for at in 0..seq {
        let part = |first: usize, heads: usize, each: usize| {
            let part = inputs.x.clone().narrow(0, at, 1).narrow(2, first, heads * each);
            part.reshape([samples, heads, 1, each])
        };
        let unit = |first: usize| {
            let x = part(first, key_heads, n);
            let x = x.clone() / (x.clone() * x).sum_dim(3).add_scalar(1e-6).sqrt();
            x.expand([samples, key_heads, serves, n]).reshape([samples, value_heads, 1, n])
        };
        let of = |x: &Tensor<3>| x.clone().narrow(0, at, 1).reshape([samples, value_heads, 1, 1]);
        let (q, k) = (unit(0).mul_scalar((n as f64).sqrt().recip()), unit(key_heads * n));
        let v = part(2 * key_heads * n, value_heads, p).swap_dims(2, 3);
        if begins(at) {
            state = state.zeros_like();
        }
        state = state * of(&decay);
        let wrong = v - state.clone().matmul(k.clone().swap_dims(2, 3));
        state = state + (wrong * of(&beta)).matmul(k);
        let answer = state.clone().matmul(q.swap_dims(2, 3));
        answers.push(answer.reshape([1, samples, value_heads * p]));
    }
    (Tensor::cat(answers, 0), state)
}

fn host<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().try_to_vec::<f64>().unwrap()
}

fn assert_close(what: &str, found: Vec<f64>, expected: Vec<f64>) {
    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let gap = found.iter().zip(&expected).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
    assert!(found.len() == expected.len() && gap <= 1e-12 * largest, "{what}: {gap:e} of {largest:e}");
}

/// The output and the gradients of all inputs.
fn results(inputs: &GatedDeltaInputs, y: Tensor<3>) -> Vec<(&'static str, Vec<f64>)> {
    let slope = noise(6.0, y.dims()).detach();
    let grads = (y.clone() * slope).sum().backward();
    let GatedDeltaInputs { x, beta, dt, dt_bias, a_log, .. } = inputs;
    vec![
        ("y", host(y)),
        ("x", host(x.grad(&grads).unwrap())),
        ("beta", host(beta.grad(&grads).unwrap())),
        ("dt", host(dt.grad(&grads).unwrap())),
        ("dt_bias", host(dt_bias.grad(&grads).unwrap())),
        ("a_log", host(a_log.grad(&grads).unwrap())),
    ]
}

/// One position, less than a chunk, whole chunks, and a last chunk that is padded; documents at and next to the borders of
/// chunks.
#[test]
fn chunks_are_the_recurrence() {
    for (seq, samples, starts) in [
        (1, 2, vec![]),
        (2, 1, vec![1]),
        (40, 2, vec![]),
        (128, 1, vec![]),
        (200, 2, vec![]),
        (210, 2, vec![3, 64, 65, 130, 209]),
        (150, 1, vec![63, 149]),
    ] {
        let inputs = given(seq, samples);
        let age = |at: usize| at - starts.iter().copied().filter(|start| *start <= at).max().unwrap_or(0);
        let ages = (!starts.is_empty()).then(|| {
            let values: Vec<f32> = (0..seq).flat_map(|at| vec![age(at) as f32; samples]).collect();
            Tensor::from_data(TensorData::new(values, [seq, samples]), (&inputs.x.device(), DType::F32))
        });
        let found = results(&inputs, gated_delta(GatedDeltaInputs { ages, ..inputs.clone() }, HEADS));
        let (y, _) = by_position(&inputs, None, |at| starts.contains(&at));
        for ((name, found), (_, expected)) in found.into_iter().zip(results(&inputs, y)) {
            assert_close(&format!("{name} of {seq}, documents at {starts:?}"), found, expected);
        }
    }
}

/// A sequence that is read in two parts.
#[test]
fn states_are_passed_on() {
    let device = Device::flex();
    for seq in [1, 30, 100] {
        let inputs = given(seq, 2);
        let plain = |x: &Tensor<3>| Tensor::<3>::from_data(x.to_data(), (&device, DType::F64));
        let of_heads = |x: &Tensor<1>| Tensor::<1>::from_data(x.to_data(), (&device, DType::F64));
        let inputs = GatedDeltaInputs {
            x: plain(&inputs.x),
            beta: plain(&inputs.beta),
            dt: plain(&inputs.dt),
            dt_bias: of_heads(&inputs.dt_bias),
            a_log: of_heads(&inputs.a_log),
            ages: None,
        };
        let (_, first) = by_position(&inputs, None, |_| false);
        let (y, last) = gated_delta_with_states(inputs.clone(), HEADS, Some(first.clone()));
        let (expected, expected_last) = by_position(&inputs, Some(first), |_| false);
        assert_close(&format!("y of {seq}"), host(y), host(expected));
        assert_close(&format!("state of {seq}"), host(last), host(expected_last));
    }
}
