//! Checks the memory-bound kernels against fp64 and gives their share of a card's copy bandwidth.
//!
//! `cargo run --release --example pointwise_check --features cuda`. An error is ‖x − ref‖ / ‖ref‖; bf16 results may be
//! off by 3e-3, fp32 ones by 1e-6 (AdamW) and 1e-5 (sums over rows).
mod gpt;
mod tokens;

use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_runtime::runtime::Runtime;
use half::bf16;
use kernels_cubecl::pointwise::adamw::{self, AdamWBucket, AdamWStep};
use kernels_cubecl::pointwise::cross_entropy::LogitsShape;
use kernels_cubecl::pointwise::embedding::TableShape;
use kernels_cubecl::pointwise::flat::{self, Chunks, FloatType, Run};
use kernels_cubecl::pointwise::rope::RopeShape;
use kernels_cubecl::pointwise::{rms_norm, swiglu};
use std::time::Instant;

const EPS: f64 = 1e-5;

/// Numbers with mean 0 and variance 1 (uniform), rounded to bf16.
fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let unit = (state >> 11) as f64 / (1u64 << 53) as f64;
            bf16::from_f64((unit - 0.5) * 12f64.sqrt()).to_f64()
        })
        .collect()
}

fn upload(client: &Client, values: &[f64]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect::<Vec<_>>())
}

fn upload_f32(client: &Client, values: &[f64]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect::<Vec<_>>())
}

fn download(client: &Client, handle: &Handle) -> Vec<f64> {
    let bytes = client.read_one_unchecked(handle.clone());
    bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect()
}

fn download_f32(client: &Client, handle: &Handle) -> Vec<f64> {
    let bytes = client.read_one_unchecked(handle.clone());
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f64).collect()
}

fn poisoned(client: &Client, bytes: usize) -> Handle {
    client.create_from_slice(&vec![0xff; bytes])
}

fn report(name: &str, found: &[f64], expected: &[f64], limit: f64) -> usize {
    assert_eq!(found.len(), expected.len());
    let far: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    let error = (far / expected.iter().map(|b| b * b).sum::<f64>()).sqrt();
    let good = error <= limit;
    println!("{name:<28} error {error:.2e} {}", if good { "ok" } else { "BAD" });
    !good as usize
}

fn check_swiglu(client: &Client, rows: usize, half: usize) -> usize {
    let (x, slope) = (random(rows * 2 * half, 1), random(rows * half, 2));
    let (mut out, mut gradient) = (vec![0.0; rows * half], vec![0.0; rows * 2 * half]);
    for row in 0..rows {
        for c in 0..half {
            let (at, d) = (row * 2 * half + c, slope[row * half + c]);
            let (g, u) = (x[at], x[at + half]);
            let s = 1.0 / (1.0 + (-g).exp());
            out[row * half + c] = g * s * u;
            gradient[at] = d * u * s * (1.0 + g * (1.0 - s));
            gradient[at + half] = d * g * s;
        }
    }
    let (x, slope) = (upload(client, &x), upload(client, &slope));
    let (y, dx) = (poisoned(client, rows * half * 2), poisoned(client, rows * half * 4));
    swiglu::forward::<bf16>(client, &x, &y, rows, half).expect("legal");
    swiglu::backward::<bf16>(client, &x, &slope, &dx, rows, half).expect("legal");
    report("swiglu", &download(client, &y), &out, 3e-3)
        + report("swiglu gradient", &download(client, &dx), &gradient, 3e-3)
}

fn check_rms_norm(client: &Client, rows: usize, columns: usize) -> usize {
    let (x, w, slope) = (random(rows * columns, 1), random(columns, 2), random(rows * columns, 3));
    let (mut y, mut dx, mut dw) = (vec![0.0; rows * columns], vec![0.0; rows * columns], vec![0.0; columns]);
    for row in 0..rows {
        let (x, slope) = (&x[row * columns..][..columns], &slope[row * columns..][..columns]);
        let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / columns as f64 + EPS).sqrt();
        let product: f64 = (0..columns).map(|c| x[c] * slope[c] * w[c]).sum();
        for c in 0..columns {
            y[row * columns + c] = x[c] * factor * w[c];
            dx[row * columns + c] = slope[c] * w[c] * factor - x[c] * product * factor.powi(3) / columns as f64;
            dw[c] += slope[c] * x[c] * factor;
        }
    }
    let (x, w, slope) = (upload(client, &x), upload(client, &w), upload(client, &slope));
    let bytes = rows * columns * 2;
    let (ours, gradient) = (poisoned(client, bytes), poisoned(client, bytes));
    let w_gradient = poisoned(client, columns * 4);
    rms_norm::forward::<bf16>(client, (&x, &w), &ours, EPS as f32, rows, columns).expect("legal");
    rms_norm::backward::<bf16>(client, (&x, &w), &slope, (&gradient, &w_gradient), EPS as f32, rows, columns)
        .expect("legal");
    report(&format!("rms norm {rows} × {columns}"), &download(client, &ours), &y, 3e-3)
        + report("rms norm gradient of x", &download(client, &gradient), &dx, 3e-3)
        + report("rms norm gradient of w", &download_f32(client, &w_gradient), &dw, 1e-5)
}

const STEP: AdamWStep = AdamWStep {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    step_size: 3e-3,
    root_scale: 2.5,
    keep: 1.0 - 3e-4,
    gradient_scale: 0.25,
};

fn check_adamw(client: &Client) -> usize {
    // Tensors that end inside a vector of four, one of a single element among them.
    let ends = [5u32, 6, 300, 1001, 1004];
    let decays = [1u32, 0, 1, 0, 1];
    let len = 1004;
    let [p, m, v, g] = [1, 2, 3, 4].map(|seed| random(len, seed));
    let v: Vec<f64> = v.iter().map(|v| v.abs()).collect();
    let mut expected = [vec![], vec![], vec![]];
    for i in 0..len {
        let tensor = ends.iter().position(|end| i < *end as usize).expect("the last end is the length");
        let k = |x: f32| x as f64;
        let g = g[i] * k(STEP.gradient_scale);
        let next_m = k(STEP.beta1) * m[i] + (1.0 - k(STEP.beta1)) * g;
        let next_v = k(STEP.beta2) * v[i] + (1.0 - k(STEP.beta2)) * g * g;
        let keep = if decays[tensor] == 1 { k(STEP.keep) } else { 1.0 };
        let root = next_v.sqrt() * k(STEP.root_scale) + k(STEP.eps);
        expected[0].push(p[i] * keep - k(STEP.step_size) * next_m / root);
        expected[1].push(next_m);
        expected[2].push(next_v);
    }
    let bytes = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
    let [master, first, second, gradient] = [&p, &m, &v, &g].map(|values| upload_f32(client, values));
    let weight = poisoned(client, len * 2);
    let (end_buffer, decay_buffer) =
        (client.create_from_slice(&bytes(&ends)), client.create_from_slice(&bytes(&decays)));
    let bucket = AdamWBucket {
        master: &master,
        first: &first,
        second: &second,
        gradient: &gradient,
        weight: Some((&weight, FloatType::Bf16)),
        ends: &end_buffer,
        decays: &decay_buffer,
        tensors: ends.len(),
        len,
    };
    adamw::step(client, bucket, &STEP).expect("legal");
    report("adamw parameter", &download_f32(client, &master), &expected[0], 1e-6)
        + report("adamw first moment", &download_f32(client, &first), &expected[1], 1e-6)
        + report("adamw second moment", &download_f32(client, &second), &expected[2], 1e-6)
        + report("adamw bf16 weight", &download(client, &weight), &expected[0], 3e-3)
}

/// Runs that begin and end inside vectors of four, between types, and chunks of squares.
fn check_flat(client: &Client) -> usize {
    let len = 200_003;
    let (x, y) = (random(len, 1), random(len, 2));
    let (narrow, wide) = (upload(client, &x), upload_f32(client, &y));
    let run = |handle, float, start, len| Run { handle, float, start, len };
    let whole = |handle, float| run(handle, float, 0, 1000);
    flat::write(client, whole(&narrow, FloatType::Bf16), whole(&wide, FloatType::F32), true).expect("legal");
    let (from, to) = (run(&narrow, FloatType::Bf16, 3001, 77), run(&wide, FloatType::F32, 2002, 77));
    flat::write(client, from, to, false).expect("legal");
    let mut expected = y;
    (0..1000).for_each(|i| expected[i] += x[i]);
    expected[2002..2079].copy_from_slice(&x[3001..3078]);
    let bytes = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
    let runs = [(3u32, 65_536u32), (65_539, 1), (70_000, 130_003)];
    let (starts, lens): (Vec<u32>, Vec<u32>) = runs.into_iter().unzip();
    let (starts, lens) = (client.create_from_slice(&bytes(&starts)), client.create_from_slice(&bytes(&lens)));
    let sums = upload_f32(client, &[7.0; 5]);
    let chunks = Chunks { starts: &starts, lens: &lens, count: 3, end: len };
    flat::squares(client, &wide, chunks, &sums, 1).expect("legal");
    let square = |(start, len): (u32, u32)| -> f64 {
        expected[start as usize..(start + len) as usize].iter().map(|v| v * v).sum()
    };
    let squares = [vec![7.0], runs.map(square).to_vec(), vec![7.0]].concat();
    report("flat writes", &download_f32(client, &wide), &expected, 1e-7)
        + report("squares", &download_f32(client, &sums), &squares, 1e-6)
}

/// Times `call`, which moves `bytes`, and prints its bandwidth.
fn time(client: &Client, name: &str, bytes: usize, mut call: impl FnMut()) {
    let sync = || cubecl::future::block_on(client.sync()).expect("the kernels ran");
    call();
    sync();
    let mut seconds: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            (0..20).for_each(|_| call());
            sync();
            start.elapsed().as_secs_f64() / 20.0
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    println!("{name:<44} {:7.3} ms {:5.2} TB/s", seconds[2] * 1e3, bytes as f64 / seconds[2] / 1e12);
}

fn main() {
    let client = &cubecl::cuda::CudaRuntime::client(&Default::default());
    let failures = check_swiglu(client, 33, 1032)
        + check_rms_norm(client, 700, 4096)
        + check_rms_norm(client, 33, 1000)
        + check_rms_norm(client, 5, 8192)
        + tokens::check_rope(client, RopeShape { rows: 37, batch: 3, heads: 10, all_heads: 12, head_dim: 128 })
        + tokens::check_rope(client, RopeShape { rows: 5, batch: 1, heads: 3, all_heads: 3, head_dim: 64 })
        + tokens::check_cross_entropy(client, LogitsShape { rows: 70, columns: 1064, valid: 1003, first_row: 5000 })
        + tokens::check_cross_entropy(client, LogitsShape { rows: 33, columns: 20008, valid: 20008, first_row: 0 })
        + tokens::check_embedding(client, TableShape { rows: 100, hidden: 2064, first_row: 50, ids: 2000 })
        + tokens::check_embedding(client, TableShape { rows: 9, hidden: 64, first_row: 0, ids: 5 })
        + gpt::check_gelu(client, 10_008, false)
        + gpt::check_gelu(client, 10_008, true)
        + gpt::check_layer_norm(client, 700, 1024)
        + gpt::check_layer_norm(client, 33, 5000)
        + gpt::check_layer_norm(client, 5, 8192)
        + gpt::check_dropout(client, 37, 2056)
        + check_adamw(client)
        + check_flat(client);

    // Several times the L2 cache each.
    let (rows, half) = (8192, 14336);
    let pattern = random(1 << 20, 9);
    let repeat = |elements: usize| pattern.iter().copied().cycle().take(elements);
    let big = |elements: usize| {
        client.create_from_slice(&repeat(elements).flat_map(|v| bf16::from_f64(v).to_le_bytes()).collect::<Vec<_>>())
    };
    let (x, y) = (big(rows * 2 * half), big(rows * half));
    let dx = big(rows * 2 * half);
    let name = |what: &str, a: usize, b: usize| format!("{what} {a} × {b}");
    time(client, &name("swiglu", rows, half), rows * half * 6, || {
        swiglu::forward::<bf16>(client, &x, &y, rows, half).expect("legal")
    });
    time(client, &name("swiglu gradient", rows, half), rows * half * 10, || {
        swiglu::backward::<bf16>(client, &x, &y, &dx, rows, half).expect("legal")
    });
    for (rows, columns) in [(65536, 2048), (32768, 4096), (16384, 8192)] {
        let (w, dw) = (big(columns), poisoned(client, columns * 4));
        let slope = big(rows * columns);
        time(client, &name("rms norm", rows, columns), rows * columns * 4, || {
            rms_norm::forward::<bf16>(client, (&x, &w), &dx, EPS as f32, rows, columns).expect("legal")
        });
        time(client, &name("rms norm gradient", rows, columns), rows * columns * 6, || {
            rms_norm::backward::<bf16>(client, (&x, &w), &slope, (&dx, &dw), EPS as f32, rows, columns).expect("legal")
        });
    }
    tokens::time_all(client, big);
    gpt::time_all(client, big);
    let len = 1 << 28;
    // No negative second moments.
    let state =
        || client.create_from_slice(&repeat(len).flat_map(|v| (v.abs() as f32).to_le_bytes()).collect::<Vec<_>>());
    let (master, first, second, gradient) = (state(), state(), state(), state());
    let tensors = 256u32;
    let ends: Vec<u8> = (1..=tensors).flat_map(|i| (i * (len as u32 / tensors)).to_le_bytes()).collect();
    let weight = client.empty(2 * len);
    let decays: Vec<u8> = (0..tensors).flat_map(|i| (i % 2).to_le_bytes()).collect();
    let bucket = AdamWBucket {
        master: &master,
        first: &first,
        second: &second,
        gradient: &gradient,
        weight: Some((&weight, FloatType::Bf16)),
        ends: &client.create_from_slice(&ends),
        decays: &client.create_from_slice(&decays),
        tensors: tensors as usize,
        len,
    };
    time(client, &format!("adamw {len} parameters in {tensors} tensors"), 30 * len, || {
        adamw::step(client, bucket, &STEP).expect("legal")
    });
    assert_eq!(failures, 0, "{failures} results are further from the reference than they may be");
}
