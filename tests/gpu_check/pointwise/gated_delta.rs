//! The sizes of Qwen3-Next's linear attention.
use crate::clock::{Clock, Turns};
use crate::timings::TOKENS;
use half::bf16;
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::gated_delta::gates_gradient::{self, GateSums};
use kernels_cubecl::pointwise::gated_delta::states::{self, PassInputs, Passed};
use kernels_cubecl::pointwise::gated_delta::{head_dots, inverse_gradient, systems, systems_gradient, units};
use kernels_cubecl::pointwise::ssd::steps::{self, Decays, StepInputs};
use kernels_cubecl::pointwise::ssd::{SsdShape, arrange, combine};

const NAMES: [&str; 13] = [
    "gated delta: decays",
    "gated delta: keys of length one",
    "gated delta: values by head",
    "gated delta: triangular systems",
    "gated delta: states of chunks",
    "gated delta: answers",
    "gated delta, gradients: answers by head and column",
    "gated delta, gradients: states of chunks",
    "gated delta, gradients: dot products of heads",
    "gated delta, gradients: inverses",
    "gated delta, gradients: triangular systems",
    "gated delta, gradients: keys of length one",
    "gated delta, gradients: gates",
];

/// The kernels between the GEMMs of the gated delta rule. States are bound by arithmetic in fp32, not by memory.
pub fn all(clock: &mut Clock) {
    if !clock.wants(&NAMES) {
        return;
    }
    let client = clock.client;
    let shape = SsdShape { seq: TOKENS, samples: 1, heads: 32, groups: 16, head_dim: 128, state: 128, chunk: 64 };
    let (values, keys, numbers) = (TOKENS * shape.inner(), TOKENS * shape.groups * shape.state, shape.per_head());
    let (squares, of_groups) = (shape.weights(), shape.weights() / shape.heads * shape.groups);
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let wide = |len| clock.tensor(FloatType::F32, len);
    let of_numbers = || -> [Turns; 4] { [(); 4].map(|()| wide(numbers)) };
    let (x, y, raw, of_heads) = (half(TOKENS * shape.width()), half(values), half(numbers), half(shape.heads));
    let (key, value, value_too, column) = (half(keys), half(values), half(values), half(values));
    let ([steps, sums, until, since], [a, b, c, d]) = (of_numbers(), of_numbers());
    let [kk, qk] = [(); 2].map(|()| wide(of_groups));
    let square = [(); 4].map(|()| half(squares));
    let (state, state_too, wide_state) = (half(shape.states()), half(shape.states()), wide(shape.states()));
    let (wide_square, of_scores) = (wide(squares), [(); 2].map(|()| half(of_groups)));
    let (along, heads) = (wide(shape.state_parts() * numbers / shape.chunk), wide(2 * shape.heads));
    let inputs = StepInputs {
        raw: raw.at(0),
        bias: of_heads.at(0),
        a_log: of_heads.at(0),
        ages: None,
        limits: [0.0, f32::INFINITY],
    };
    let decays = |i| Decays { steps: steps.at(i), sums: sums.at(i), until: until.at(i), since: since.at(i) };
    let pass = |i| PassInputs { keys: key.at(i), corrections: value.at(i), until: until.at(0), since: since.at(0) };
    let [_, of_keys, of_values] = shape.queries_keys_values();

    clock.time(NAMES[0], (2 + 16) * numbers, |i| {
        steps::forward::<bf16>(client, StepInputs { raw: raw.at(i), ..inputs }, decays(i), shape).expect("legal")
    });
    clock.time(NAMES[1], 4 * keys, |i| {
        units::forward::<bf16>(client, x.at(i), key.at(i), of_keys, 1.0, shape).expect("legal")
    });
    clock.time(NAMES[2], 4 * values, |i| {
        arrange::arrange::<bf16>(client, x.at(i), &[], value.at(i), None, of_values, shape).expect("legal")
    });
    clock.time(NAMES[3], 8 * of_groups + 8 * squares, |i| {
        let to = square.each_ref().map(|of| of.at(i));
        let scores = [kk.at(i), qk.at(i)];
        systems::forward::<bf16>(client, scores, raw.at(0), [sums.at(0), since.at(0)], None, to, shape).expect("legal")
    });
    clock.time(NAMES[4], 2 * (keys + 3 * values + shape.states()), |i| {
        let to = Passed { in_front: state.at(i), values: column.at(i), values_until: None, last: None };
        states::forward::<bf16>(client, pass(i), value_too.at(i), None, to, shape).expect("legal")
    });
    clock.time(NAMES[5], 6 * values, |i| {
        let from = [value.at(i), value_too.at(i)];
        combine::forward::<bf16>(client, from, since.at(0), None, y.at(i), shape).expect("legal")
    });
    clock.time(NAMES[6], 6 * values, |i| {
        let to = Some(column.at(i));
        arrange::arrange::<bf16>(client, y.at(i), &[since.at(0)], value.at(i), to, shape.output(), shape)
            .expect("legal")
    });
    clock.time(NAMES[7], 2 * (keys + 3 * values) + (2 + 2 + 4) * shape.states(), |i| {
        let from = [value_too.at(i), wide_state.at(i), state.at(i)];
        let to = [state_too.at(i), column.at(i), along.at(0)];
        states::backward::<bf16>(client, pass(i), from, to, shape).expect("legal")
    });
    clock.time(NAMES[8], 4 * values, |i| {
        head_dots::dots::<bf16>(client, [value.at(i), column.at(i)], a.at(i), shape).expect("legal")
    });
    clock.time(NAMES[9], 8 * squares, |i| {
        let (scaled, to) = ([square[1].at(i), square[2].at(i)], [square[3].at(i), a.at(i), b.at(i)]);
        inverse_gradient::backward::<bf16>(client, square[0].at(i), scaled, [raw.at(0), since.at(0)], to, shape)
            .expect("legal")
    });
    clock.time(NAMES[10], (4 + 2) * squares + 12 * of_groups, |i| {
        let (from, scores) = ([wide_square.at(i), square[0].at(i)], [kk.at(i), qk.at(i)]);
        let to = [of_scores[0].at(i), of_scores[1].at(i), a.at(i), b.at(i)];
        systems_gradient::backward::<bf16>(client, from, scores, [raw.at(0), sums.at(0)], None, to, shape)
            .expect("legal")
    });
    clock.time(NAMES[11], 12 * keys, |i| {
        let summands = [key.at(i), value.at(i), value_too.at(i), column.at(i)];
        units::backward::<bf16>(client, x.at(i), &summands, x.at(i + 1), of_keys, 1.0, shape).expect("legal")
    });
    clock.time(NAMES[12], (4 + 4 + 28) * numbers, |i| {
        let sums = GateSums { beta: a.at(i), sums: b.at(i), until: c.at(i), since: d.at(i), along: along.at(0) };
        let to = [value.at(i), value_too.at(i), heads.at(0)];
        gates_gradient::backward::<bf16>(client, inputs, raw.at(i), decays(i), sums, to, shape).expect("legal")
    });
}
