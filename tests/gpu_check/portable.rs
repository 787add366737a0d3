//! The portable attention kernels and those of `mma.sync` against f64, and their times.

use crate::choice::Choice;
use crate::clock;
use crate::kernel_tests::attention::{Kernels, check, empty};
use crate::kernel_tests::{client, reference::Problem};
use crate::numbers::most;
use crate::report::Report;
use backend_dist::launch::BoxError;
use cubecl::prelude::*;
use kernels_cubecl::attention::portable::{self, Element, mma};
use kernels_cubecl::attention::{AttentionShape, CallOptions, Dropout, Gradients, Half, Saved};

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let client = client();
    if choice.does("check") {
        let [bf16, f16] = [Half::Bf16, Half::F16].map(Kernels::Mma);
        let [wide, narrow, double] = [Element::F32, Element::Bf16, Element::F64].map(Kernels::Plain);
        for kernels in [bf16, f16, wide, narrow, double] {
            check_all(&client, kernels, report);
        }
    }
    if choice.does("time") {
        for head_dim in [64, 128] {
            for kernels in [Kernels::Mma(Half::Bf16), Kernels::Plain(Element::Bf16), Kernels::Plain(Element::F32)] {
                bench(&client, kernels, head_dim);
            }
        }
    }
    Ok(())
}

fn check_all(client: &Client, kernels: Kernels, report: &mut Report) {
    let (start, mut worst) = (report.seconds(), 0.0);
    for problem in problems() {
        let Problem { shape, dropout, starts, first_query, .. } = &problem;
        let options = (dropout.is_some(), starts.is_some(), first_query);
        for one in check(client, kernels, &problem) {
            let what = format!("{} of {kernels:?}, {shape:?}, dropout, packed, first query {options:?}", one.name);
            report.quiet_error(what, one.error, one.bound);
            worst = most([worst, one.error / one.bound]);
        }
    }
    println!("{kernels:?}: worst error is {worst:.2} of its bound ({:.1} s)", report.seconds() - start);
}

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
    let forward = clock::kernel(client, |_| {
        let qkv = (&q, &k, &v);
        let done = match kernels {
            Kernels::Plain(element) => portable::forward(client, element, &shape, 0.1, &options, qkv, &out, &lse),
            Kernels::Mma(_) => mma::forward(client, &shape, 0.1, &options, qkv, &out, &lse),
        };
        done.expect("a legal call");
    });
    let backward = clock::kernel(client, |_| {
        let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let into = Gradients { dq: &dq, dk: &dk, dv: &dv };
        let done = match kernels {
            Kernels::Plain(element) => portable::backward(client, element, &shape, 0.1, &options, saved, &dout, into),
            Kernels::Mma(_) => mma::backward(client, &shape, 0.1, &options, saved, &dout, into),
        };
        done.expect("a legal call");
    });
    let (flops, name) = (shape.forward_flops(), format!("{kernels:?}"));
    let [forward, backward] = [clock::speed(flops, forward), clock::speed(2.5 * flops, backward)];
    println!("{name:<14} 4096, 32/8 heads, head_dim {head_dim:>3}, causal: forward {forward}");
    println!("{:<48} backward {backward}", "");
}
