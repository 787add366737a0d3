//! GELU, LayerNorm and dropout.
use super::{EPS, download, download_f32, poisoned, random, report, time, upload};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::pointwise::dropout::{self, Drop};
use kernels_cubecl::pointwise::{gelu, layer_norm};

/// `Φ` and its slope; the error function by its series.
fn gate(x: f64, tanh: bool) -> (f64, f64) {
    let factor = (2.0 / std::f64::consts::PI).sqrt();
    if tanh {
        let u = factor * (x + 0.044715 * x.powi(3));
        let phi = 0.5 * (1.0 + u.tanh());
        return (phi, 0.5 * (1.0 - u.tanh().powi(2)) * factor * (1.0 + 3.0 * 0.044715 * x * x));
    }
    let bell = 0.5 * factor * (-0.5 * x * x).exp();
    // Φ(x) = ½ + bell Σ xⁿ / (1·3·…·n) over odd n.
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= x * x / (2 * n + 1) as f64;
        sum += term;
    }
    (0.5 + bell * sum, bell)
}

pub fn check_gelu(client: &Client, len: usize, tanh: bool) -> usize {
    let (x, slope): (Vec<f64>, _) = (random(len, 1).iter().map(|x| 2.0 * x).collect(), random(len, 2));
    let gates = x.iter().map(|x| gate(*x, tanh));
    let out: Vec<f64> = gates.clone().zip(&x).map(|((phi, _), x)| x * phi).collect();
    let gradient: Vec<f64> = gates.zip(&x).zip(&slope).map(|(((phi, bell), x), d)| d * (phi + x * bell)).collect();
    let (x, slope) = (upload(client, &x), upload(client, &slope));
    let (y, dx) = (poisoned(client, len * 2), poisoned(client, len * 2));
    gelu::forward::<bf16>(client, &x, &y, len, tanh).expect("legal");
    gelu::backward::<bf16>(client, &x, &slope, &dx, len, tanh).expect("legal");
    report(&format!("gelu, tanh {tanh}"), &download(client, &y), &out, 3e-3)
        + report("gelu gradient", &download(client, &dx), &gradient, 3e-3)
}

pub fn check_layer_norm(client: &Client, rows: usize, columns: usize) -> usize {
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
    let (x, w, b, slope) = (upload(client, &x), upload(client, &w), upload(client, &b), upload(client, &slope));
    let bytes = rows * columns * 2;
    let (ours, gradient) = (poisoned(client, bytes), poisoned(client, bytes));
    let wb_gradient = poisoned(client, columns * 8);
    let eps = EPS as f32;
    layer_norm::forward::<bf16>(client, &x, (&w, &b), &ours, eps, rows, columns).expect("legal");
    let targets = (&gradient, &wb_gradient);
    layer_norm::backward::<bf16>(client, (&x, &w), &slope, targets, eps, rows, columns).expect("legal");
    report(&format!("layer norm {rows} × {columns}"), &download(client, &ours), &y, 3e-3)
        + report("layer norm gradient of x", &download(client, &gradient), &dx, 3e-3)
        + report("layer norm gradient of w, b", &download_f32(client, &wb_gradient), &dwb, 1e-5)
}

fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

pub fn check_dropout(client: &Client, rows: usize, columns: usize) -> usize {
    let x = random(rows * columns, 1);
    let keys: Vec<u32> = (0..2 * rows as u32).map(|i| mix(i + 17)).collect();
    let how = Drop { first_column: 40, limit: 1 << 30, scale: 4.0 / 3.0 };
    let expected: Vec<f64> = (0..rows * columns)
        .map(|i| {
            let (row, column) = (i / columns, how.first_column + (i % columns) as u32);
            let draw = mix(mix(column.wrapping_mul(0x9e37_79b9).wrapping_add(keys[2 * row])) ^ keys[2 * row + 1]);
            if draw >= how.limit { x[i] * f64::from(how.scale) } else { 0.0 }
        })
        .collect();
    let keys = client.create_from_slice(&keys.iter().flat_map(|key| key.to_le_bytes()).collect::<Vec<_>>());
    let (x, out) = (upload(client, &x), poisoned(client, rows * columns * 2));
    dropout::apply::<bf16>(client, &x, &keys, &out, (rows, columns), how).expect("legal");
    report("dropout", &download(client, &out), &expected, 3e-3)
}

/// `big` gives a tensor of as many bf16 numbers.
pub fn time_all(client: &Client, big: impl Fn(usize) -> Handle) {
    let (rows, columns) = (32_768, 4096);
    let len = rows * columns;
    let (x, slope, out) = (big(len), big(len), big(len));
    for tanh in [false, true] {
        time(client, &format!("gelu of {len}, tanh {tanh}"), len * 4, || {
            gelu::forward::<bf16>(client, &x, &out, len, tanh).expect("legal")
        });
        time(client, "gelu gradient", len * 6, || {
            gelu::backward::<bf16>(client, &x, &slope, &out, len, tanh).expect("legal")
        });
    }
    let (w, dwb) = (big(columns), poisoned(client, columns * 8));
    time(client, &format!("layer norm {rows} × {columns}"), len * 4, || {
        layer_norm::forward::<bf16>(client, &x, (&w, &w), &out, EPS as f32, rows, columns).expect("legal")
    });
    time(client, "layer norm gradient", len * 6, || {
        let targets = (&out, &dwb);
        layer_norm::backward::<bf16>(client, (&x, &w), &slope, targets, EPS as f32, rows, columns).expect("legal")
    });
    let keys = poisoned(client, rows * 8);
    let how = Drop { first_column: 0, limit: 1 << 29, scale: 1.25 };
    time(client, &format!("dropout {rows} × {columns}"), len * 4, || {
        dropout::apply::<bf16>(client, &x, &keys, &out, (rows, columns), how).expect("legal")
    });
}
