//! In chunks and position by position the rule is the same, with the same gradients.

use burn::tensor::DType;
use burn::tensor::activation::{sigmoid, softplus};

use super::*;
use crate::tests::recurrences::{self, Results, noise, plain};

const HEADS: GatedDeltaHeads = GatedDeltaHeads { key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 3 };

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

fn results(inputs: &GatedDeltaInputs, y: Tensor<3>) -> Results {
    let GatedDeltaInputs { x, beta, dt, dt_bias, a_log, .. } = inputs;
    recurrences::results(y, [("x", x), ("beta", beta), ("dt", dt)], [("dt_bias", dt_bias), ("a_log", a_log)])
}

#[test]
fn chunks_are_the_recurrence() {
    recurrences::chunks_are_the_recurrence(
        given,
        |inputs, ages| results(inputs, gated_delta(GatedDeltaInputs { ages, ..inputs.clone() }, HEADS)),
        |inputs, starts| results(inputs, by_position(inputs, None, |at| starts.contains(&at)).0),
    );
}

/// A sequence that is read in two parts.
#[test]
fn states_are_passed_on() {
    let given = |seq| {
        let GatedDeltaInputs { x, beta, dt, dt_bias, a_log, ages } = given(seq, 2);
        let [x, beta, dt] = [x, beta, dt].map(|x| plain(&x));
        let [dt_bias, a_log] = [dt_bias, a_log].map(|x| plain(&x));
        GatedDeltaInputs { x, beta, dt, dt_bias, a_log, ages }
    };
    recurrences::states_are_passed_on(
        given,
        |inputs, first| gated_delta_with_states(inputs.clone(), HEADS, Some(first)),
        |inputs, first| by_position(inputs, first, |_| false),
    );
}
