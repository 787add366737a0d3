//! SwiGLU, GELU, squared ReLU and dropout.
use super::{Element, download, poisoned, random, report, upload, upload_u32};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::activation::{self, Activation};
use kernels_cubecl::pointwise::dropout::{self, Drop};
use kernels_cubecl::pointwise::gated::{self, Clamp, Gating};

/// The gated linear unit, and its derivatives in gate and up.
pub fn glu(g: f64, u: f64, gating: Gating) -> [f64; 3] {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let by = |(phi, slope): (f64, f64)| [g * phi * u, u * (phi + g * slope), g * phi];
    match gating {
        Gating::Silu => by((sigmoid(g), sigmoid(g) * (1.0 - sigmoid(g)))),
        Gating::Gelu => by(gate(g, false)),
        Gating::GeluTanh => by(gate(g, true)),
        Gating::Clamped(_) => {
            let (c, d) = (g.min(LIMIT), u.clamp(-LIMIT, LIMIT) + 1.0);
            let s = sigmoid(ALPHA * c);
            let of_gate = if g > LIMIT { 0.0 } else { d * s * (1.0 + ALPHA * c * (1.0 - s)) };
            [c * s * d, of_gate, if u.abs() > LIMIT { 0.0 } else { c * s }]
        }
    }
}

/// Of the clamped units that are checked: a tenth of the numbers is beyond the limit.
const ALPHA: f64 = 1.702;
const LIMIT: f64 = 1.5;

/// Every kind.
pub fn gatings() -> [Gating; 4] {
    let clamp = Clamp::new(ALPHA as f32, LIMIT as f32);
    [Gating::Silu, Gating::Gelu, Gating::GeluTanh, Gating::Clamped(clamp)]
}

pub fn gated<E: Element>(client: &Client, rows: usize, half: usize) -> usize {
    gatings().into_iter().map(|gating| glu_of_rows::<E>(client, rows, half, gating)).sum()
}

fn glu_of_rows<E: Element>(client: &Client, rows: usize, half: usize, gating: Gating) -> usize {
    let (x, dy) = (random(rows * 2 * half, 1), random(rows * half, 2));
    let (mut out, mut gradient) = (vec![0.0; rows * half], vec![0.0; rows * 2 * half]);
    for row in 0..rows {
        for c in 0..half {
            let (at, d) = (row * 2 * half + c, dy[row * half + c]);
            let [y, of_gate, of_up] = glu(x[at], x[at + half], gating);
            out[row * half + c] = y;
            gradient[at] = d * of_gate;
            gradient[at + half] = d * of_up;
        }
    }
    let (x, dy) = (upload::<E>(client, &x), upload::<E>(client, &dy));
    let (y, dx) = (poisoned::<E>(client, rows * half), poisoned::<E>(client, rows * half * 2));
    gated::forward::<E>(client, &x, &y, rows, half, gating).expect("legal");
    gated::backward::<E>(client, [&x, &dy, &dx], rows, half, gating).expect("legal");
    report(&format!("{gating:?} {}, {rows} × {half}", E::NAME), &download::<E>(client, &y), &out, E::LIMIT)
        + report("its gradient", &download::<E>(client, &dx), &gradient, E::LIMIT)
}

/// `Φ` and its derivative; the error function by its series.
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

pub fn element_wise<E: Element>(client: &Client, len: usize, activation: Activation) -> usize {
    let (x, dy): (Vec<f64>, _) = (random(len, 1).iter().map(|x| 2.0 * x).collect(), random(len, 2));
    let value_and_slope = |x: &f64| match activation {
        Activation::SquaredRelu => (x.max(0.0).powi(2), 2.0 * x.max(0.0)),
        _ => {
            let (phi, bell) = gate(*x, activation == Activation::GeluTanh);
            (x * phi, phi + x * bell)
        }
    };
    let (out, slopes): (Vec<f64>, Vec<f64>) = x.iter().map(value_and_slope).unzip();
    let gradient: Vec<f64> = slopes.iter().zip(&dy).map(|(slope, d)| d * slope).collect();
    let (x, dy) = (upload::<E>(client, &x), upload::<E>(client, &dy));
    let (y, dx) = (poisoned::<E>(client, len), poisoned::<E>(client, len));
    activation::forward::<E>(client, &x, &y, len, activation).expect("legal");
    activation::backward::<E>(client, [&x, &dy, &dx], len, activation).expect("legal");
    report(&format!("{activation:?} {}, {len}", E::NAME), &download::<E>(client, &y), &out, E::LIMIT)
        + report("its gradient", &download::<E>(client, &dx), &gradient, E::LIMIT)
}

fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

pub fn dropout<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
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
    let dropped = expected.iter().filter(|x| **x == 0.0).count() as f64 / expected.len() as f64;
    assert!((0.1..0.4).contains(&dropped), "a quarter is dropped, not {dropped}");
    let (x, keys, out) = (upload::<E>(client, &x), upload_u32(client, &keys), poisoned::<E>(client, rows * columns));
    dropout::apply::<E>(client, &x, &keys, &out, (rows, columns), how).expect("legal");
    report(&format!("dropout {}, {rows} × {columns}", E::NAME), &download::<E>(client, &out), &expected, E::LIMIT)
}
