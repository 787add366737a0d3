//! Checks the attention kernels against an fp64 reference on small shapes and times them on a training shape.
//!
//! `cargo run --release --example attention_check --features cuda` on a machine with a Hopper GPU; `-- sweep` also times the other
//! choices of tiles. An error is
//! ‖x − ref‖ / ‖ref‖; `bf16` is the error of the textbook computation in bf16 with fp32 sums, `ratio` ours over that.
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_runtime::runtime::Runtime;
use half::bf16;
use kernels_cubecl::attention::forward::ForwardPlan;
use kernels_cubecl::attention::key_gradient::KeyGradientPlan;
use kernels_cubecl::attention::query_gradient::QueryGradientPlan;
use kernels_cubecl::attention::{self, AttentionShape, Extras, Tensor4};
use std::time::Instant;

mod reference;

use reference::{Problem, Rounding};

fn upload(client: &Client, values: &[f32]) -> Handle {
    let bits: Vec<u8> = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    client.create_from_slice(&bits)
}

fn download(client: &Client, handle: &Handle) -> Vec<f64> {
    let bytes = client.read_one_unchecked(handle.clone());
    bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect()
}

fn download_f32(client: &Client, handle: &Handle) -> Vec<f64> {
    let bytes = client.read_one_unchecked(handle.clone());
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64).collect()
}

/// A buffer full of NaN, so that what a kernel does not write shows.
fn poisoned(client: &Client, bytes: usize) -> Handle {
    client.create_from_slice(&vec![0xff; bytes])
}

fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let sum = |f: &dyn Fn(usize) -> f64| (0..expected.len()).map(f).sum::<f64>();
    (sum(&|i| (found[i] - expected[i]).powi(2)) / sum(&|i| expected[i].powi(2))).sqrt()
}

struct Buffers {
    q: Tensor4,
    k: Tensor4,
    v: Tensor4,
    out: Tensor4,
    lse: Handle,
}

fn check(client: &Client, shape: AttentionShape, failures: &mut usize) {
    let problem = Problem::random(shape, 7);
    let (exact, exact_lse) = problem.forward(Rounding::Fp64);
    let (rounded, _) = problem.forward(Rounding::Bf16);
    let tensor = |values: &[f32], shape: [usize; 4]| Tensor4::contiguous(upload(client, values), shape);
    let b = Buffers {
        q: tensor(&problem.q, shape.query_shape()),
        k: tensor(&problem.k, shape.key_shape()),
        v: tensor(&problem.v, shape.key_shape()),
        out: Tensor4::contiguous(poisoned(client, 2 * rounded.len()), shape.query_shape()),
        lse: poisoned(client, 4 * shape.statistics_len()),
    };
    let scale = problem.scale() as f32;
    attention::forward(client, &shape, scale, &Extras::default(), (&b.q, &b.k, &b.v), &b.out, &b.lse)
        .expect("a legal shape");
    let bad = std::cell::Cell::new(0);
    let report = |name: &str, found: &[f64], exact: &[f64], rounded: &[f64]| {
        let (ours, theirs) = (distance(found, exact), distance(rounded, exact));
        let good = ours <= 1.2 * theirs;
        bad.set(bad.get() + !good as usize);
        println!(
            "{:>5} {:>5} {:>3}/{:<2} {:>4} {:>6} | {name:>4} {ours:.3e} bf16 {theirs:.3e} ratio {:.2} {}",
            shape.queries,
            shape.keys,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            if shape.causal { "causal" } else { "full" },
            ours / theirs,
            if good { "ok" } else { "BAD" }
        );
    };
    report("out", &download(client, &b.out.handle), &exact, &rounded);
    let lse = download_f32(client, &b.lse);
    let rows: Vec<f64> = (0..shape.batch * shape.heads)
        .flat_map(|i| lse[i * shape.padded_queries()..][..shape.queries].to_vec())
        .collect();
    let far = rows.iter().zip(&exact_lse).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let good = far < 1e-4;
    *failures += !good as usize;
    println!("{:>31} |  lse greatest difference {far:.1e} {}", "", if good { "ok" } else { "BAD" });
    let stored = download(client, &b.out.handle);
    let (exact, rounded) = (problem.backward(&exact, Rounding::Fp64), problem.backward(&stored, Rounding::Bf16));
    let empty = |shape: [usize; 4]| Tensor4::contiguous(poisoned(client, 2 * shape.iter().product::<usize>()), shape);
    let (dq, dk, dv) = (empty(shape.query_shape()), empty(shape.key_shape()), empty(shape.key_shape()));
    let out_gradient = tensor(&problem.out_gradient, shape.query_shape());
    let saved = attention::Saved { q: &b.q, k: &b.k, v: &b.v, out: &b.out, lse: &b.lse };
    let gradients = attention::Gradients { q: &dq, k: &dk, v: &dv };
    attention::backward(client, &shape, scale, &Extras::default(), saved, &out_gradient, gradients)
        .expect("a legal shape");
    let first = [&dq, &dk, &dv].map(|t| download(client, &t.handle));
    report("dq", &first[0], &exact.q, &rounded.q);
    report("dk", &first[1], &exact.k, &rounded.k);
    report("dv", &first[2], &exact.v, &rounded.v);
    attention::backward(client, &shape, scale, &Extras::default(), saved, &out_gradient, gradients)
        .expect("a legal shape");
    let same = [&dq, &dk, &dv].map(|t| download(client, &t.handle)) == first;
    *failures += !same as usize;
    *failures += bad.get();
    println!("{:>31} |  second backward pass gives the same bits: {same}", "");
}

/// Seconds a call takes, the median of `rounds` batches of `calls`.
fn time(client: &Client, rounds: usize, calls: usize, mut call: impl FnMut()) -> f64 {
    let sync = || cubecl::future::block_on(client.sync()).expect("the kernels ran");
    call();
    sync();
    let mut seconds: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| call());
            sync();
            start.elapsed().as_secs_f64() / calls as f64
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[rounds / 2]
}

fn bench(client: &Client, shape: AttentionShape, sweep: bool) {
    let random = |shape: [usize; 4], seed| {
        Tensor4::contiguous(upload(client, &reference::normal(shape.iter().product(), seed)), shape)
    };
    let (q, k, v) = (random(shape.query_shape(), 1), random(shape.key_shape(), 2), random(shape.key_shape(), 3));
    let out = random(shape.query_shape(), 4);
    let lse = poisoned(client, 4 * shape.statistics_len());
    let scale = 1.0 / (shape.head_dim as f32).sqrt();
    let line = |what: &str, seconds: f64, flops: f64| {
        println!(
            "{:>6} × {} × {:>2}/{} × {:>3} {:>6} | {what:<44} {:7.3} ms {:6.1} TFLOP/s",
            shape.queries,
            shape.batch,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            if shape.causal { "causal" } else { "full" },
            seconds * 1e3,
            flops / seconds / 1e12,
        );
    };
    let flops = shape.forward_flops();
    let forward = time(client, 5, 10, || {
        attention::forward(client, &shape, scale, &Extras::default(), (&q, &k, &v), &out, &lse).expect("a legal shape")
    });
    line("forward", forward, flops);
    let out_gradient = random(shape.query_shape(), 5);
    let delta = poisoned(client, 4 * shape.statistics_len());
    let (dq, dk, dv) = (random(shape.query_shape(), 6), random(shape.key_shape(), 7), random(shape.key_shape(), 8));
    let saved = attention::Saved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
    let gradients = attention::Gradients { q: &dq, k: &dk, v: &dv };
    let backward = time(client, 5, 10, || {
        attention::backward(client, &shape, scale, &Extras::default(), saved, &out_gradient, gradients)
            .expect("a legal shape")
    });
    line("backward", backward, 2.5 * flops);
    if !sweep {
        return;
    }
    let sums = time(client, 5, 10, || {
        attention::row_sums(client, &shape, &Extras::default(), &out, &out_gradient, &delta).expect("a legal shape")
    });
    line("  row sums", sums, 0.0);
    let (d, causal) = (shape.head_dim, shape.causal);
    let all = [false, true];
    for (block, stages) in [(64, 4), (80, 2), (96, 2), (128, 2), (128, 3), (144, 2), (160, 2), (176, 2), (192, 2)] {
        for (overlap, turns) in all.into_iter().flat_map(|o| all.map(|t| (o, t))) {
            if (d == 128 && (block > 176 || !overlap || !turns)) || (d == 64 && turns) {
                continue;
            }
            let plan = ForwardPlan { head_dim: d, block, stages, causal, overlap, turns };
            let seconds = time(client, 5, 10, || {
                attention::forward_planned(client, &shape, scale, &Extras::default(), (&q, &k, &v), &out, &lse, plan)
                    .expect("legal")
            });
            line(&format!("  {block} × {stages} overlap {overlap} turns {turns}"), seconds, flops);
        }
    }
    for (block, stages) in [(64, 2), (64, 4), (96, 2), (112, 2), (128, 2), (128, 4)] {
        if d == 128 && (block, stages) == (128, 4) {
            continue;
        }
        let plan = QueryGradientPlan { head_dim: d, block, stages, causal };
        let seconds = time(client, 5, 10, || {
            attention::query_gradient(
                client,
                &shape,
                scale,
                &Extras::default(),
                saved,
                &out_gradient,
                &delta,
                &dq,
                plan,
            )
            .expect("legal")
        });
        line(&format!("  query gradient {block} × {stages}"), seconds, 1.5 * flops);
    }
    for (block, stages, early) in [(32, 4, false), (64, 2, false), (64, 2, true), (64, 4, false), (128, 2, false)] {
        if d == 128 && block == 128 {
            continue;
        }
        let plan = KeyGradientPlan { head_dim: d, block, stages, causal, early };
        let seconds = time(client, 5, 10, || {
            attention::key_gradient(
                client,
                &shape,
                scale,
                &Extras::default(),
                saved,
                &out_gradient,
                &delta,
                (&dk, &dv),
                plan,
            )
            .expect("legal")
        });
        line(&format!("  key gradient {block} × {stages} early {early}"), seconds, 2.0 * flops);
    }
}

fn main() {
    let client = cubecl::cuda::CudaRuntime::client(&Default::default());
    let base = AttentionShape {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        queries: 384,
        keys: 384,
        head_dim: 128,
        value_dim: 128,
        causal: true,
        window: None,
    };
    let mut failures = 0;
    for shape in [
        AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 128, keys: 128, causal: false, ..base },
        AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 128, keys: 128, ..base },
        AttentionShape { causal: false, ..base },
        base,
        AttentionShape { queries: 300, keys: 300, ..base },
        AttentionShape { queries: 200, keys: 333, ..base },
        AttentionShape { queries: 129, keys: 333, causal: false, ..base },
        AttentionShape { head_dim: 64, value_dim: 64, ..base },
        AttentionShape { head_dim: 64, queries: 300, keys: 333, ..base },
        AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 1024, keys: 1024, ..base },
    ] {
        check(&client, shape, &mut failures);
    }
    let train = AttentionShape {
        batch: 1,
        heads: 32,
        kv_heads: 8,
        queries: 8192,
        keys: 8192,
        head_dim: 128,
        value_dim: 128,
        causal: true,
        window: None,
    };
    let sweep = std::env::args().any(|argument| argument == "sweep");
    for shape in
        [train, AttentionShape { causal: false, ..train }, AttentionShape { head_dim: 64, value_dim: 64, ..train }]
    {
        bench(&client, shape, sweep);
    }
    assert_eq!(failures, 0, "{failures} results are further from the reference than they may be");
}
