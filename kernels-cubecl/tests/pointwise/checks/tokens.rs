//! Rope, the embedding and the cross-entropy.
use super::{Element, download, poisoned, random, report, upload, upload_i32};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::cross_entropy::{self, LogitsShape};
use kernels_cubecl::pointwise::embedding::{self, Plan, TableShape};
use kernels_cubecl::pointwise::rope::{self, RopeShape};

pub fn rope<E: Element>(client: &Client, shape: RopeShape) -> usize {
    let RopeShape { rows, batch, heads, all_heads, head_dim, rotated } = shape;
    let half = rotated / 2;
    let (x, cos, sin) =
        (random(rows * batch * all_heads * head_dim, 1), random(rows * half, 2), random(rows * half, 3));
    let [x_on, cos_on, sin_on] = [&x, &cos, &sin].map(|values| upload::<E>(client, values));
    let mut failures = 0;
    for back in [false, true] {
        let mut expected = x.clone();
        for (i, head) in expected.chunks_exact_mut(head_dim).enumerate().filter(|(i, _)| i % all_heads < heads) {
            let angles = i / all_heads / batch * half;
            for c in 0..half {
                let (cos, sin) = (cos[angles + c], if back { -sin[angles + c] } else { sin[angles + c] });
                let (a, b) = (head[c], head[c + half]);
                (head[c], head[c + half]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        let out = poisoned::<E>(client, x.len());
        rope::apply::<E>(client, &x_on, (&cos_on, &sin_on), Some(&out), shape, back).expect("legal");
        let name = format!("rope {}, {heads} of {all_heads} × {rotated} of {head_dim}, back {back}", E::NAME);
        failures += report(&name, &download::<E>(client, &out), &expected, E::LIMIT);
        let there = upload::<E>(client, &x);
        rope::apply::<E>(client, &there, (&cos_on, &sin_on), None, shape, back).expect("legal");
        failures += report("the same in place", &download::<E>(client, &there), &expected, E::LIMIT);
    }
    failures
}

pub fn cross_entropy<E: Element>(client: &Client, shape: LogitsShape) -> usize {
    let LogitsShape { rows, columns, valid, first_row } = shape;
    let (logits, dy) = (random(rows * columns, 1), random(rows, 2));
    // Labels of this rank, of other ranks on both sides, and in the padding.
    let labels: Vec<i32> = (0..rows).map(|row| (first_row + row * 31) as i32 - 100).collect();
    let (mut greatest, mut sums, mut lse) = (vec![], vec![0.0; 2 * rows], vec![]);
    let mut gradient = vec![0.0; rows * columns];
    for row in 0..rows {
        let part = &logits[row * columns..][..valid];
        let own = usize::try_from(i64::from(labels[row]) - first_row as i64).ok().filter(|own| *own < valid);
        let top = part.iter().copied().fold(-1e30, f64::max);
        sums[row] = part.iter().map(|x| (x - top).exp()).sum();
        sums[rows + row] = own.map_or(0.0, |own| part[own] - top);
        // Other ranks have an equal sum.
        let total = f64::from((top + (2.0 * sums[row]).ln()) as f32);
        for c in 0..valid {
            let label = if own == Some(c) { 1.0 } else { 0.0 };
            gradient[row * columns + c] = ((part[c] - total).exp() - label) * dy[row];
        }
        greatest.push(top);
        lse.push(total);
    }
    let (x, labels) = (upload::<E>(client, &logits), upload_i32(client, &labels));
    let [top, lse, dy] = [&greatest, &lse, &dy].map(|values| upload::<f32>(client, values));
    let (top_found, sums_found) = (poisoned::<f32>(client, rows), poisoned::<f32>(client, 2 * rows));
    let found = poisoned::<E>(client, rows * columns);
    cross_entropy::maximum::<E>(client, &x, &top_found, shape).expect("legal");
    cross_entropy::sums::<E>(client, &x, &labels, (&top, &sums_found), shape, false).expect("legal");
    let (top_at_once, sums_at_once) = (poisoned::<f32>(client, rows), poisoned::<f32>(client, 2 * rows));
    cross_entropy::sums::<E>(client, &x, &labels, (&top_at_once, &sums_at_once), shape, true).expect("legal");
    cross_entropy::logits_gradient::<E>(client, &x, (&lse, &dy), &labels, Some(&found), shape).expect("legal");
    cross_entropy::logits_gradient::<E>(client, &x, (&lse, &dy), &labels, None, shape).expect("legal");
    let [sums_found, sums_at_once] = [sums_found, sums_at_once].map(|sums| download::<f32>(client, &sums));
    let name = format!("maximum {}, {rows} × {valid} of {columns}", E::NAME);
    report(&name, &download::<f32>(client, &top_found), &greatest, 0.0)
        + report("sums of exponentials", &sums_found[..rows], &sums[..rows], 1e-5)
        + report("labels' logits", &sums_found[rows..], &sums[rows..], 1e-6)
        + report("maximum in one pass", &download::<f32>(client, &top_at_once), &greatest, 0.0)
        + report("sums in one pass", &sums_at_once[..rows], &sums[..rows], 1e-5)
        + report("labels' logits in one pass", &sums_at_once[rows..], &sums[rows..], 1e-6)
        + report("gradient of the logits", &download::<E>(client, &found), &gradient, E::LIMIT)
        + report("the same in place", &download::<E>(client, &x), &gradient, E::LIMIT)
}

/// Ids, many of them equal, and some not in the table.
fn some_ids(shape: TableShape) -> Vec<i32> {
    let id = |token: usize| match token % 3 {
        0 => shape.first_row + 7,
        1 => shape.first_row + token % shape.rows,
        _ => token % (2 * shape.first_row + shape.rows),
    };
    (0..shape.ids).map(|token| id(token) as i32).collect()
}

pub fn embedding<E: Element>(client: &Client, shape: TableShape) -> usize {
    let TableShape { rows, hidden, first_row, ids: tokens } = shape;
    let (table, dy, before) = (random(rows * hidden, 1), random(tokens * hidden, 2), random(rows * hidden, 3));
    let ids = some_ids(shape);
    let (mut out, mut gradient) = (vec![0.0; tokens * hidden], vec![0.0; rows * hidden]);
    for (token, id) in ids.iter().enumerate() {
        let Some(row) = usize::try_from(*id as i64 - first_row as i64).ok().filter(|row| *row < rows) else { continue };
        for c in 0..hidden {
            out[token * hidden + c] = table[row * hidden + c];
            gradient[row * hidden + c] += dy[token * hidden + c];
        }
    }
    let sum: Vec<f64> = gradient.iter().zip(&before).map(|(a, b)| a + b).collect();
    let (table, dy, ids) = (upload::<E>(client, &table), upload::<E>(client, &dy), upload_i32(client, &ids));
    let found = poisoned::<E>(client, tokens * hidden);
    embedding::forward(client, &table, &ids, &found, shape, size_of::<E>()).expect("legal");
    let name = format!("embedding {}, {tokens} of {rows} × {hidden}", E::NAME);
    let mut failures = report(&name, &download::<E>(client, &found), &out, 0.0);
    let plan = embedding::Plan::of(client, shape);
    for plan in [
        plan,
        Plan { side: plan.units, in_flight: 3, ..plan },
        // All tokens in one list.
        Plan { buckets: 1, side: plan.units / 2, in_flight: 2, ..plan },
        Plan { buckets: 2 * plan.buckets, in_flight: 8, ..plan },
        // Several launches.
        Plan { max_tokens: plan.units.max(64), ..plan },
    ] {
        let (written, added) = (upload::<E>(client, &vec![0.0; rows * hidden]), upload::<f32>(client, &before));
        embedding::backward_planned::<E, E>(client, &dy, &ids, &written, shape, false, plan).expect("legal");
        embedding::backward_planned::<E, f32>(client, &dy, &ids, &added, shape, true, plan).expect("legal");
        let name = format!("gradient by {plan:?}");
        if tokens <= plan.max_tokens as usize {
            failures += report(&name, &download::<E>(client, &written), &gradient, E::LIMIT);
        }
        failures += report(&name, &download::<f32>(client, &added), &sum, 1e-6);
    }
    failures
}
