//! In chunks and position by position the recurrence is the same, with the same gradients.

use burn::tensor::DType;
use burn::tensor::activation::softplus;

use super::*;
use crate::tests::recurrences::{self, Results, noise, plain};

const SHAPE: SsdHeads = SsdHeads { heads: 6, groups: 2, head_dim: 3, state: 5, step_limit: [0.3, 3.0] };

fn given(seq: usize, samples: usize) -> SsdInputs {
    SsdInputs {
        x: noise(1.0, [seq, samples, SHAPE.width()]),
        dt: noise(2.0, [seq, samples, SHAPE.heads]),
        dt_bias: noise(3.0, [SHAPE.heads]),
        a_log: noise(4.0, [SHAPE.heads]),
        skip: noise(5.0, [SHAPE.heads]),
        ages: None,
    }
}

/// The definition: a document begins wherever `begins` says so.
fn by_position(inputs: &SsdInputs, first: Option<Tensor<4>>, begins: impl Fn(usize) -> bool) -> (Tensor<3>, Tensor<4>) {
    let SsdHeads { heads, groups, head_dim: p, state: n, step_limit } = SHAPE;
    let ([seq, samples, _], serves) = (inputs.x.dims(), heads / groups);
    let like = (&inputs.x.device(), DType::F64);
    // `[b, g, n, h/g p]` as `[b, h, n, p]`, and back.
    let apart = |state: Tensor<4>| {
        let state = state.reshape([samples, groups, n, serves, p]).permute([0, 1, 3, 2, 4]);
        state.reshape([samples, heads, n, p])
    };
    let mut state = first.map_or_else(|| Tensor::zeros([samples, heads, n, p], like), apart);
    let dt = softplus(inputs.dt.clone() + inputs.dt_bias.clone().unsqueeze(), 1.0);
    let dt = dt.clamp(step_limit[0], step_limit[1]);
    let rate = inputs.a_log.clone().exp().neg().reshape([1, heads, 1, 1]);
    let mut answers = Vec::new();
    for at in 0..seq {
        let part = |first: usize, of: usize, each: usize| {
            let part = inputs.x.clone().narrow(0, at, 1).narrow(2, first, of * each);
            part.reshape([samples, of, 1, each])
        };
        let grouped = |first: usize| {
            let of = part(first, groups, n).reshape([samples, groups, 1, n]);
            of.expand([samples, groups, serves, n]).reshape([samples, heads, 1, n])
        };
        let (x, b, c) = (part(0, heads, p), grouped(heads * p), grouped(heads * p + groups * n));
        let dt = dt.clone().narrow(0, at, 1).reshape([samples, heads, 1, 1]);
        if begins(at) {
            state = state.zeros_like();
        }
        state = state * (dt.clone() * rate.clone()).exp() + b.swap_dims(2, 3).matmul(x.clone() * dt);
        let answer = c.matmul(state.clone()) + x * inputs.skip.clone().reshape([1, heads, 1, 1]);
        answers.push(answer.reshape([1, samples, heads * p]));
    }
    let state = state.reshape([samples, groups, serves, n, p]).permute([0, 1, 3, 2, 4]);
    (Tensor::cat(answers, 0), state.reshape([samples, groups, n, serves * p]))
}

fn results(inputs: &SsdInputs, y: Tensor<3>) -> Results {
    let SsdInputs { x, dt, dt_bias, a_log, skip, .. } = inputs;
    recurrences::results(y, [("x", x), ("dt", dt)], [("dt_bias", dt_bias), ("a_log", a_log), ("skip", skip)])
}

#[test]
fn chunks_are_the_recurrence() {
    recurrences::chunks_are_the_recurrence(
        given,
        |inputs, ages| results(inputs, ssd(SsdInputs { ages, ..inputs.clone() }, SHAPE)),
        |inputs, starts| results(inputs, by_position(inputs, None, |at| starts.contains(&at)).0),
    );
}

/// A sequence that is read in two parts.
#[test]
fn states_are_passed_on() {
    let given = |seq| {
        let SsdInputs { x, dt, dt_bias, a_log, skip, ages } = given(seq, 2);
        let [x, dt] = [x, dt].map(|x| plain(&x));
        let [dt_bias, a_log, skip] = [dt_bias, a_log, skip].map(|x| plain(&x));
        SsdInputs { x, dt, dt_bias, a_log, skip, ages }
    };
    recurrences::states_are_passed_on(
        given,
        |inputs, first| ssd_with_states(inputs.clone(), SHAPE, Some(first)),
        |inputs, first| by_position(inputs, first, |_| false),
    );
}
