//! The gated delta rule in chunks, all its kernels with GEMMs on the host in between, against the rule position by position
//! and its gradients, in fp64.
use super::{Element, download, poisoned, random, recurrent::ages, report, ssd::gemm, upload};
use cubecl::prelude::*;
use half::bf16;
use kernels_cubecl::pointwise::gated_delta::gates_gradient::{self, GateSums};
use kernels_cubecl::pointwise::gated_delta::states::{self, PassInputs, Passed};
use kernels_cubecl::pointwise::gated_delta::{head_dots, inverse_gradient, systems, systems_gradient, units};
use kernels_cubecl::pointwise::ssd::steps::{self, Decays, StepInputs};
use kernels_cubecl::pointwise::ssd::{SsdShape, arrange, combine};

/// Inputs, or gradients of them.
struct Given {
    /// `[s, b, q k v]`.
    x: Vec<f64>,
    /// Of steps and β, `[s, b, h]`.
    raw: [Vec<f64>; 2],
    /// The steps' biases and `a_log`, `[h]`.
    heads: [Vec<f64>; 2],
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x` divided by its length.
fn unit(x: &[f64]) -> (Vec<f64>, f64) {
    let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    (x.iter().map(|x| x / length).collect(), length)
}

/// The definition: the answers and, given their gradient, those of the inputs. A document begins where `ages` is 0.
fn by_position(given: &Given, ages: &[f64], dy: &[f64], shape: SsdShape) -> (Vec<f64>, Given) {
    let SsdShape { seq, samples, heads, groups, head_dim: p, state: n, .. } = shape;
    let width = shape.width();
    let zeros = |of: &Vec<f64>| vec![0.0; of.len()];
    let mut grads =
        Given { x: zeros(&given.x), raw: given.raw.each_ref().map(zeros), heads: given.heads.each_ref().map(zeros) };
    let mut y = vec![0.0; seq * samples * shape.inner()];
    let scale = (n as f64).sqrt().recip();
    for (sample, head) in (0..samples).flat_map(|sample| (0..heads).map(move |head| (sample, head))) {
        let group = head / (heads / groups);
        let row = |t: usize| (t * samples + sample) * width;
        let [of_q, of_k, of_v] = [group * n, (groups + group) * n, 2 * groups * n + head * p];
        let query = |t: usize| unit(&given.x[row(t) + of_q..][..n]);
        let key = |t: usize| unit(&given.x[row(t) + of_k..][..n]);
        let number = |t: usize| (t * samples + sample) * heads + head;
        let rate = -given.heads[1][head].exp();
        let argument = |t: usize| given.raw[0][number(t)] + given.heads[0][head];
        let share = |t: usize| match ages[t * samples + sample] {
            0.0 => 0.0,
            _ => (argument(t).exp().ln_1p() * rate).exp(),
        };
        let beta = |t: usize| sigmoid(given.raw[1][number(t)]);
        // `[p, n]` behind each position, and what the state was wrong by.
        let (mut behind, mut wrong) = (vec![vec![0.0; p * n]], vec![]);
        for t in 0..seq {
            let ((q, _), (k, _)) = (query(t), key(t));
            let mut state: Vec<f64> = behind[t].iter().map(|s| s * share(t)).collect();
            let answer = |state: &[f64], k: &[f64], i: usize| (0..n).map(|j| state[i * n + j] * k[j]).sum::<f64>();
            let off: Vec<f64> = (0..p).map(|i| given.x[row(t) + of_v + i] - answer(&state, &k, i)).collect();
            for (at, s) in state.iter_mut().enumerate() {
                *s += beta(t) * off[at / n] * k[at % n];
            }
            for i in 0..p {
                y[(t * samples + sample) * shape.inner() + head * p + i] = answer(&state, &q, i) * scale;
            }
            behind.push(state);
            wrong.push(off);
        }
        let mut slope = vec![0.0; p * n];
        for t in (0..seq).rev() {
            let ((q, q_length), (k, k_length)) = (query(t), key(t));
            let (mut dq, mut dk, mut dbeta, mut dshare) = (vec![0.0; n], vec![0.0; n], 0.0, 0.0);
            for i in 0..p {
                let dy = dy[(t * samples + sample) * shape.inner() + head * p + i] * scale;
                for j in 0..n {
                    slope[i * n + j] += dy * q[j];
                    dq[j] += dy * behind[t + 1][i * n + j];
                }
                let along: f64 = (0..n).map(|j| slope[i * n + j] * k[j]).sum();
                dbeta += along * wrong[t][i];
                let of_wrong = along * beta(t);
                grads.x[row(t) + of_v + i] += of_wrong;
                for j in 0..n {
                    let decayed = behind[t][i * n + j] * share(t);
                    dk[j] += beta(t) * slope[i * n + j] * wrong[t][i] - of_wrong * decayed;
                    slope[i * n + j] -= of_wrong * k[j];
                    dshare += slope[i * n + j] * behind[t][i * n + j];
                    slope[i * n + j] *= share(t);
                }
            }
            for (of, unit, length, d) in [(of_q, &q, q_length, &dq), (of_k, &k, k_length, &dk)] {
                let along: f64 = unit.iter().zip(d).map(|(a, b)| a * b).sum();
                for j in 0..n {
                    grads.x[row(t) + of + j] += (d[j] - unit[j] * along) / length;
                }
            }
            let of_log = dshare * share(t) * rate;
            let of_raw = of_log * sigmoid(argument(t));
            grads.raw[0][number(t)] = of_raw;
            grads.raw[1][number(t)] = dbeta * beta(t) * (1.0 - beta(t));
            grads.heads[0][head] += of_raw;
            grads.heads[1][head] += of_log * argument(t).exp().ln_1p();
        }
    }
    (y, grads)
}

pub fn rule<E: Element>(client: &Client, shape: SsdShape, divided: bool) -> usize {
    let SsdShape { seq, samples, heads, groups, head_dim: p, state: n, chunk } = shape;
    let (positions, blocks) = (seq * samples, samples * shape.chunks());
    let rounded = |x: Vec<f64>, scale: f64, offset: f64| -> Vec<f64> {
        x.into_iter().map(|x| bf16::from_f64(x * scale + offset).to_f64()).collect()
    };
    // Keys that are much alike.
    let mut x = random(positions * shape.width(), 1);
    for (i, x) in x.iter_mut().enumerate() {
        if (groups * n..2 * groups * n).contains(&(i % shape.width())) {
            *x = bf16::from_f64(*x + 1.0).to_f64();
        }
    }
    let given = Given {
        x,
        raw: [random(positions * heads, 2), random(positions * heads, 3)],
        heads: [rounded(random(heads, 4), 0.5, -1.5), rounded(random(heads, 5), 0.5, -1.0)],
    };
    let dy = random(positions * shape.inner(), 6);
    let age: Vec<f64> =
        if divided { ages(seq, samples) } else { (0..positions).map(|i| (i / samples) as f64).collect() };
    let (expected, grads) = by_position(&given, &age, &dy, shape);

    let [x, raw, raw_beta, bias, a_log, dy] =
        [&given.x, &given.raw[0], &given.raw[1], &given.heads[0], &given.heads[1], &dy].map(|v| upload::<E>(client, v));
    let age = upload::<f32>(client, &age);
    let age = divided.then_some(&age);
    let wide = |len: usize| poisoned::<f32>(client, len);
    let tensor = |len: usize| poisoned::<E>(client, len);
    let numbers = || wide(shape.per_head());
    let square = || tensor(shape.weights());
    let held = shape.per_head() * p;
    let (per_head, per_group, serves) = (blocks * heads, blocks * groups, heads / groups);
    let of_groups = per_group * chunk * n;
    let [steps, sums, until, since] = [numbers(), numbers(), numbers(), numbers()];
    let decays = Decays { steps: &steps, sums: &sums, until: &until, since: &since };
    let inputs = StepInputs { raw: &raw, bias: &bias, a_log: &a_log, ages: age, limits: [0.0, f32::INFINITY] };
    steps::forward::<E>(client, inputs, decays, shape).expect("legal");
    let [of_q, of_k, of_v] = shape.queries_keys_values();
    let scale = (n as f32).sqrt().recip();
    let [q, k, v] = [tensor(of_groups), tensor(of_groups), tensor(held)];
    units::forward::<E>(client, &x, &q, of_q, scale, shape).expect("legal");
    units::forward::<E>(client, &x, &k, of_k, 1.0, shape).expect("legal");
    arrange::arrange::<E>(client, &x, &[], &v, None, of_v, shape).expect("legal");
    let [kk, qk] = [&k, &q].map(|of| gemm::<E, f32>(client, (of, true), (&k, false), [per_group, chunk, chunk, n]));
    let [inverse, of_values, of_keys, weights] = [square(), square(), square(), square()];
    let results = [&inverse, &of_values, &of_keys, &weights];
    systems::forward::<E>(client, [&kk, &qk], &raw_beta, [&sums, &since], age, results, shape).expect("legal");
    let base = gemm::<E, E>(client, (&of_values, true), (&v, true), [per_head, chunk, p, chunk]);
    let corrections = gemm::<E, E>(client, (&of_keys, true), (&k, true), [per_group, serves * chunk, n, chunk]);
    let (in_front, values, values_until) = (tensor(shape.states()), tensor(held), tensor(held));
    let pass = PassInputs { keys: &k, corrections: &corrections, until: &until, since: &since };
    let to = Passed { in_front: &in_front, values: &values, values_until: Some(&values_until), last: None };
    states::forward::<E>(client, pass, &base, None, to, shape).expect("legal");
    let inside = gemm::<E, E>(client, (&weights, true), (&values, true), [per_head, chunk, p, chunk]);
    let before = gemm::<E, E>(client, (&q, true), (&in_front, false), [per_group, chunk, serves * p, n]);
    let y = tensor(positions * shape.inner());
    combine::forward::<E>(client, [&inside, &before], &since, None, &y, shape).expect("legal");

    let [dy_head, dy_column] = [tensor(held), tensor(held)];
    arrange::arrange::<E>(client, &dy, &[&since], &dy_head, Some(&dy_column), shape.output(), shape).expect("legal");
    let of_weights = gemm::<E, E>(client, (&dy_head, true), (&values, false), [per_head, chunk, chunk, p]);
    let of_inside = gemm::<E, E>(client, (&weights, false), (&dy_head, true), [per_head, chunk, p, chunk]);
    let of_states = gemm::<E, f32>(client, (&dy_column, false), (&q, true), [per_group, serves * p, n, chunk]);
    let (of_behind, of_base) = (tensor(shape.states()), tensor(held));
    let along = wide(shape.state_parts() * per_head);
    let results = [&of_behind, &of_base, &along];
    states::backward::<E>(client, pass, [&of_inside, &of_states, &in_front], results, shape).expect("legal");
    let taken = gemm::<E, E>(client, (&k, true), (&of_behind, false), [per_group, chunk, serves * p, n]);
    let [of_until, of_since] = [numbers(), numbers()];
    head_dots::dots::<E>(client, [&values, &taken], &of_until, shape).expect("legal");
    head_dots::dots::<E>(client, [&dy_head, &before], &of_since, shape).expect("legal");
    let of_corrections = gemm::<E, E>(client, (&of_base, true), (&in_front, true), [per_head, chunk, n, p]);
    let of_t_values = gemm::<E, E>(client, (&of_base, true), (&v, false), [per_head, chunk, chunk, p]);
    let of_t_keys = gemm::<E, E>(client, (&of_corrections, true), (&k, false), [per_group, serves * chunk, chunk, n]);
    let dv = gemm::<E, E>(client, (&of_values, false), (&of_base, true), [per_head, chunk, p, chunk]);
    let (of_inverse, of_beta, slopes) = (square(), numbers(), numbers());
    let results = [&of_inverse, &of_beta, &slopes];
    let scaled = [&of_t_values, &of_t_keys];
    inverse_gradient::backward::<E>(client, &inverse, scaled, [&raw_beta, &since], results, shape).expect("legal");
    let right = gemm::<E, E>(client, (&of_inverse, true), (&inverse, false), [per_head, chunk, chunk, chunk]);
    let of_systems = gemm::<E, f32>(client, (&inverse, false), (&right, true), [per_head, chunk, chunk, chunk]);
    let [of_kk, of_qk] = [(); 2].map(|()| tensor(per_group * chunk * chunk));
    let (from, scores, results) = ([&of_systems, &of_weights], [&kk, &qk], [&of_kk, &of_qk, &of_beta, &slopes]);
    systems_gradient::backward::<E>(client, from, scores, [&raw_beta, &sums], age, results, shape).expect("legal");
    let of_score = |(a, stored), b| gemm::<E, E>(client, (a, stored), (b, true), [per_group, chunk, n, chunk]);
    let of_q_summands = [
        of_score((&of_qk, true), &k),
        gemm::<E, E>(client, (&dy_column, true), (&in_front, true), [per_group, chunk, n, serves * p]),
    ];
    let of_k_summands = [
        of_score((&of_kk, true), &k),
        of_score((&of_qk, false), &q),
        gemm::<E, E>(client, (&of_keys, false), (&of_corrections, true), [per_group, chunk, n, serves * chunk]),
        gemm::<E, E>(client, (&values_until, true), (&of_behind, true), [per_group, chunk, n, serves * p]),
    ];
    let dx = tensor(positions * shape.width());
    units::backward::<E>(client, &x, &of_q_summands.each_ref(), &dx, of_q, scale, shape).expect("legal");
    units::backward::<E>(client, &x, &of_k_summands.each_ref(), &dx, of_k, 1.0, shape).expect("legal");
    arrange::add::<E>(client, &[&dv], &dx, of_v, shape).expect("legal");
    let sums = GateSums { beta: &of_beta, sums: &slopes, until: &of_until, since: &of_since, along: &along };
    let (of_raw, of_raw_beta, of_heads) = (tensor(positions * heads), tensor(positions * heads), wide(2 * heads));
    let results = [&of_raw, &of_raw_beta, &of_heads];
    gates_gradient::backward::<E>(client, inputs, &raw_beta, decays, sums, results, shape).expect("legal");

    let name = |what: &str| format!("gated delta {what} {}, {seq} positions", E::NAME);
    // Many roundings to `E` one after the other.
    let limit = 40.0 * E::LIMIT;
    report(&name("y"), &download::<E>(client, &y), &expected, limit)
        + report(&name("dx"), &download::<E>(client, &dx), &grads.x, limit)
        + report(&name("steps"), &download::<E>(client, &of_raw), &grads.raw[0], limit)
        + report(&name("beta"), &download::<E>(client, &of_raw_beta), &grads.raw[1], limit)
        + report(&name("heads"), &download::<f32>(client, &of_heads), &grads.heads.concat(), limit)
}
