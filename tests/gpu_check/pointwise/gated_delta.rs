//! The sizes of Qwen3-Next's linear attention.
use super::bandwidths::{Bandwidths, Turns};
use super::timings::TOKENS;
use half::bf16;
use kernels_cubecl::pointwise::gated_delta::gates_gradient::{self, GateSums};
use kernels_cubecl::pointwise::gated_delta::states::{self, PassInputs, Passed};
use kernels_cubecl::pointwise::gated_delta::{head_dots, inverse_gradient, systems, systems_gradient, units};
use kernels_cubecl::pointwise::ssd::steps::{self, Decays, StepInputs};
use kernels_cubecl::pointwise::ssd::{SsdShape, arrange, combine};

/// The kernels between the GEMMs of the gated delta rule. States are bound by arithmetic in fp32, not by memory.
pub fn all(clock: &Bandwidths) {
    let shape = SsdShape { seq: TOKENS, samples: 1, heads: 32, groups: 16, head_dim: 128, state: 128, chunk: 64 };
    let (values, keys, numbers) = (TOKENS * shape.inner(), TOKENS * shape.groups * shape.state, shape.per_head());
    let (squares, of_groups) = (shape.weights(), shape.weights() / shape.heads * shape.groups);
    let half = |len| clock.half(len);
    let wide = |len| clock.wide(len);
    let of_numbers = || -> [Turns; 4] { [(); 4].map(|()| wide(numbers)) };
    let (x, y, raw, of_heads) = (half(TOKENS * shape.width()), half(values), half(numbers), half(shape.heads));
    let (key, value, value_too, column) = (half(keys), half(values), half(values), half(values));
    let ([steps, sums, until, since], [a, b, c, d]) = (of_numbers(), of_numbers());
    let [kk, qk] = [(); 2].map(|()| wide(of_groups));
    let square = [(); 4].map(|()| half(squares));
    let (state, state_too, wide_state) = (half(shape.states()), half(shape.states()), wide(shape.states()));
    let (wide_square, of_scores) = (wide(squares), [(); 2].map(|()| half(of_groups)));
    let (along, heads) = (wide(shape.state_parts() * numbers / shape.chunk), wide(2 * shape.heads));
    let inputs = |i| StepInputs {
        raw: raw.at(i),
        bias: of_heads.at(0),
        a_log: of_heads.at(0),
        ages: None,
        limits: [0.0, f32::INFINITY],
    };
    let decays = |i| Decays { steps: steps.at(i), sums: sums.at(i), until: until.at(i), since: since.at(i) };
    let pass = |i| PassInputs { keys: key.at(i), corrections: value.at(i), until: until.at(0), since: since.at(0) };
    let [_, of_keys, of_values] = shape.queries_keys_values();

    clock.time("gated delta: decays", (2 + 16) * numbers, |client, i| {
        steps::forward::<bf16>(client, inputs(i), decays(i), shape).expect("legal")
    });
    clock.time("gated delta: keys of length one", 4 * keys, |client, i| {
        units::forward::<bf16>(client, x.at(i), key.at(i), of_keys, 1.0, shape).expect("legal")
    });
    clock.time("gated delta: values by head", 4 * values, |client, i| {
        arrange::arrange::<bf16>(client, x.at(i), &[], value.at(i), None, of_values, shape).expect("legal")
    });
    clock.time("gated delta: triangular systems", 8 * of_groups + 8 * squares, |client, i| {
        let to = square.each_ref().map(|of| of.at(i));
        let scores = [kk.at(i), qk.at(i)];
        systems::forward::<bf16>(client, scores, raw.at(0), [sums.at(0), since.at(0)], None, to, shape).expect("legal")
    });
    clock.time("gated delta: states of chunks", 2 * (keys + 3 * values + shape.states()), |client, i| {
        let to = Passed { in_front: state.at(i), values: column.at(i), values_until: None, last: None };
        states::forward::<bf16>(client, pass(i), value_too.at(i), None, to, shape).expect("legal")
    });
    clock.time("gated delta: answers", 6 * values, |client, i| {
        let from = [value.at(i), value_too.at(i)];
        combine::forward::<bf16>(client, from, since.at(0), None, y.at(i), shape).expect("legal")
    });
    clock.time("gated delta, gradients: answers by head and column", 6 * values, |client, i| {
        let to = Some(column.at(i));
        arrange::arrange::<bf16>(client, y.at(i), &[since.at(0)], value.at(i), to, shape.output(), shape)
            .expect("legal")
    });
    clock.time(
        "gated delta, gradients: states of chunks",
        2 * (keys + 3 * values) + (2 + 2 + 4) * shape.states(),
        |client, i| {
            let from = [value_too.at(i), wide_state.at(i), state.at(i)];
            let to = [state_too.at(i), column.at(i), along.at(0)];
            states::backward::<bf16>(client, pass(i), from, to, shape).expect("legal")
        },
    );
    clock.time("gated delta, gradients: dot products of heads", 4 * values, |client, i| {
        head_dots::dots::<bf16>(client, [value.at(i), column.at(i)], a.at(i), shape).expect("legal")
    });
    clock.time("gated delta, gradients: inverses", 8 * squares, |client, i| {
        let (scaled, to) = ([square[1].at(i), square[2].at(i)], [square[3].at(i), a.at(i), b.at(i)]);
        inverse_gradient::backward::<bf16>(client, square[0].at(i), scaled, [raw.at(0), since.at(0)], to, shape)
            .expect("legal")
    });
    clock.time("gated delta, gradients: triangular systems", (4 + 2) * squares + 12 * of_groups, |client, i| {
        let (from, scores) = ([wide_square.at(i), square[0].at(i)], [kk.at(i), qk.at(i)]);
        let to = [of_scores[0].at(i), of_scores[1].at(i), a.at(i), b.at(i)];
        systems_gradient::backward::<bf16>(client, from, scores, [raw.at(0), sums.at(0)], None, to, shape)
            .expect("legal")
    });
    clock.time("gated delta, gradients: keys of length one", 12 * keys, |client, i| {
        let summands = [key.at(i), value.at(i), value_too.at(i), column.at(i)];
        units::backward::<bf16>(client, x.at(i), &summands, x.at(i + 1), of_keys, 1.0, shape).expect("legal")
    });
    clock.time("gated delta, gradients: gates", (4 + 4 + 28) * numbers, |client, i| {
        let sums = GateSums { beta: a.at(i), sums: b.at(i), until: c.at(i), since: d.at(i), along: along.at(0) };
        let to = [value.at(i), value_too.at(i), heads.at(0)];
        gates_gradient::backward::<bf16>(client, inputs(0), raw.at(i), decays(i), sums, to, shape).expect("legal")
    });
}
