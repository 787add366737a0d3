//! RMSNorm and LayerNorm.
use super::{EPS, Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use half::bf16;
use kernels_cubecl::pointwise::norm::{Affine, NormShape, backward, forward};

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
    let (affine, shape, targets) = (Affine::Rms(&w), NormShape { rows, columns }, (&gradient, &w_gradient));
    forward::<E>(client, &x, affine, &ours, EPS as f32, shape).expect("legal");
    backward::<E>(client, &x, affine, &slope, targets, EPS as f32, shape).expect("legal");
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
    let (affine, shape, targets) = (Affine::Layer(&w, &b), NormShape { rows, columns }, (&gradient, &wb_gradient));
    forward::<E>(client, &x, affine, &ours, EPS as f32, shape).expect("legal");
    backward::<E>(client, &x, affine, &slope, targets, EPS as f32, shape).expect("legal");
    report(&format!("layer norm {}, {rows} × {columns}", E::NAME), &download::<E>(client, &ours), &y, E::LIMIT)
        + report("layer norm gradient of x", &download::<E>(client, &gradient), &dx, E::LIMIT)
        + report("layer norm gradient of w, b", &download::<f32>(client, &wb_gradient), &dwb, 1e-5)
}
