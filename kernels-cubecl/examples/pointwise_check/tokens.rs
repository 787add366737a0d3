//! Rope, the embedding and the cross-entropy.
use super::{download, download_f32, poisoned, random, report, time, upload, upload_f32};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::pointwise::cross_entropy::{self, LogitsShape};
use kernels_cubecl::pointwise::embedding::{self, TableShape};
use kernels_cubecl::pointwise::rope::{self, RopeShape};

fn upload_i32(client: &Client, values: &[i32]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

pub fn check_rope(client: &Client, shape: RopeShape) -> usize {
    let RopeShape { rows, batch, heads, all_heads, head_dim } = shape;
    let half = head_dim / 2;
    let (x, cos, sin) =
        (random(rows * batch * all_heads * head_dim, 1), random(rows * half, 2), random(rows * half, 3));
    let [x_on, cos_on, sin_on] = [&x, &cos, &sin].map(|values| upload(client, values));
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
        let out = poisoned(client, x.len() * 2);
        rope::apply::<bf16>(client, &x_on, (&cos_on, &sin_on), &out, shape, back).expect("legal");
        failures += report(&format!("rope {head_dim}, back {back}"), &download(client, &out), &expected, 3e-3);
    }
    failures
}

pub fn check_cross_entropy(client: &Client, shape: LogitsShape) -> usize {
    let LogitsShape { rows, columns, valid, first_row } = shape;
    let (logits, slope) = (random(rows * columns, 1), random(rows, 2));
    // Labels of this rank, of others on both sides, and in the padding.
    let labels: Vec<i32> = (0..rows).map(|row| (first_row + row * 31) as i32 - 100).collect();
    let (mut greatest, mut sums, mut lse) = (vec![], vec![0.0; 2 * rows], vec![]);
    let mut gradient = vec![0.0; rows * columns];
    for row in 0..rows {
        let part = &logits[row * columns..][..valid];
        let own = usize::try_from(i64::from(labels[row]) - first_row as i64).ok().filter(|own| *own < valid);
        let top = part.iter().copied().fold(-1e30, f64::max);
        sums[row] = part.iter().map(|x| (x - top).exp()).sum();
        sums[rows + row] = own.map_or(0.0, |own| part[own] - top);
        // Other ranks have as much again.
        let total = f64::from((top + (2.0 * sums[row]).ln()) as f32);
        for c in 0..valid {
            let label = if own == Some(c) { 1.0 } else { 0.0 };
            gradient[row * columns + c] = ((part[c] - total).exp() - label) * slope[row];
        }
        greatest.push(top);
        lse.push(total);
    }
    let (x, labels) = (upload(client, &logits), upload_i32(client, &labels));
    let [top, lse, slope] = [&greatest, &lse, &slope].map(|values| upload_f32(client, values));
    let (top_found, sums_found) = (poisoned(client, rows * 4), poisoned(client, rows * 8));
    let found = poisoned(client, rows * columns * 2);
    cross_entropy::maximum::<bf16>(client, &x, &top_found, shape).expect("legal");
    cross_entropy::sums::<bf16>(client, &x, &top, &labels, &sums_found, shape).expect("legal");
    cross_entropy::logits_gradient::<bf16>(client, &x, (&lse, &slope), &labels, Some(&found), shape).expect("legal");
    cross_entropy::logits_gradient::<bf16>(client, &x, (&lse, &slope), &labels, None, shape).expect("legal");
    let sums_found = download_f32(client, &sums_found);
    report(&format!("maximum {columns}"), &download_f32(client, &top_found), &greatest, 0.0)
        + report("sums of exponentials", &sums_found[..rows], &sums[..rows], 1e-5)
        + report("labels' logits", &sums_found[rows..], &sums[rows..], 1e-6)
        + report("gradient of the logits", &download(client, &found), &gradient, 3e-3)
        + report("the same in place", &download(client, &x), &gradient, 3e-3)
}

/// Ids of which many are equal, and some not in the table.
fn some_ids(shape: TableShape) -> Vec<i32> {
    let id = |token: usize| match token % 3 {
        0 => shape.first_row + 7,
        1 => shape.first_row + token % shape.rows,
        _ => token % (2 * shape.first_row + shape.rows),
    };
    (0..shape.ids).map(|token| id(token) as i32).collect()
}

pub fn check_embedding(client: &Client, shape: TableShape) -> usize {
    let TableShape { rows, hidden, first_row, ids: tokens } = shape;
    let (table, slope, before) = (random(rows * hidden, 1), random(tokens * hidden, 2), random(rows * hidden, 3));
    let ids = some_ids(shape);
    let (mut out, mut gradient) = (vec![0.0; tokens * hidden], vec![0.0; rows * hidden]);
    for (token, id) in ids.iter().enumerate() {
        let Some(row) = usize::try_from(*id as i64 - first_row as i64).ok().filter(|row| *row < rows) else { continue };
        for c in 0..hidden {
            out[token * hidden + c] = table[row * hidden + c];
            gradient[row * hidden + c] += slope[token * hidden + c];
        }
    }
    let sum: Vec<f64> = gradient.iter().zip(&before).map(|(a, b)| a + b).collect();
    let (table, slope, ids) = (upload(client, &table), upload(client, &slope), upload_i32(client, &ids));
    let (found, written) = (poisoned(client, tokens * hidden * 2), upload(client, &vec![0.0; rows * hidden]));
    let added = upload_f32(client, &before);
    embedding::forward(client, &table, &ids, &found, shape, 2).expect("legal");
    embedding::backward::<bf16, bf16>(client, &slope, &ids, &written, shape, false).expect("legal");
    embedding::backward::<bf16, f32>(client, &slope, &ids, &added, shape, true).expect("legal");
    report(&format!("embedding {rows} × {hidden}"), &download(client, &found), &out, 0.0)
        + report("embedding gradient", &download(client, &written), &gradient, 3e-3)
        + report("the same, added in fp32", &download_f32(client, &added), &sum, 1e-6)
}

/// `big` gives a tensor of as many bf16 numbers.
pub fn time_all(client: &Client, big: impl Fn(usize) -> Handle) {
    let shape = RopeShape { rows: 8192, batch: 4, heads: 40, all_heads: 48, head_dim: 128 };
    let elements = 8192 * 4 * 48 * 128;
    let (x, out, angles) = (big(elements), big(elements), big(8192 * 64));
    time(client, "rope 8192 × 4, 40 of 48 heads of 128", elements * 4, || {
        rope::apply::<bf16>(client, &x, (&angles, &angles), &out, shape, false).expect("legal")
    });
    let (rows, columns) = (8192, 128_256);
    let shape = LogitsShape { rows, columns, valid: columns, first_row: 0 };
    let logits = big(rows * columns);
    let ids: Vec<i32> = (0..rows).map(|row| (row * 7919 % columns) as i32).collect();
    let labels = upload_i32(client, &ids);
    let (statistics, sums) = (upload_f32(client, &vec![12.0; rows]), poisoned(client, rows * 8));
    let name = |what: &str| format!("{what} {rows} × {columns}");
    time(client, &name("maximum of logits"), rows * columns * 2, || {
        cross_entropy::maximum::<bf16>(client, &logits, &sums, shape).expect("legal")
    });
    time(client, &name("sums of logits"), rows * columns * 2, || {
        cross_entropy::sums::<bf16>(client, &logits, &statistics, &labels, &sums, shape).expect("legal")
    });
    time(client, &name("gradient of logits"), rows * columns * 4, || {
        let statistics = (&statistics, &statistics);
        cross_entropy::logits_gradient::<bf16>(client, &logits, statistics, &labels, None, shape).expect("legal")
    });
    let (tokens, hidden) = (32_768, 4096);
    let shape = TableShape { rows: columns, hidden, first_row: 0, ids: tokens };
    let ids: Vec<i32> = (0..tokens).map(|token| (token * 7919 % 20_000) as i32).collect();
    let ids = upload_i32(client, &ids);
    let (table, out) = (big(columns * hidden), big(tokens * hidden));
    let sum = client.empty(columns * hidden * 4);
    time(client, "embedding 32768 tokens × 4096", tokens * hidden * 4, || {
        embedding::forward(client, &table, &ids, &out, shape, 2).expect("legal")
    });
    // A token's gradient is read once; a row of the sum is read and written.
    time(client, "embedding gradient, 20000 ids", tokens * hidden * 2 + 20_000 * hidden * 8, || {
        embedding::backward::<bf16, f32>(client, &out, &ids, &sum, shape, true).expect("legal")
    });
}
