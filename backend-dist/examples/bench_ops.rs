//! Times every local operation against the same formula in plain Burn, at the sizes of a character-level GPT.
//!
//! `cargo run --release --example bench_ops -- [sequence batch width heads] [operation..]`
//!
//! Each time is the least of many runs, in microseconds: forward, backward, and both in plain Burn with Burn's autodiff.

use std::time::Instant;

use backend_dist::comm::Group;
use backend_dist::ops::{
    AttentionOptions, DropKey, GeluKind, PackedHeads, attention_packed, dropout, embedding, gelu, layer_norm, linear,
    rms_norm, rope, swiglu, vocab_parallel_cross_entropy,
};
use burn::tensor::{Bool, Device, Distribution, Int, Tensor, TensorData, activation};

/// Least time of `f` in microseconds.
fn least(mut f: impl FnMut() -> f64) -> f64 {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    for i in 0.. {
        best = best.min(f());
        if i > 5 && start.elapsed().as_millis() > 300 {
            break;
        }
    }
    best
}

/// Times forward and backward of `f` on fresh graphs.
fn times(f: &dyn Fn() -> Tensor<1>) -> [f64; 2] {
    let forward = least(|| {
        let start = Instant::now();
        let out = f();
        let time = start.elapsed().as_secs_f64() * 1e6;
        drop(out);
        time
    });
    let backward = least(|| {
        let out = f();
        let start = Instant::now();
        drop(out.backward());
        start.elapsed().as_secs_f64() * 1e6
    });
    [forward, backward]
}

fn row(name: &str, shape: String, fused: &dyn Fn() -> Tensor<1>, plain: &dyn Fn() -> Tensor<1>) {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| a.parse::<usize>().is_err()).collect();
    if !wanted.is_empty() && !wanted.iter().any(|w| name.contains(w.as_str())) {
        return;
    }
    let ([forward, backward], [plain_forward, plain_backward]) = (times(fused), times(plain));
    let plain = plain_forward + plain_backward;
    println!("| {name} | {shape} | {forward:.0} | {backward:.0} | {plain:.0} |");
}

/// A flat view, so that every operation has the same type; free for a dense tensor.
fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let n = x.dims().iter().product::<usize>();
    x.reshape([n])
}

fn main() {
    let args: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let [s, b, h, heads] = if args.is_empty() { [64, 12, 128, 4] } else { args.try_into().expect("four sizes") };
    let (d, vocab) = (h / heads, 65);
    let device = Device::flex().autodiff();
    let random = |shape: &[usize]| -> Tensor<1> {
        Tensor::random([shape.iter().product::<usize>()], Distribution::Normal(0.0, 1.0), &device)
    };
    let x = random(&[s, b, h]).reshape([s, b, h]).require_grad();
    let four = random(&[s, b, 4 * h]).reshape([s, b, 4 * h]).require_grad();
    let norm_w = random(&[h]).require_grad();
    let norm_b = random(&[h]).require_grad();

    println!("| operation | shape | forward µs | backward µs | plain Burn, both µs |");
    println!("|---|---|---|---|---|");

    for (input, out) in [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h), (h, vocab)] {
        let x = if input == h { x.clone() } else { four.clone() };
        let w: Tensor<2> = random(&[out, input]).reshape([out, input]).require_grad();
        let plain = || flat(x.clone().reshape([s * b, input]).matmul(w.clone().transpose()));
        let shape = format!("[{s}, {b}, {input}] to {out}");
        row("linear", shape, &|| flat(linear(x.clone(), w.clone())), &plain);
    }

    let shape = format!("[{s}, {b}, {h}]");
    let eps = 1e-5;
    row("rms_norm", shape.clone(), &|| flat(rms_norm(x.clone(), norm_w.clone(), eps)), &|| {
        let scale = (x.clone().powi_scalar(2).mean_dim(2) + eps).sqrt();
        flat(x.clone() / scale * norm_w.clone().reshape([1, 1, h]))
    });
    row("layer_norm", shape.clone(), &|| flat(layer_norm(x.clone(), norm_w.clone(), norm_b.clone(), eps)), &|| {
        let x = x.clone() - x.clone().mean_dim(2);
        let scale = (x.clone().powi_scalar(2).mean_dim(2) + eps).sqrt();
        flat(x / scale * norm_w.clone().reshape([1, 1, h]) + norm_b.clone().reshape([1, 1, h]))
    });

    let wide = format!("[{s}, {b}, {}]", 4 * h);
    row("gelu erf", wide.clone(), &|| flat(gelu(four.clone(), GeluKind::Erf)), &|| {
        flat(activation::gelu(four.clone()))
    });
    row("gelu tanh", wide.clone(), &|| flat(gelu(four.clone(), GeluKind::Tanh)), &|| {
        flat(activation::gelu_approximate(four.clone()))
    });
    row("swiglu", wide, &|| flat(swiglu(four.clone())), &|| {
        let gate = activation::silu(four.clone().narrow(2, 0, 2 * h));
        flat(gate * four.clone().narrow(2, 2 * h, 2 * h))
    });

    let q = random(&[s, b, h]).reshape([s, b, heads, d]).require_grad();
    let angle = random(&[s, d / 2]).reshape([s, d / 2]);
    let (cos, sin) = (angle.clone().cos(), angle.sin());
    row("rope", format!("[{s}, {b}, {heads}, {d}]"), &|| flat(rope(q.clone(), cos.clone(), sin.clone())), &|| {
        let [cos, sin] = [&cos, &sin].map(|t| t.clone().reshape([s, 1, 1, d / 2]));
        let (a, b) = (q.clone().narrow(3, 0, d / 2), q.clone().narrow(3, d / 2, d / 2));
        flat(Tensor::cat(vec![a.clone() * cos.clone() - b.clone() * sin.clone(), b * cos + a * sin], 3))
    });

    let packed = PackedHeads { heads, kv_heads: heads };
    let qkv = random(&[s, b, 3 * h]).reshape([s, b, 3 * heads, d]).require_grad();
    let options = AttentionOptions::causal(d);
    let hidden: Vec<bool> = (0..s * s).map(|i| i % s > i / s).collect();
    let hidden: Tensor<4, Bool> = Tensor::from_data(TensorData::new(hidden, [1, 1, s, s]), &device);
    row(
        "attention",
        format!("[{s}, {b}, 3·{heads}, {d}]"),
        &|| flat(attention_packed(qkv.clone(), packed, options)),
        &|| {
            let [q, k, v] = [0, 1, 2].map(|i| qkv.clone().narrow(2, i * heads, heads).permute([1, 2, 0, 3]));
            let scores = q.matmul(k.swap_dims(2, 3)) * options.scale;
            let scores = scores.mask_fill(hidden.clone().expand([b, heads, s, s]), -1e30);
            let out: Tensor<4> = activation::softmax(scores, 3).matmul(v);
            flat(out.permute([2, 0, 1, 3]))
        },
    );

    let table: Tensor<2> = random(&[vocab, h]).reshape([vocab, h]).require_grad();
    let ids: Vec<i64> = (0..s * b).map(|i| (i * 7 % vocab) as i64).collect();
    let ids: Tensor<2, Int> = Tensor::from_data(TensorData::new(ids, [s, b]), &device);
    row(
        "embedding",
        format!("[{vocab}, {h}] by [{s}, {b}]"),
        &|| flat(embedding(table.clone(), ids.clone(), 0)),
        &|| flat(table.clone().select(0, ids.clone().reshape([s * b]))),
    );

    let logits = random(&[s, b, vocab]).reshape([s, b, vocab]).require_grad();
    let group = Group::single();
    row(
        "cross-entropy",
        format!("[{s}, {b}, {vocab}]"),
        &|| flat(vocab_parallel_cross_entropy(logits.clone(), ids.clone(), 0, vocab, &group)),
        &|| {
            let index: Tensor<3, Int> = ids.clone().reshape([s, b, 1]);
            flat(-activation::log_softmax(logits.clone(), 2).gather(2, index))
        },
    );
    row("dropout", shape, &|| flat(dropout(x.clone(), 0.1, DropKey::new(1))), &|| {
        let mask = Tensor::<3>::random([s, b, h], Distribution::Bernoulli(0.9), &device);
        flat(x.clone() * mask / 0.9)
    });
}
