//! Mamba-2's recurrence in chunks, all its kernels with GEMMs on the host in between, against the recurrence position by
//! position and its gradients, in fp64.
use super::recurrent::ages;
use super::{Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::pointwise::ssd::combine::{self, CombineInputs};
use kernels_cubecl::pointwise::ssd::steps::{self, Decays, StepInputs};
use kernels_cubecl::pointwise::ssd::steps_gradient::{self, Sums};
use kernels_cubecl::pointwise::ssd::{SsdShape, arrange, pass, weights, weights_gradient};

const LIMITS: [f32; 2] = [0.02, 1.5];

/// Inputs, or gradients of them.
struct Given {
    /// `[s, b, x B C]`.
    x: Vec<f64>,
    /// `[s, b, h]`.
    raw: Vec<f64>,
    /// The steps' biases, `a_log` and the skips, `[h]` each.
    heads: [Vec<f64>; 3],
}

/// The definition: the output and, given its gradient, those of the inputs. A document begins where `ages` is 0.
fn by_position(given: &Given, ages: &[f64], dy: &[f64], shape: SsdShape) -> (Vec<f64>, Given) {
    let SsdShape { seq, samples, heads, groups, head_dim: p, state: n, .. } = shape;
    let (width, inner) = (shape.width(), shape.inner());
    let zeros = |of: &[f64]| vec![0.0; of.len()];
    let mut grads =
        Given { x: zeros(&given.x), raw: zeros(&given.raw), heads: given.heads.each_ref().map(|of| zeros(of)) };
    let mut y = vec![0.0; seq * samples * inner];
    for (sample, head) in (0..samples).flat_map(|sample| (0..heads).map(move |head| (sample, head))) {
        let group = head / (heads / groups);
        let rate = -given.heads[1][head].exp();
        let row = |t: usize| (t * samples + sample) * width;
        let (of_b, of_c) = (inner + group * n, inner + (groups + group) * n);
        let argument = |t: usize| given.raw[(t * samples + sample) * heads + head] + given.heads[0][head];
        let free = |t: usize| argument(t).exp().ln_1p();
        let step = |t: usize| free(t).clamp(LIMITS[0] as f64, LIMITS[1] as f64);
        let share = |t: usize| if ages[t * samples + sample] == 0.0 { 0.0 } else { (step(t) * rate).exp() };
        let mut states = vec![vec![0.0; n * p]];
        for t in 0..seq {
            let mut state: Vec<f64> = states[t].iter().map(|s| s * share(t)).collect();
            for (i, s) in state.iter_mut().enumerate() {
                let (x, b, c) = (
                    given.x[row(t) + head * p + i % p],
                    given.x[row(t) + of_b + i / p],
                    given.x[row(t) + of_c + i / p],
                );
                *s += step(t) * x * b;
                y[(t * samples + sample) * inner + head * p + i % p] += c * *s;
            }
            for i in 0..p {
                y[(t * samples + sample) * inner + head * p + i] +=
                    given.heads[2][head] * given.x[row(t) + head * p + i];
            }
            states.push(state);
        }
        let mut slope = vec![0.0; n * p];
        for t in (0..seq).rev() {
            let (mut of_step, mut of_share) = (0.0, 0.0);
            for i in 0..n * p {
                let at = row(t) + head * p + i % p;
                let (in_b, in_c) = (row(t) + of_b + i / p, row(t) + of_c + i / p);
                let dy = dy[(t * samples + sample) * inner + head * p + i % p];
                slope[i] += given.x[in_c] * dy;
                grads.x[in_c] += states[t + 1][i] * dy;
                grads.x[in_b] += step(t) * given.x[at] * slope[i];
                grads.x[at] += step(t) * given.x[in_b] * slope[i];
                of_step += given.x[in_b] * given.x[at] * slope[i];
                of_share += slope[i] * states[t][i];
                slope[i] *= share(t);
            }
            for i in 0..p {
                let at = row(t) + head * p + i;
                let dy = dy[(t * samples + sample) * inner + head * p + i];
                grads.x[at] += given.heads[2][head] * dy;
                grads.heads[2][head] += dy * given.x[at];
            }
            of_step += of_share * share(t) * rate;
            grads.heads[1][head] += of_share * share(t) * step(t) * rate;
            let of_raw = if free(t) == step(t) { of_step / (1.0 + (-argument(t)).exp()) } else { 0.0 };
            grads.raw[(t * samples + sample) * heads + head] = of_raw;
            grads.heads[0][head] += of_raw;
        }
    }
    (y, grads)
}

/// `a · b` of batches of matrices; `[m, k]` and `[k, n]`, or stored the other way round. Rounded to `To`.
pub fn gemm<E: Element, To: Element>(
    client: &Client,
    (a, a_stored): (&Handle, bool),
    (b, b_stored): (&Handle, bool),
    [batch, m, n, k]: [usize; 4],
) -> Handle {
    let (a, b) = (download::<E>(client, a), download::<E>(client, b));
    let mut out = vec![0.0; batch * m * n];
    for (at, out) in out.iter_mut().enumerate() {
        let (of, i, j) = (at / (m * n), at / n % m, at % n);
        let left = |x: usize| a[of * m * k + if a_stored { i * k + x } else { x * m + i }];
        let right = |x: usize| b[of * k * n + if b_stored { x * n + j } else { j * k + x }];
        *out = (0..k).map(|x| left(x) * right(x)).sum();
    }
    upload::<To>(client, &out)
}

pub fn recurrence<E: Element>(client: &Client, shape: SsdShape, divided: bool) -> usize {
    let SsdShape { seq, samples, heads, groups, head_dim: p, state: n, chunk } = shape;
    let (positions, blocks) = (seq * samples, samples * shape.chunks());
    let rounded = |x: Vec<f64>, scale: f64, offset: f64| -> Vec<f64> {
        x.into_iter().map(|x| bf16::from_f64(x * scale + offset).to_f64()).collect()
    };
    let given = Given {
        x: random(positions * shape.width(), 1),
        raw: random(positions * heads, 2),
        heads: [rounded(random(heads, 3), 0.5, -0.5), rounded(random(heads, 4), 0.5, -1.0), random(heads, 5)],
    };
    let dy = random(positions * shape.inner(), 6);
    let age: Vec<f64> =
        if divided { ages(seq, samples) } else { (0..positions).map(|i| (i / samples) as f64).collect() };
    let (expected, grads) = by_position(&given, &age, &dy, shape);

    let [x, raw, bias, a_log, skip, dy] =
        [&given.x, &given.raw, &given.heads[0], &given.heads[1], &given.heads[2], &dy].map(|v| upload::<E>(client, v));
    let age = upload::<f32>(client, &age);
    let age = divided.then_some(&age);
    let wide = |len: usize| poisoned::<f32>(client, len);
    let tensor = |len: usize| poisoned::<E>(client, len);
    let numbers = || wide(shape.per_head());
    let held = shape.per_head() * p;
    let of_groups = shape.per_head() / heads * groups * n;
    let [steps, sums, until, since] = [numbers(), numbers(), numbers(), numbers()];
    let decays = Decays { steps: &steps, sums: &sums, until: &until, since: &since };
    let inputs = StepInputs { raw: &raw, bias: &bias, a_log: &a_log, ages: age, limits: LIMITS };
    steps::forward::<E>(client, inputs, decays, shape).expect("legal");
    let [by_head, by_column, b, c] = [tensor(held), tensor(held), tensor(of_groups), tensor(of_groups)];
    let [of_b, of_c] = shape.grouped();
    arrange::arrange::<E>(client, &x, &[&steps, &until], &by_head, Some(&by_column), shape.x(), shape).expect("legal");
    arrange::arrange::<E>(client, &x, &[], &b, None, of_b, shape).expect("legal");
    arrange::arrange::<E>(client, &x, &[], &c, None, of_c, shape).expect("legal");
    let (per_head, per_group, columns) = (blocks * heads, blocks * groups, heads / groups * p);
    let scores = gemm::<E, f32>(client, (&c, true), (&b, false), [per_group, chunk, chunk, n]);
    let weight = tensor(shape.weights());
    weights::forward::<E>(client, &scores, [&steps, &sums], age, &weight, shape).expect("legal");
    let inside = gemm::<E, E>(client, (&weight, true), (&by_head, true), [per_head, chunk, p, chunk]);
    let summands = gemm::<E, f32>(client, (&b, false), (&by_column, true), [per_group, n, columns, chunk]);
    let in_front = tensor(shape.states());
    pass::forward::<E>(client, [&summands, &since], None, &in_front, None, shape).expect("legal");
    let before = gemm::<E, E>(client, (&c, true), (&in_front, true), [per_group, chunk, columns, n]);
    let y = tensor(positions * shape.inner());
    combine::forward::<E>(client, [&inside, &before], &since, Some([&x, &skip]), &y, shape).expect("legal");

    let [dy_head, dy_column] = [tensor(held), tensor(held)];
    arrange::arrange::<E>(client, &dy, &[&since], &dy_head, Some(&dy_column), shape.output(), shape).expect("legal");
    let of_weights = gemm::<E, E>(client, (&dy_head, true), (&by_head, false), [per_head, chunk, chunk, p]);
    let of_inside = gemm::<E, E>(client, (&weight, false), (&dy_head, true), [per_head, chunk, p, chunk]);
    let of_states = gemm::<E, f32>(client, (&c, false), (&dy_column, true), [per_group, n, columns, chunk]);
    let c_state = gemm::<E, E>(client, (&dy_column, true), (&in_front, false), [per_group, chunk, n, columns]);
    let [row_parts, state_parts] = shape.parts(client);
    let (of_summands, along) = (tensor(shape.states()), wide(state_parts * per_head));
    pass::backward::<E>(client, [&in_front, &of_states, &since], [&of_summands, &along], shape).expect("legal");
    let b_state = gemm::<E, E>(client, (&by_column, true), (&of_summands, false), [per_group, chunk, n, columns]);
    let taken = gemm::<E, E>(client, (&b, true), (&of_summands, true), [per_group, chunk, columns, n]);
    let (of_scores, later, earlier) =
        (tensor(per_group * chunk * chunk), numbers(), wide(row_parts * shape.per_head()));
    let results = [&of_scores, &later, &earlier];
    weights_gradient::backward::<E>(client, [&of_weights, &scores], [&steps, &sums], age, results, shape)
        .expect("legal");
    let b_score = gemm::<E, E>(client, (&of_scores, false), (&c, true), [per_group, chunk, n, chunk]);
    let c_score = gemm::<E, E>(client, (&of_scores, true), (&b, true), [per_group, chunk, n, chunk]);
    let dx = tensor(positions * shape.width());
    let [of_taken, of_before, of_skip] = [numbers(), numbers(), numbers()];
    let summed = [&of_taken, &of_before, &of_skip];
    let inputs_of_x = CombineInputs { dy: &dy, x: &x, before: &before, inside: &of_inside, taken: &taken, skip: &skip };
    combine::backward::<E>(client, inputs_of_x, [&steps, &until], &dx, summed, shape).expect("legal");
    arrange::add::<E>(client, &[&b_state, &b_score], &dx, of_b, shape).expect("legal");
    arrange::add::<E>(client, &[&c_state, &c_score], &dx, of_c, shape).expect("legal");
    let (of_raw, of_heads) = (tensor(positions * heads), wide(3 * heads));
    let sums = Sums { later: &later, earlier: &earlier, combined: summed, along: &along };
    steps_gradient::backward::<E>(client, inputs, decays, sums, [&of_raw, &of_heads], shape).expect("legal");

    let of_heads = download::<f32>(client, &of_heads);
    let name = |what: &str| format!("ssd {what} {}, {seq} positions", E::NAME);
    // Several roundings to `E` one after the other.
    let limit = 20.0 * E::LIMIT;
    report(&name("y"), &download::<E>(client, &y), &expected, limit)
        + report(&name("dx"), &download::<E>(client, &dx), &grads.x, limit)
        + report(&name("steps"), &download::<E>(client, &of_raw), &grads.raw, limit)
        + report(&name("heads"), &of_heads, &grads.heads.concat(), limit)
}
