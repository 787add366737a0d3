//! The sizes of Llama 3 8B with 8192 tokens. Bytes are those that must be moved: every input read and every output
//! written once.
use crate::checks::{upload, upload_i32, upload_u32};
use crate::clock::Clock;
use half::bf16;
use kernels_cubecl::pointwise::activation::{self, Activation};
use kernels_cubecl::pointwise::cross_entropy::{self, LogitsShape};
use kernels_cubecl::pointwise::dropout::{self, Drop};
use kernels_cubecl::pointwise::embedding::{self, TableShape};
use kernels_cubecl::pointwise::flat::{self, CHUNK, Copies, FloatType, Run};
use kernels_cubecl::pointwise::gated::{self, Gating};
use kernels_cubecl::pointwise::head_norms::{self, HeadsShape};
use kernels_cubecl::pointwise::low_rank::{self, LowRank};
use kernels_cubecl::pointwise::low_rank_swiglu::{self, Left};
use kernels_cubecl::pointwise::norm::{self, Affine, Gradients, NormShape};
use kernels_cubecl::pointwise::rope::{self, RopeShape};
use kernels_cubecl::pointwise::{accumulate::accumulate, column_sum::column_sum, reduce_slices};
use std::collections::BTreeSet;

pub const TOKENS: usize = 8192;
const HIDDEN: usize = 4096;
const FFN: usize = 14_336;
pub const VOCABULARY: usize = 128_256;

pub fn activations(clock: &mut Clock) {
    let names = [
        "swiglu",
        "swiglu gradient",
        "geglu",
        "geglu gradient",
        "gelu",
        "gelu gradient",
        "gelu tanh",
        "gelu tanh gradient",
        "dropout",
    ];
    if !clock.wants(&names) {
        return;
    }
    let client = clock.client;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (len, both) = (TOKENS * FFN, 2 * TOKENS * FFN);
    let (x, y, dy, dx) = (half(both), half(len), half(len), half(both));
    for (gating, names) in [(Gating::Silu, [names[0], names[1]]), (Gating::GeluTanh, [names[2], names[3]])] {
        clock.time(names[0], 6 * len, |i| {
            gated::forward::<bf16>(client, x.at(i), y.at(i), TOKENS, FFN, gating).expect("legal")
        });
        clock.time(names[1], 10 * len, |i| {
            gated::backward::<bf16>(client, [x.at(i), dy.at(i), dx.at(i)], TOKENS, FFN, gating).expect("legal")
        });
    }
    for (kind, names) in [(Activation::Gelu, [names[4], names[5]]), (Activation::GeluTanh, [names[6], names[7]])] {
        clock.time(names[0], 4 * len, |i| {
            activation::forward::<bf16>(client, x.at(i), y.at(i), len, kind).expect("legal")
        });
        clock.time(names[1], 6 * len, |i| {
            activation::backward::<bf16>(client, [x.at(i), dy.at(i), dx.at(i)], len, kind).expect("legal")
        });
    }
    let keys = upload_u32(client, &vec![77; 2 * TOKENS]);
    let how = Drop { first_column: 0, limit: 1 << 29, scale: 1.25 };
    clock.time(names[8], 4 * len, |i| {
        dropout::apply::<bf16>(client, dy.at(i), &keys, y.at(i), (TOKENS, FFN), how).expect("legal")
    });
}

/// Adapters of rank 16 of Llama 3 8B.
pub fn low_rank(clock: &mut Clock) {
    let names = ["low rank", "low rank swiglu", "low rank swiglu gradient", "low rank swiglu gradient of a sum"];
    if !clock.wants(&names) {
        return;
    }
    let client = clock.client;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (len, inner) = (TOKENS * FFN, 32);
    let (y, out, dout, dy) = (half(2 * len), half(len), half(len), half(2 * len));
    let (x, w) = (half(TOKENS * inner), half(2 * FFN * inner));
    for columns in [HIDDEN, 2 * FFN] {
        let sizes = LowRank { rows: TOKENS, columns, inner, transposed: true };
        clock.time(names[0], 4 * TOKENS * columns, |i| {
            low_rank::add::<bf16>(client, sizes, [x.at(i), w.at(i), y.at(i)]).expect("legal")
        });
    }
    let (sizes, most) = (LowRank { rows: TOKENS, columns: FFN, inner, transposed: true }, client.empty(4));
    clock.time(names[1], 6 * len, |i| {
        let tensors = [y.at(i), x.at(i), w.at(i), out.at(i)];
        low_rank_swiglu::forward::<bf16>(client, sizes, tensors, Some(&most)).expect("legal")
    });
    clock.time(names[2], 10 * len, |i| {
        let tensors = [y.at(i), x.at(i), w.at(i), dout.at(i), dy.at(i)];
        low_rank_swiglu::backward::<bf16>(client, sizes, tensors, None, Some(&most)).expect("legal")
    });
    clock.time(names[3], 10 * len, |i| {
        let tensors = [y.at(i), x.at(i), w.at(i), dout.at(i), dy.at(i)];
        let left = Left { inner: 16, x: x.at(i), w: w.at(i) };
        low_rank_swiglu::backward::<bf16>(client, sizes, tensors, Some(left), Some(&most)).expect("legal")
    });
}

pub fn norms(clock: &mut Clock) {
    let names =
        ["rms norm gradient with sum", "layer norm gradient with sum", "head norms", "column sum", "rope gradient"];
    if !clock.wants(&names) {
        return;
    }
    let client = clock.client;
    for tokens in [TOKENS, 2 * TOKENS] {
        let len = tokens * HIDDEN;
        let half = |len| clock.tensor(FloatType::Bf16, len);
        let (x, y, dy, other, sum, w) = (half(len), half(len), half(len), half(len), half(len), half(HIDDEN));
        let (shape, sums) = (NormShape { rows: tokens, columns: HIDDEN }, client.empty(8 * HIDDEN));
        for (affine, name) in [(Affine::Rms(w.at(0)), "rms norm"), (Affine::Layer(w.at(0), w.at(1)), "layer norm")] {
            let name = |what: &str| format!("{name}{what}, {tokens} tokens");
            clock.time(&name(""), 4 * len, |i| {
                norm::forward::<bf16>(client, x.at(i), None, affine, y.at(i), 1e-5, shape).expect("legal")
            });
            clock.time(&name(" with sum"), 8 * len, |i| {
                let adds = Some((other.at(i), sum.at(i)));
                norm::forward::<bf16>(client, x.at(i), adds, affine, y.at(i), 1e-5, shape).expect("legal")
            });
            for (what, adds) in [(" gradient", false), (" gradient with sum", true)] {
                clock.time(&name(what), if adds { 8 } else { 6 } * len, |i| {
                    let adds = adds.then_some(other.at(i));
                    let targets = Gradients { x: y.at(i), affine: &sums };
                    norm::backward::<bf16>(client, x.at(i), affine, dy.at(i), adds, targets, 1e-5, shape)
                        .expect("legal")
                });
            }
        }
        clock.time(&format!("column sum, {tokens} tokens"), 2 * len, |i| {
            column_sum::<bf16>(client, x.at(i), &sums, tokens, HIDDEN).expect("legal")
        });
    }
    let packed = HeadsShape { tokens: TOKENS, heads: 32, kv_heads: 4, all_heads: 40, head_dim: 128 };
    let len = TOKENS * 40 * 128;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (x, y, dy, w, sums) = (half(len), half(len), half(len), half(128), client.empty(8 * 128));
    let weights = [w.at(0), w.at(1)];
    clock.time("head norms, head_dim 128", 4 * len, |i| {
        head_norms::forward::<bf16>(client, x.at(i), weights, y.at(i), 1e-5, packed).expect("legal")
    });
    clock.time("head norms, head_dim 128, gradients", 6 * len, |i| {
        let targets = [y.at(i), &sums];
        head_norms::backward::<bf16>(client, x.at(i), weights, dy.at(i), targets, 1e-5, packed).expect("legal")
    });
    let shape = RopeShape { rows: TOKENS, batch: 1, heads: 40, all_heads: 48, head_dim: 128, rotated: 128 };
    let latent = RopeShape { heads: 128, all_heads: 128, head_dim: 192, rotated: 64, ..shape };
    for (name, shape, back) in
        [("rope", shape, false), ("rope gradient", shape, true), ("rope of 64 of 192 features", latent, false)]
    {
        let len = TOKENS * shape.all_heads * shape.head_dim;
        let [x, out, angles] = [len, len, TOKENS * shape.rotated / 2].map(|len| clock.tensor(FloatType::Bf16, len));
        let angles = (angles.at(0), angles.at(1));
        clock.time(name, 4 * len, |i| {
            rope::apply::<bf16>(client, x.at(i), angles, Some(out.at(i)), shape, back).expect("legal")
        });
        let moved = 4 * TOKENS * shape.heads * shape.rotated;
        clock.time(&format!("{name} in place"), moved, |i| {
            rope::apply::<bf16>(client, x.at(i), angles, None, shape, back).expect("legal")
        });
    }
}

/// Ids that are all different, in no order.
pub fn even_ids(tokens: usize) -> Vec<i32> {
    (0..tokens).map(|token| (token * 7919 % 20_000) as i32).collect()
}

/// The logarithms of these ids are spread evenly, so that the frequency of an id falls as 1 / id.
pub fn zipf_ids(tokens: usize) -> Vec<i32> {
    let id = |token: usize| (VOCABULARY as f64).powf((token * 7919 % tokens) as f64 / tokens as f64) as i32 - 1;
    (0..tokens).map(id).collect()
}

/// What the gradient of an embedding moves: rows in bf16 are read, those of the fp32 sum that have tokens read and
/// written.
pub fn gradient_bytes(ids: &[i32], hidden: usize) -> usize {
    2 * ids.len() * hidden + 8 * hidden * ids.iter().collect::<BTreeSet<_>>().len()
}

pub fn tokens(clock: &mut Clock) {
    let names = [
        "logits maximum",
        "logits sums",
        "logits maximum and sums at once",
        "logits gradient",
        "embedding",
        "embedding gradient, equally frequent ids",
        "embedding gradient, Zipf's ids",
    ];
    if !clock.wants(&names) {
        return;
    }
    let client = clock.client;
    let len = TOKENS * VOCABULARY;
    let logits = clock.tensor(FloatType::Bf16, len);
    let shape = LogitsShape { rows: TOKENS, columns: VOCABULARY, valid: VOCABULARY, first_row: 0 };
    let (even, zipf) = (even_ids(TOKENS), zipf_ids(TOKENS));
    let labels = upload_i32(client, &even);
    let (top, sums) = (upload::<f32>(client, &vec![12.0; TOKENS]), client.empty(8 * TOKENS));
    clock.time(names[0], 2 * len, |i| {
        cross_entropy::maximum::<bf16>(client, logits.at(i), &sums, shape).expect("legal")
    });
    for (name, find) in [(names[1], false), (names[2], true)] {
        clock.time(name, 2 * len, |i| {
            cross_entropy::sums::<bf16>(client, logits.at(i), &labels, (&top, &sums), shape, find).expect("legal")
        });
    }
    clock.time(names[3], 4 * len, |i| {
        let statistics = (&top, &top);
        cross_entropy::logits_gradient::<bf16>(client, logits.at(i), statistics, &labels, None, shape).expect("legal")
    });
    drop(logits);

    let shape = TableShape { rows: VOCABULARY, hidden: HIDDEN, first_row: 0, ids: TOKENS };
    let table = clock.tensor(FloatType::Bf16, VOCABULARY * HIDDEN);
    let (out, sum) =
        (clock.tensor(FloatType::Bf16, TOKENS * HIDDEN), clock.tensor(FloatType::F32, VOCABULARY * HIDDEN));
    clock.time(names[4], 4 * TOKENS * HIDDEN, |i| {
        embedding::forward(client, table.at(i), &labels, out.at(i), shape, 2).expect("legal")
    });
    for (name, ids) in [(names[5], &even), (names[6], &zipf)] {
        let (bytes, ids) = (gradient_bytes(ids, HIDDEN), upload_i32(client, ids));
        clock.time(name, bytes, |i| {
            embedding::backward::<bf16, f32>(client, out.at(i), &ids, sum.at(i), shape, true).expect("legal")
        });
    }
}

pub fn runs(clock: &mut Clock) {
    let names =
        ["accumulate bf16 in fp32", "cast fp32 to bf16", "cast bf16 to fp32", "copies of chunks", "sum of slices"];
    if !clock.wants(&names) {
        return;
    }
    let (client, len) = (clock.client, HIDDEN * FFN);
    let (narrow, wide) = (clock.tensor(FloatType::Bf16, len), clock.tensor(FloatType::F32, len));
    clock.time(names[0], 10 * len, |i| accumulate::<bf16>(client, narrow.at(i), wide.at(i), len, true).expect("legal"));
    let small = |i| Run { handle: narrow.at(i), float: FloatType::Bf16, start: 0, len };
    let large = |i| Run { handle: wide.at(i), float: FloatType::F32, start: 0, len };
    clock.time(names[1], 6 * len, |i| flat::write(client, large(i), small(i), false).expect("legal"));
    clock.time(names[2], 6 * len, |i| flat::write(client, small(i), large(i), false).expect("legal"));
    let (own, slices) = (clock.tensor(FloatType::Bf16, len / 4), clock.tensor(FloatType::Bf16, len * 3 / 4));
    clock.time(names[4], 5 * len / 2, |i| {
        let buffers = [own.at(i), slices.at(i), narrow.at(i)];
        reduce_slices::sum::<bf16, f32>(client, buffers, 3, len / 4).expect("legal")
    });
    let other = clock.tensor(FloatType::F32, len);
    let starts: Vec<u32> = (0..len).step_by(CHUNK).map(|start| start as u32).collect();
    let lens = upload_u32(client, &vec![CHUNK as u32; starts.len()]);
    let (count, starts) = (starts.len(), upload_u32(client, &starts));
    clock.time(names[3], 8 * len, |i| {
        let copies = Copies { from: &starts, to: &starts, lens: &lens, count, ends: [len; 2] };
        flat::copy(client, wide.at(i), other.at(i), copies).expect("legal")
    });
}
