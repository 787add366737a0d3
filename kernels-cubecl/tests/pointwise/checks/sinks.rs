//! Sinks of attention.
use super::{Element, download, poisoned, random, report, round, upload};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::sinks::{self, SinkShape};

pub fn of_attention<E: Element>(client: &Client, shape: SinkShape) -> usize {
    let SinkShape { seq, batch, heads, head_dim, stride } = shape;
    let (rows, statistics) = (seq * batch, batch * heads * stride);
    let (x, dy, of_heads) = (random(rows * heads * head_dim, 1), random(rows * heads * head_dim, 2), random(heads, 3));
    let mut lse: Vec<f64> = random(statistics, 4).iter().map(|x| 3.0 * x).collect();
    // A query that sees no key.
    lse[0] = f64::NEG_INFINITY;
    let place = |row: usize, head: usize| (row % batch * heads + head) * stride + row / batch;
    let (mut total, mut out, mut products) = (vec![0.0; statistics], x.clone(), vec![0.0; rows * heads]);
    for row in 0..rows {
        for head in 0..heads {
            let (of_keys, sink) = (lse[place(row, head)], of_heads[head]);
            let all = (of_keys.exp() + sink.exp()).ln();
            total[place(row, head)] = all;
            let own = (row * heads + head) * head_dim..(row * heads + head + 1) * head_dim;
            out[own.clone()].iter_mut().for_each(|x| *x *= (of_keys - all).exp());
            // The kernel reads the rounded output.
            let dot: f64 = own.map(|at| round::<E>(out[at]) * dy[at]).sum();
            products[row * heads + head] = -(sink - all).exp() * dot;
        }
    }
    let (y, dy) = (upload::<E>(client, &x), upload::<E>(client, &dy));
    let (lse, of_heads) = (upload::<f32>(client, &lse), upload::<f32>(client, &of_heads));
    // What is past the last query is not written.
    let (found_total, found) = (upload::<f32>(client, &vec![0.0; statistics]), poisoned::<f32>(client, rows * heads));
    sinks::add::<E>(client, &y, [&lse, &of_heads, &found_total], shape).expect("legal");
    sinks::gradient_terms::<E>(client, [&y, &dy], [&found_total, &of_heads, &found], shape).expect("legal");
    report(&format!("sinks {}, {shape:?}", E::NAME), &download::<E>(client, &y), &out, E::LIMIT)
        + report("log-sum-exp with sinks", &download::<f32>(client, &found_total), &total, 1e-5)
        + report("products of sinks", &download::<f32>(client, &found), &products, 10.0 * E::LIMIT)
}
