//! Checks the portable attention kernels and those of `mma.sync` on an NVIDIA GPU against f64, and times them.
//!
//! `cargo run --release --example portable_check --features cuda [-- check|time]`

#[path = "../../tests/attention/checks.rs"]
mod checks;
#[path = "../../tests/draws/mod.rs"]
mod draws;
#[path = "../../tests/attention/reference.rs"]
mod reference;

use checks::{Kernels, check, empty};
use cubecl::prelude::*;
use kernels_cubecl::attention::portable::{self, Element, mma};
use kernels_cubecl::attention::{AttentionShape, CallOptions, Dropout, Gradients, Half, Saved};
use reference::Problem;
use std::process::ExitCode;
use std::time::Instant;

fn problems() -> Vec<Problem> {
    let ([batch, heads, kv_heads], [queries, keys], [head_dim, value_dim]) = ([2, 4, 2], [150, 150], [64, 64]);
    let (causal, window) = (true, None);
    let base = AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal, window };
    let plain = |shape| Problem { shape, scale: 0.3, dropout: None, starts: None, first_query: None };
    let mut all: Vec<Problem> = [(64, 64), (16, 16), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (48, 16)]
        .map(|(head_dim, value_dim)| plain(AttentionShape { head_dim, value_dim, ..base }))
        .into();
    for (causal, window) in [(false, None), (true, Some(40)), (false, Some(17)), (true, Some(1))] {
        all.push(plain(AttentionShape { causal, window, ..base }));
    }
    for (queries, keys) in [(70, 200), (1, 33), (200, 70)] {
        all.push(plain(AttentionShape { queries, keys, ..base }));
    }
    let window = AttentionShape { causal: false, window: Some(30), ..base };
    all.extend([-200, -60, 20, 140].map(|first| Problem { first_query: Some(first), ..plain(window) }));
    let dropout = Some(Dropout { p: 0.3, seed: 99, first: [3, 2, 0, 0], heads: 9, queries: 150 });
    all.extend([base, window].map(|shape| Problem { dropout, ..plain(shape) }));
    let starts = [vec![0, 50, 50, 51, 130], vec![0, 60, 61, 71, 150]];
    for (causal, window) in [(true, None), (false, None), (true, Some(20))] {
        let shape = AttentionShape { batch: 1, queries: 130, causal, window, ..base };
        all.push(Problem { starts: Some(starts.clone()), ..plain(shape) });
    }
    all
}

/// Seconds a call takes, the median of five batches of three; of single ones if they are slow.
fn time(client: &Client, call: impl Fn()) -> f64 {
    let sync = || cubecl::future::block_on(client.sync()).expect("the kernels ran");
    let batch = |calls: u32| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        sync();
        start.elapsed().as_secs_f64() / f64::from(calls)
    };
    batch(1);
    let calls = if batch(1) > 0.1 { 1 } else { 3 };
    let mut seconds = [calls; 5].map(batch);
    seconds.sort_by(f64::total_cmp);
    seconds[2]
}

fn bench(client: &Client, kernels: Kernels, head_dim: usize) {
    let ([batch, heads, kv_heads], [queries, keys], value_dim) = ([1, 32, 8], [4096, 4096], head_dim);
    let (causal, window) = (true, None);
    let shape = AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal, window };
    let element = kernels.element();
    let zeros = |shape: [usize; 4]| {
        let mut tensor = empty(client, shape, element);
        tensor.handle = client.create_from_slice(&vec![0; shape.iter().product::<usize>() * element.size()]);
        tensor
    };
    let [q, out, dout, dq] = [0; 4].map(|_| zeros(shape.query_shape()));
    let [k, v, dk, dv] = [0; 4].map(|_| zeros(shape.key_shape()));
    let lse = client.empty(4 * shape.statistics_len());
    let half = if let Kernels::Mma(half) = kernels { half } else { Half::default() };
    let options = CallOptions { element: half, ..Default::default() };
    let forward = time(client, || {
        let qkv = (&q, &k, &v);
        let done = match kernels {
            Kernels::Plain(element) => portable::forward(client, element, &shape, 0.1, &options, qkv, &out, &lse),
            Kernels::Mma(_) => mma::forward(client, &shape, 0.1, &options, qkv, &out, &lse),
        };
        done.expect("a legal call");
    });
    let backward = time(client, || {
        let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let into = Gradients { dq: &dq, dk: &dk, dv: &dv };
        let done = match kernels {
            Kernels::Plain(element) => portable::backward(client, element, &shape, 0.1, &options, saved, &dout, into),
            Kernels::Mma(_) => mma::backward(client, &shape, 0.1, &options, saved, &dout, into),
        };
        done.expect("a legal call");
    });
    let speed = |flops: f64, seconds: f64| format!("{:8.3} ms {:6.1} TFLOP/s", seconds * 1e3, flops / seconds / 1e12);
    let (flops, name) = (shape.forward_flops(), format!("{kernels:?}"));
    println!("{name:<14} 4096, 32/8 heads, head_dim {head_dim:>3}, causal: forward {}", speed(flops, forward));
    println!("{:<48} backward {}", "", speed(2.5 * flops, backward));
}

/// Number of results are further from f64 than their bounds.
fn check_all(client: &Client) -> usize {
    let (mut all, mut bad) = (0, 0);
    let kinds = [
        Kernels::Mma(Half::Bf16),
        Kernels::Mma(Half::F16),
        Kernels::Plain(Element::F32),
        Kernels::Plain(Element::Bf16),
        Kernels::Plain(Element::F64),
    ];
    for kernels in kinds {
        let (start, mut worst) = (Instant::now(), 0.0f64);
        for problem in problems() {
            let found = check(client, kernels, &problem);
            all += found.len();
            worst = found.iter().fold(worst, |worst, one| worst.max(one.error / one.bound));
            for one in found.iter().filter(|one| !one.ok()) {
                bad += 1;
                let Problem { shape, dropout, starts, first_query, .. } = &problem;
                let options = (dropout.is_some(), starts.is_some(), first_query);
                println!("{kernels:?}: {one}, of {shape:?}, dropout, packed, first query {options:?}");
            }
        }
        println!("{kernels:?}: worst error is {worst:.2} of its bound ({:.1} s)", start.elapsed().as_secs_f64());
    }
    println!("{} of {all} results are within their bounds", all - bad);
    bad
}

fn main() -> ExitCode {
    let part = std::env::args().nth(1);
    let does = |what: &str| part.as_deref().is_none_or(|part| part == what);
    assert!(does("check") || does("time"), "{part:?} is neither check nor time");
    let client = cubecl::Device::Cuda(Default::default()).client();
    let bad = if does("check") { check_all(&client) } else { 0 };
    for head_dim in [64, 128].into_iter().filter(|_| does("time")) {
        for kernels in [Kernels::Mma(Half::Bf16), Kernels::Plain(Element::Bf16), Kernels::Plain(Element::F32)] {
            bench(&client, kernels, head_dim);
        }
    }
    if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
