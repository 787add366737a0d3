//! Sums of token rows, the activation of experts with the probability of each token, and biases of experts.
use super::activation::{gatings, glu};
use super::{Element, download, poisoned, random, report, upload, upload_i32};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::column_sum::{GroupRows, group_sums};
use kernels_cubecl::pointwise::gated::Gating;
use kernels_cubecl::pointwise::moe::biases::{self, GroupBias};
use kernels_cubecl::pointwise::moe::{self, SumRowsShape, weighted};

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

/// The activation with the router's probabilities; with biases, `half` is also the rows' length behind the second layer.
pub fn weighted<E: Element>(client: &Client, rows: usize, half: usize) -> usize {
    let [silu, .., clamped] = gatings();
    weighted_product::<E>(client, rows, half, silu, false) + weighted_product::<E>(client, rows, half, clamped, true)
}

fn weighted_product<E: Element>(client: &Client, rows: usize, half: usize, gating: Gating, biased: bool) -> usize {
    let (x, p, dy) = (random(rows * 2 * half, 1), random(rows, 3), random(rows * half, 2));
    let groups = Groups::of(client, rows);
    let bias = random(groups.count() * 2 * half, 4);
    let (mut out, mut gradient, mut factors) = (vec![0.0; rows * half], vec![0.0; rows * 2 * half], vec![0.0; rows]);
    for row in 0..rows {
        for c in 0..half {
            let (at, d) = (row * 2 * half + c, dy[row * half + c]);
            let own = |at: usize| if biased { bias[groups.of_rows[row] * 2 * half + at] } else { 0.0 };
            let [y, of_gate, of_up] = glu(x[at] + own(c), x[at + half] + own(half + c), gating);
            out[row * half + c] = y * p[row];
            gradient[at] = d * p[row] * of_gate;
            gradient[at + half] = d * p[row] * of_up;
            factors[row] += d * y;
        }
    }
    let (x, p, dy) = (upload::<E>(client, &x), upload::<f32>(client, &p), upload::<E>(client, &dy));
    let (y, dx) = (poisoned::<E>(client, rows * half), poisoned::<E>(client, rows * half * 2));
    let (dp, bias) = (poisoned::<f32>(client, rows), upload::<E>(client, &bias));
    let bias = biased.then(|| groups.bias(&bias));
    weighted::forward::<E>(client, [&x, &p, &y], bias, rows, half, gating).expect("legal");
    weighted::backward::<E>(client, [&x, &p, &dy], [&dx, &dp], bias, rows, half, gating).expect("legal");
    report(&format!("weighted {gating:?} {}, {rows} × {half}", E::NAME), &download::<E>(client, &y), &out, E::LIMIT)
        + report("its gradient", &download::<E>(client, &dx), &gradient, E::LIMIT)
        + report("gradient of its factors", &download::<f32>(client, &dp), &factors, 1e-5)
}

/// Rows of a block, all of one group.
const BLOCK: usize = 4;

/// Groups of rows: the second is empty, the last has most rows.
struct Groups {
    of_rows: Vec<usize>,
    starts: Vec<i32>,
    handles: [Handle; 2],
}

impl Groups {
    fn of(client: &Client, rows: usize) -> Self {
        let second = rows.div_ceil(4).next_multiple_of(BLOCK).min(rows) as i32;
        let starts = vec![0, second, second, rows as i32];
        let of_rows: Vec<usize> = (0..rows).map(|row| if (row as i32) < starts[1] { 0 } else { 2 }).collect();
        let numbers: Vec<i32> = of_rows.iter().step_by(BLOCK).map(|group| *group as i32).collect();
        let handles = [upload_i32(client, &numbers), upload_i32(client, &starts)];
        Self { of_rows, starts, handles }
    }

    fn count(&self) -> usize {
        self.starts.len() - 1
    }

    fn bias<'a>(&'a self, values: &'a Handle) -> GroupBias<'a> {
        GroupBias { values, groups: self.count(), of_blocks: &self.handles[0], block: BLOCK }
    }
}

/// Biases of groups with factors of rows, and their gradients.
pub fn biases<E: Element>(client: &Client, rows: usize, columns: usize) -> usize {
    let (y, p, dy) = (random(rows * columns, 1), random(rows, 3), random(rows * columns, 2));
    let groups = Groups::of(client, rows);
    let bias = random(groups.count() * columns, 4);
    let (mut out, mut sums) = (y.clone(), vec![0.0; groups.count() * columns]);
    let (mut plain, mut products) = (sums.clone(), vec![0.0; rows]);
    for at in 0..rows * columns {
        let (row, own) = (at / columns, groups.of_rows[at / columns] * columns + at % columns);
        out[at] += p[row] * bias[own];
        sums[own] += p[row] * dy[at];
        plain[own] += dy[at];
        products[row] += bias[own] * dy[at];
    }
    let (y, p, dy) = (upload::<E>(client, &y), upload::<f32>(client, &p), upload::<E>(client, &dy));
    let (bias, dp) = (upload::<E>(client, &bias), upload::<f32>(client, &vec![0.0; rows]));
    let of_rows = GroupRows { starts: &groups.handles[1], groups: groups.count(), rows };
    let [weighted, unweighted] = [(); 2].map(|()| poisoned::<f32>(client, sums.len()));
    biases::add::<E>(client, &y, &p, groups.bias(&bias), rows, columns).expect("legal");
    biases::add_products::<E>(client, &dy, &dp, groups.bias(&bias), rows, columns).expect("legal");
    group_sums::<E>(client, &dy, Some(&p), &weighted, of_rows, columns).expect("legal");
    group_sums::<E>(client, &dy, None, &unweighted, of_rows, columns).expect("legal");
    report(&format!("biases {}, {rows} × {columns}", E::NAME), &download::<E>(client, &y), &out, E::LIMIT)
        + report("gradient of factors", &download::<f32>(client, &dp), &products, 1e-5)
        + report("gradient of biases", &download::<f32>(client, &weighted), &sums, 1e-5)
        + report("sums of groups", &download::<f32>(client, &unweighted), &plain, 1e-5)
}
