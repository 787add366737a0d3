//! RMSNorm and LayerNorm.
use super::{EPS, Element, download, poisoned, random, report, report_rounded, round, upload};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::pointwise::head_norms::{self, HeadsShape};
use kernels_cubecl::pointwise::norm::{
    Affine, Gradients, NormShape, Plan, backward, backward_planned, forward, forward_planned,
};

/// Rows, the gradients of their norms, and those of the weights, in fp64.
struct Formula {
    y: Vec<f64>,
    dx: Vec<f64>,
    /// Gradients of the weight, followed by those of a LayerNorm's bias.
    affine: Vec<f64>,
}

/// LayerNorm, or RMSNorm without `b`.
fn formula(x: &[f64], w: &[f64], b: Option<&[f64]>, dy: &[f64]) -> Formula {
    let (columns, layer) = (w.len(), b.is_some());
    let n = columns as f64;
    let (mut y, mut dx, mut affine) = (vec![], vec![], vec![0.0; if layer { 2 * columns } else { columns }]);
    for (x, dy) in x.chunks_exact(columns).zip(dy.chunks_exact(columns)) {
        let mean = if layer { x.iter().sum::<f64>() / n } else { 0.0 };
        let factor = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + EPS).sqrt();
        let normal: Vec<f64> = x.iter().map(|x| (x - mean) * factor).collect();
        let weighted: Vec<f64> = dy.iter().zip(w).map(|(d, w)| d * w).collect();
        let weighted_mean = if layer { weighted.iter().sum::<f64>() / n } else { 0.0 };
        let along = weighted.iter().zip(&normal).map(|(g, x)| g * x).sum::<f64>() / n;
        for c in 0..columns {
            y.push(normal[c] * w[c] + b.map_or(0.0, |b| b[c]));
            dx.push((weighted[c] - weighted_mean - normal[c] * along) * factor);
            affine[c] += dy[c] * normal[c];
            if layer {
                affine[columns + c] += dy[c];
            }
        }
    }
    Formula { y, dx, affine }
}

#[derive(Clone, Copy, Debug)]
enum Norm {
    Rms,
    RmsPlusOne,
    Layer,
}

impl Norm {
    /// What a weight stands for: one more than a small number of `E`, the sum of which is none.
    fn weight<E: Element>(self, w: &[f64]) -> [Vec<f64>; 2] {
        match self {
            Self::RmsPlusOne => {
                let small: Vec<f64> = w.iter().map(|w| round::<E>(w / 16.0)).collect();
                [small.iter().map(|w| 1.0 + w).collect(), small]
            }
            Self::Rms | Self::Layer => [w.to_vec(), w.to_vec()],
        }
    }

    fn affine<'a>(self, w: &'a Handle, b: &'a Handle) -> Affine<'a> {
        match self {
            Self::Rms => Affine::Rms(w),
            Self::RmsPlusOne => Affine::RmsPlusOne(w),
            Self::Layer => Affine::Layer(w, b),
        }
    }

    /// The bias that there is.
    fn bias(self, b: &[f64]) -> Option<&[f64]> {
        matches!(self, Self::Layer).then_some(b)
    }
}

/// Forward and backward of rows `x`.
fn check<E: Element>(client: &Client, x: &[f64], columns: usize, norm: Norm) -> usize {
    let (len, rows) = (x.len(), x.len() / columns);
    let (w, b, dy) = (random(columns, 2), random(columns, 3), random(len, 4));
    let [multiplier, w] = norm.weight::<E>(&w);
    let expected = formula(x, &multiplier, norm.bias(&b), &dy);
    let [x, w, b, dy] = [x, &w, &b, &dy].map(|values| upload::<E>(client, values));
    let (y, dx) = (poisoned::<E>(client, len), poisoned::<E>(client, len));
    let sums = poisoned::<f32>(client, expected.affine.len());
    let affine = norm.affine(&w, &b);
    let (shape, targets) = (NormShape { rows, columns }, Gradients { x: &dx, affine: &sums });
    forward::<E>(client, &x, None, affine, &y, EPS as f32, shape).expect("legal");
    backward::<E>(client, &x, affine, &dy, None, targets, EPS as f32, shape).expect("legal");
    let name = format!("{norm:?} norm {}, {rows} × {columns}", E::NAME);
    report_rounded::<E>(&name, &download::<E>(client, &y), &expected.y, |_, y| round::<E>(y))
        + report_rounded::<E>("its gradient of x", &download::<E>(client, &dx), &expected.dx, |_, dx| round::<E>(dx))
        + report("its gradient of weights", &download::<f32>(client, &sums), &expected.affine, 1e-5)
}

pub fn rms_norm<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    let x = random(rows * columns, 1);
    check::<E>(client, &x, columns, Norm::Rms) + check::<E>(client, &x, columns, Norm::RmsPlusOne)
}

pub fn layer_norm<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    // A mean that would spoil a variance from the mean of squares.
    let x: Vec<f64> = random(rows * columns, 1).iter().map(|x| bf16::from_f64(x + 30.0).to_f64()).collect();
    check::<E>(client, &x, columns, Norm::Layer)
}

/// A norm of a sum, and its gradient added to another one.
fn with_sum<E: Element>(client: &Client, rows: usize, columns: usize, norm: Norm) -> usize {
    let len = rows * columns;
    let [x, other, dy, more] = [1, 2, 3, 4].map(|seed| random(len, seed));
    let [w, b] = [5, 6].map(|seed| random(columns, seed));
    let both: Vec<f64> = x.iter().zip(&other).map(|(a, b)| round::<E>(a + b)).collect();
    let [multiplier, w] = norm.weight::<E>(&w);
    let expected = formula(&both, &multiplier, norm.bias(&b), &dy);
    let [x, other, dy, summed, more_on] = [&x, &other, &dy, &both, &more].map(|values| upload::<E>(client, values));
    let [w, b] = [&w, &b].map(|values| upload::<E>(client, values));
    let affine = norm.affine(&w, &b);
    let (eps, shape) = (EPS as f32, NormShape { rows, columns });
    let [sum, y, dx] = [(); 3].map(|()| poisoned::<E>(client, len));
    let sums = poisoned::<f32>(client, expected.affine.len());
    forward::<E>(client, &x, Some((&other, &sum)), affine, &y, eps, shape).expect("legal");
    let targets = Gradients { x: &dx, affine: &sums };
    backward::<E>(client, &summed, affine, &dy, Some(&more_on), targets, eps, shape).expect("legal");
    report(&format!("{norm:?} norm with sum {}, {rows} × {columns}", E::NAME), &download::<E>(client, &sum), &both, 0.0)
        + report_rounded::<E>("its normal rows", &download::<E>(client, &y), &expected.y, |_, y| round::<E>(y))
        // The gradient is rounded before the other is added, like a separate addition.
        + report_rounded::<E>("its gradient and another", &download::<E>(client, &dx), &expected.dx, |i, dx| {
            round::<E>(f64::from(round::<E>(dx) as f32 + more[i] as f32))
        })
        + report("its gradient of weights", &download::<f32>(client, &sums), &expected.affine, 1e-5)
}

/// LayerNorm with other plans.
pub fn plans<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    let chosen = Plan::of(client, columns, true);
    let len = rows * columns;
    let [x, dy] = [1, 2].map(|seed| random(len, seed));
    let [w, b] = [3, 4].map(|seed| random(columns, seed));
    let expected = formula(&x, &w, Some(&b), &dy);
    let [x, dy, w, b] = [&x, &dy, &w, &b].map(|values| upload::<E>(client, values));
    let (affine, eps, shape) = (Affine::Layer(&w, &b), EPS as f32, NormShape { rows, columns });
    let mut failures = 0;
    let forward = |plan| {
        let y = poisoned::<E>(client, len);
        forward_planned::<E>(client, &x, None, affine, &y, eps, shape, plan).expect("legal");
        report_rounded::<E>(&told("norm", plan), &download::<E>(client, &y), &expected.y, |_, y| round::<E>(y))
    };
    let not_persistent = Plan { cubes: None, ..chosen };
    for plan in [Plan { in_flight: 2, ..not_persistent }, Plan { side: 3, in_flight: 1, ..not_persistent }] {
        failures += forward(plan);
    }
    let others = [
        Plan { in_flight: 0, ..chosen },
        Plan { in_flight: 2, ..chosen },
        Plan { side: 2, cubes: Some(2), ..chosen },
        Plan { side: 1, cubes: Some(1000), ..chosen },
    ];
    for plan in others {
        failures += forward(plan);
        let (dx, sums) = (poisoned::<E>(client, len), poisoned::<f32>(client, 2 * columns));
        let targets = Gradients { x: &dx, affine: &sums };
        backward_planned::<E>(client, &x, affine, &dy, None, targets, eps, shape, plan).expect("legal");
        let (name, dx) = (told("gradient", plan), download::<E>(client, &dx));
        failures += report_rounded::<E>(&name, &dx, &expected.dx, |_, dx| round::<E>(dx))
            + report("its gradient of weights", &download::<f32>(client, &sums), &expected.affine, 1e-5);
    }
    failures
}

fn told(what: &str, plan: Plan) -> String {
    let Plan { in_flight, side, cubes, .. } = plan;
    format!("{what}: {in_flight} ahead, {side} side, cubes {cubes:?}")
}

pub fn rms_norm_with_sum<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    with_sum::<E>(client, rows, columns, Norm::Rms) + with_sum::<E>(client, rows, columns, Norm::RmsPlusOne)
}

pub fn layer_norm_with_sum<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    with_sum::<E>(client, rows, columns, Norm::Layer)
}

/// Norms of the heads of a packed projection, forward and backward; values are copied.
pub fn of_heads<E: Element>(client: &Client, shape: HeadsShape) -> usize {
    heads_by::<E>(client, shape, Norm::Rms) + heads_by::<E>(client, shape, Norm::RmsPlusOne)
}

fn heads_by<E: Element>(client: &Client, shape: HeadsShape, norm: Norm) -> usize {
    let HeadsShape { tokens, heads, kv_heads, all_heads, head_dim } = shape;
    let len = tokens * all_heads * head_dim;
    let [x, dy] = [1, 2].map(|seed| random(len, seed));
    let [of_queries, of_keys] = [3, 4].map(|seed| norm.weight::<E>(&random(head_dim, seed)));
    let weights = [&of_queries[1], &of_keys[1]];
    let (mut y, mut dx, mut affine) = (x.clone(), dy.clone(), vec![]);
    for (first, count, w) in [(0, heads, &of_queries[0]), (heads, kv_heads, &of_keys[0])] {
        let rows = || (0..tokens).flat_map(|token| (first..first + count).map(move |head| token * all_heads + head));
        let of = |from: &[f64]| -> Vec<f64> {
            rows().flat_map(|row| from[row * head_dim..(row + 1) * head_dim].to_vec()).collect()
        };
        let expected = formula(&of(&x), w, None, &of(&dy));
        for (i, row) in rows().enumerate() {
            let (to, from) = (row * head_dim..(row + 1) * head_dim, i * head_dim..(i + 1) * head_dim);
            y[to.clone()].copy_from_slice(&expected.y[from.clone()]);
            dx[to].copy_from_slice(&expected.dx[from]);
        }
        affine.extend(expected.affine);
    }
    let [x, dy] = [&x, &dy].map(|values| upload::<E>(client, values));
    let [q, k] = weights.map(|values| upload::<E>(client, values));
    let [found, found_dx] = [(); 2].map(|()| poisoned::<E>(client, len));
    let sums = poisoned::<f32>(client, affine.len());
    let norm_of = (EPS as f32, matches!(norm, Norm::RmsPlusOne));
    head_norms::forward::<E>(client, &x, [&q, &k], &found, norm_of, shape).expect("legal");
    head_norms::backward::<E>(client, &x, [&q, &k], &dy, [&found_dx, &sums], norm_of, shape).expect("legal");
    let name = format!("head norms {}, {norm:?}, {shape:?}", E::NAME);
    report_rounded::<E>(&name, &download::<E>(client, &found), &y, |_, y| round::<E>(y))
        + report_rounded::<E>("its gradient of x", &download::<E>(client, &found_dx), &dx, |_, dx| round::<E>(dx))
        + report("its gradients of weights", &download::<f32>(client, &sums), &affine, 1e-5)
}
