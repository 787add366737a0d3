//! RMSNorm and LayerNorm.
use super::{EPS, Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use half::bf16;
use kernels_cubecl::pointwise::norm::{
    Affine, Gradients, NormShape, Plan, backward, backward_planned, forward, forward_planned,
};

pub fn rms_norm<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    let (x, w, slope) = (random(rows * columns, 1), random(columns, 2), random(rows * columns, 3));
    let (mut y, mut dx, mut dw) = (vec![0.0; rows * columns], vec![0.0; rows * columns], vec![0.0; columns]);
    for row in 0..rows {
        let (x, slope) = (&x[row * columns..][..columns], &slope[row * columns..][..columns]);
        let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / columns as f64 + EPS).sqrt();
        let product: f64 = (0..columns).map(|c| x[c] * slope[c] * w[c]).sum();
        for c in 0..columns {
            y[row * columns + c] = x[c] * factor * w[c];
            dx[row * columns + c] = slope[c] * w[c] * factor - x[c] * product * factor.powi(3) / columns as f64;
            dw[c] += slope[c] * x[c] * factor;
        }
    }
    let [x, w, slope] = [&x, &w, &slope].map(|values| upload::<E>(client, values));
    let (ours, gradient) = (poisoned::<E>(client, rows * columns), poisoned::<E>(client, rows * columns));
    let w_gradient = poisoned::<f32>(client, columns);
    let (affine, shape, targets) =
        (Affine::Rms(&w), NormShape { rows, columns }, Gradients { x: &gradient, affine: &w_gradient });
    forward::<E>(client, &x, None, affine, &ours, EPS as f32, shape).expect("legal");
    backward::<E>(client, &x, affine, &slope, None, targets, EPS as f32, shape).expect("legal");
    report(&format!("rms norm {}, {rows} × {columns}", E::NAME), &download::<E>(client, &ours), &y, E::LIMIT)
        + report("rms norm gradient of x", &download::<E>(client, &gradient), &dx, E::LIMIT)
        + report("rms norm gradient of w", &download::<f32>(client, &w_gradient), &dw, 1e-5)
}

pub fn layer_norm<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    // A mean that a variance by the mean of squares would suffer from.
    let x: Vec<f64> = random(rows * columns, 1).iter().map(|x| bf16::from_f64(x + 30.0).to_f64()).collect();
    let (w, b, slope) = (random(columns, 2), random(columns, 3), random(rows * columns, 4));
    let (mut y, mut dx, mut dwb) = (vec![0.0; rows * columns], vec![0.0; rows * columns], vec![0.0; 2 * columns]);
    let n = columns as f64;
    for row in 0..rows {
        let (x, slope) = (&x[row * columns..][..columns], &slope[row * columns..][..columns]);
        let mean = x.iter().sum::<f64>() / n;
        let factor = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + EPS).sqrt();
        let normal: Vec<f64> = x.iter().map(|x| (x - mean) * factor).collect();
        let weighted: Vec<f64> = slope.iter().zip(&w).map(|(d, w)| d * w).collect();
        let weighted_mean = weighted.iter().sum::<f64>() / n;
        let along = weighted.iter().zip(&normal).map(|(g, x)| g * x).sum::<f64>() / n;
        for c in 0..columns {
            y[row * columns + c] = normal[c] * w[c] + b[c];
            dx[row * columns + c] = (weighted[c] - weighted_mean - normal[c] * along) * factor;
            dwb[c] += slope[c] * normal[c];
            dwb[columns + c] += slope[c];
        }
    }
    let [x, w, b, slope] = [&x, &w, &b, &slope].map(|values| upload::<E>(client, values));
    let (ours, gradient) = (poisoned::<E>(client, rows * columns), poisoned::<E>(client, rows * columns));
    let wb_gradient = poisoned::<f32>(client, 2 * columns);
    let (affine, shape, targets) =
        (Affine::Layer(&w, &b), NormShape { rows, columns }, Gradients { x: &gradient, affine: &wb_gradient });
    forward::<E>(client, &x, None, affine, &ours, EPS as f32, shape).expect("legal");
    backward::<E>(client, &x, affine, &slope, None, targets, EPS as f32, shape).expect("legal");
    report(&format!("layer norm {}, {rows} × {columns}", E::NAME), &download::<E>(client, &ours), &y, E::LIMIT)
        + report("layer norm gradient of x", &download::<E>(client, &gradient), &dx, E::LIMIT)
        + report("layer norm gradient of w, b", &download::<f32>(client, &wb_gradient), &dwb, 1e-5)
}

/// A norm of a sum, and the gradient that another one is added to, next to sums and norms apart.
fn with_sum<E: Element>(client: &Client, rows: usize, columns: usize, layer: bool) -> usize {
    let len = rows * columns;
    let [x, other, slope, more] = [1, 2, 3, 4].map(|seed| random(len, seed));
    let round = |value: f64| {
        let mut bytes = vec![];
        E::write(value, &mut bytes);
        E::read(&bytes)
    };
    let both: Vec<f64> = x.iter().zip(&other).map(|(a, b)| round(a + b)).collect();
    let [x, other, slope, summed] = [&x, &other, &slope, &both].map(|values| upload::<E>(client, values));
    let (w, b, more_on) = (
        upload::<E>(client, &random(columns, 5)),
        upload::<E>(client, &random(columns, 6)),
        upload::<E>(client, &more),
    );
    let affine = if layer { Affine::Layer(&w, &b) } else { Affine::Rms(&w) };
    let (eps, shape) = (EPS as f32, NormShape { rows, columns });
    let sums = if layer { 2 * columns } else { columns };
    let room = || (poisoned::<E>(client, len), poisoned::<E>(client, len), poisoned::<f32>(client, sums));
    let ((sum, y, dw), (dx, y_apart, dw_apart), dx_apart) = (room(), room(), poisoned::<E>(client, len));
    forward::<E>(client, &x, Some((&other, &sum)), affine, &y, eps, shape).expect("legal");
    forward::<E>(client, &summed, None, affine, &y_apart, eps, shape).expect("legal");
    let targets = Gradients { x: &dx, affine: &dw };
    backward::<E>(client, &summed, affine, &slope, Some(&more_on), targets, eps, shape).expect("legal");
    let targets = Gradients { x: &dx_apart, affine: &dw_apart };
    backward::<E>(client, &summed, affine, &slope, None, targets, eps, shape).expect("legal");
    let dx_apart = download::<E>(client, &dx_apart);
    let expected: Vec<f64> = dx_apart.iter().zip(&more).map(|(a, b)| round(a + b)).collect();
    let kind = if layer { "layer norm" } else { "rms norm" };
    report(&format!("{kind} with sum {}, {rows} × {columns}", E::NAME), &download::<E>(client, &sum), &both, 0.0)
        // Both are rounded.
        + report("its normal rows", &download::<E>(client, &y), &download::<E>(client, &y_apart), 2.0 * E::LIMIT)
        + report("its gradient and another", &download::<E>(client, &dx), &expected, 2.0 * E::LIMIT)
        + report("its gradient of weights", &download::<f32>(client, &dw), &download::<f32>(client, &dw_apart), 1e-6)
}

/// LayerNorm cut into cubes in other ways.
pub fn plans<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    let chosen = Plan::of(client, columns, true);
    let len = rows * columns;
    let [x, slope] = [1, 2].map(|seed| upload::<E>(client, &random(len, seed)));
    let [w, b] = [3, 4].map(|seed| upload::<E>(client, &random(columns, seed)));
    let (affine, eps, shape) = (Affine::Layer(&w, &b), EPS as f32, NormShape { rows, columns });
    let run = |plan| {
        let (y, dx) = (poisoned::<E>(client, len), poisoned::<E>(client, len));
        let dwb = poisoned::<f32>(client, 2 * columns);
        let targets = Gradients { x: &dx, affine: &dwb };
        forward_planned::<E>(client, &x, None, affine, &y, eps, shape, plan).expect("legal");
        backward_planned::<E>(client, &x, affine, &slope, None, targets, eps, shape, plan).expect("legal");
        (download::<E>(client, &y), download::<E>(client, &dx), download::<f32>(client, &dwb))
    };
    let (y, dx, dwb) = run(chosen);
    let others = [
        Plan { ahead: 0, ..chosen },
        Plan { ahead: 2, ..chosen },
        Plan { side: 2, cubes: 2, ..chosen },
        Plan { side: 1, cubes: 1000, ..chosen },
    ];
    let mut failures = 0;
    for plan in others {
        let found = run(plan);
        failures +=
            report(&format!("{} ahead, {} side by side, layer norm", plan.ahead, plan.side), &found.0, &y, E::LIMIT)
                + report("its gradient of x", &found.1, &dx, 2.0 * E::LIMIT)
                + report("its gradient of w, b", &found.2, &dwb, 1e-5);
    }
    failures
}

pub fn rms_norm_with_sum<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    with_sum::<E>(client, rows, columns, false)
}

pub fn layer_norm_with_sum<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    with_sum::<E>(client, rows, columns, true)
}
