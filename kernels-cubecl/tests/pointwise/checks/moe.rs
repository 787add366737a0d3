//! Sums of token rows, and SwiGLU with the probability of each token.
use super::{Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::moe::{self, SumRowsShape};

/// Every seventh index is skipped.
pub fn sum_rows<E: Element>(client: &Client, shape: SumRowsShape) -> usize {
    let SumRowsShape { rows, columns, out: count, terms } = shape;
    let number = |at: usize| if at.is_multiple_of(7) { None } else { Some(at * 31 % rows) };
    let x = random(rows * columns, 1);
    let value = |at: usize, column: usize| number(at).map_or(0.0, |row| x[row * columns + column]);
    let expected: Vec<f64> = (0..count * columns)
        .map(|at| (0..terms).map(|term| value(at / columns * terms + term, at % columns)).sum())
        .collect();
    let numbers: Vec<i32> = (0..count * terms).map(|at| number(at).map_or(-1, |row| row as i32)).collect();
    let index = client.create_from_slice(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
    let (x, y) = (upload::<E>(client, &x), poisoned::<E>(client, count * columns));
    moe::sum_rows::<E>(client, &x, &index, &y, shape).expect("legal");
    report(&format!("sums of rows {}, {shape:?}", E::NAME), &download::<E>(client, &y), &expected, E::LIMIT)
}

pub fn swiglu<E: Element>(client: &Client, rows: usize, half: usize) -> usize {
    let (x, p, dy) = (random(rows * 2 * half, 1), random(rows, 3), random(rows * half, 2));
    let (mut out, mut gradient, mut factors) = (vec![0.0; rows * half], vec![0.0; rows * 2 * half], vec![0.0; rows]);
    for row in 0..rows {
        for c in 0..half {
            let (at, d) = (row * 2 * half + c, dy[row * half + c]);
            let (g, u) = (x[at], x[at + half]);
            let s = 1.0 / (1.0 + (-g).exp());
            out[row * half + c] = g * s * u * p[row];
            gradient[at] = d * p[row] * u * s * (1.0 + g * (1.0 - s));
            gradient[at + half] = d * p[row] * g * s;
            factors[row] += d * g * s * u;
        }
    }
    let (x, p, dy) = (upload::<E>(client, &x), upload::<f32>(client, &p), upload::<E>(client, &dy));
    let (y, dx) = (poisoned::<E>(client, rows * half), poisoned::<E>(client, rows * half * 2));
    let dp = poisoned::<f32>(client, rows);
    moe::swiglu::<E>(client, &x, &p, &y, rows, half).expect("legal");
    moe::swiglu_gradients::<E>(client, [&x, &p, &dy], [&dx, &dp], rows, half).expect("legal");
    report(&format!("weighted swiglu {}, {rows} × {half}", E::NAME), &download::<E>(client, &y), &out, E::LIMIT)
        + report("weighted swiglu gradient", &download::<E>(client, &dx), &gradient, E::LIMIT)
        + report("gradient of its factors", &download::<f32>(client, &dp), &factors, 1e-5)
}
