//! The sizes of Llama 3 8B with 8192 tokens. Bytes are those that must be moved: every input read and every output
//! written once.
use super::bandwidths::Bandwidths;
use half::bf16;
use kernels_cubecl::fp8::Format;
use kernels_cubecl::pointwise::activation::{self, Activation};
use kernels_cubecl::pointwise::cross_entropy::{self, LogitsShape};
use kernels_cubecl::pointwise::dropout::{self, Drop};
use kernels_cubecl::pointwise::embedding::{self, TableShape};
use kernels_cubecl::pointwise::flat::{self, CHUNK, Copies, FloatType, Run};
use kernels_cubecl::pointwise::gated::{self, Gating};
use kernels_cubecl::pointwise::head_norms::{self, HeadsShape};
use kernels_cubecl::pointwise::low_rank::{self, LowRank};
use kernels_cubecl::pointwise::low_rank_gradients::{self, ForFp8, LowRankGradients, OfWeight};
use kernels_cubecl::pointwise::low_rank_swiglu::{self, GateAndUp, Left};
use kernels_cubecl::pointwise::norm::{self, Affine, Gradients, NormShape};
use kernels_cubecl::pointwise::rope::{self, RopeShape};
use kernels_cubecl::pointwise::{accumulate::accumulate, column_sum::column_sum, reduce_slices};
use std::collections::BTreeSet;

pub const TOKENS: usize = 8192;
const HIDDEN: usize = 4096;
const FFN: usize = 14_336;
pub const VOCABULARY: usize = 128_256;

pub fn activations(clock: &Bandwidths) {
    let half = |len| clock.half(len);
    let (len, both) = (TOKENS * FFN, 2 * TOKENS * FFN);
    let (x, y, dy, dx) = (half(both), half(len), half(len), half(both));
    for (gating, name) in [(Gating::Silu, "swiglu"), (Gating::GeluTanh, "geglu")] {
        clock.time(name, 6 * len, |client, i| {
            gated::forward::<bf16>(client, x.at(i), y.at(i), TOKENS, FFN, gating).expect("legal")
        });
        clock.time(&format!("{name} gradient"), 10 * len, |client, i| {
            gated::backward::<bf16>(client, [x.at(i), dy.at(i), dx.at(i)], TOKENS, FFN, gating).expect("legal")
        });
    }
    for (kind, name) in [(Activation::Gelu, "gelu"), (Activation::GeluTanh, "gelu tanh")] {
        clock.time(name, 4 * len, |client, i| {
            activation::forward::<bf16>(client, x.at(i), y.at(i), len, kind).expect("legal")
        });
        clock.time(&format!("{name} gradient"), 6 * len, |client, i| {
            activation::backward::<bf16>(client, [x.at(i), dy.at(i), dx.at(i)], len, kind).expect("legal")
        });
    }
    let keys = clock.integers([77; 2 * TOKENS]);
    let how = Drop { first_column: 0, limit: 1 << 29, scale: 1.25 };
    clock.time("dropout", 4 * len, |client, i| {
        dropout::apply::<bf16>(client, dy.at(i), keys.at(0), y.at(i), (TOKENS, FFN), how).expect("legal")
    });
}

/// Adapters of rank 16 of Llama 3 8B.
pub fn low_rank(clock: &Bandwidths) {
    let half = |len| clock.half(len);
    let (len, inner) = (TOKENS * FFN, 32);
    let (y, out, dout, dy) = (half(2 * len), half(len), half(len), half(2 * len));
    let (x, w) = (half(TOKENS * inner), half(2 * FFN * inner));
    for columns in [HIDDEN, 2 * FFN] {
        let sizes = LowRank { rows: TOKENS, columns, inner, transposed: true };
        clock.time("low rank", 4 * TOKENS * columns, |client, i| {
            low_rank::add::<bf16>(client, sizes, [x.at(i), w.at(i), y.at(i)]).expect("legal")
        });
    }
    let (inner, most) = (16, clock.empty(4));
    let sizes = GateAndUp { rows: TOKENS, half: FFN, inner, apart: true };
    clock.time("low rank swiglu", 6 * len, |client, i| {
        let tensors = [y.at(i), x.at(i), w.at(i), out.at(i)];
        low_rank_swiglu::forward::<bf16>(client, sizes, tensors, Some(most.at(0))).expect("legal")
    });
    clock.time("low rank swiglu gradient", 10 * len, |client, i| {
        let tensors = [y.at(i), x.at(i), w.at(i), dout.at(i), dy.at(i)];
        low_rank_swiglu::backward::<bf16>(client, sizes, tensors, None, Some(most.at(0))).expect("legal")
    });
    clock.time("low rank swiglu gradient of a sum", 10 * len, |client, i| {
        let tensors = [y.at(i), x.at(i), w.at(i), dout.at(i), dy.at(i)];
        let left = Left { inner, x: x.at(i), w: w.at(i) };
        low_rank_swiglu::backward::<bf16>(client, sizes, tensors, Some(left), Some(most.at(0))).expect("legal")
    });
    for (rows, columns, blocks) in [(TOKENS, HIDDEN, 1), (TOKENS, 2 * FFN, 2), (2 * TOKENS, 2 * FFN, 2)] {
        let sizes = LowRankGradients { rows, columns, inner, blocks };
        let [dy, x, w, dx] = [rows * columns, rows * inner * blocks, columns * inner, rows * inner * blocks].map(half);
        let dw = clock.empty(4 * columns * inner);
        let (scale, to) = (clock.empty(4), clock.empty(rows * columns));
        for cast in [false, true] {
            let bytes = rows * columns * if cast { 3 } else { 2 };
            clock.time(&format!("low rank gradients {rows} {columns} {blocks}, cast {cast}"), bytes, |client, i| {
                let for_fp8 = match cast {
                    false => ForFp8::Amax(most.at(0)),
                    true => ForFp8::Cast { scale: scale.at(0), to: to.at(i), format: Format::E5m2 },
                };
                let dw = OfWeight::Sum { sum: dw.at(i), add: true };
                let tensors = [dy.at(i), x.at(i), w.at(i), dx.at(i)];
                low_rank_gradients::gradients::<bf16>(client, sizes, tensors, dw, for_fp8).expect("legal")
            });
        }
    }
}

pub fn norms(clock: &Bandwidths) {
    for tokens in [TOKENS, 2 * TOKENS] {
        let len = tokens * HIDDEN;
        let half = |len| clock.half(len);
        let (x, y, dy, other, sum, w) = (half(len), half(len), half(len), half(len), half(len), half(HIDDEN));
        let (shape, sums) = (NormShape { rows: tokens, columns: HIDDEN }, clock.empty(8 * HIDDEN));
        for (is_rms, name) in [(true, "rms norm"), (false, "layer norm")] {
            let affine = || if is_rms { Affine::Rms(w.at(0)) } else { Affine::Layer(w.at(0), w.at(1)) };
            let name = |what: &str| format!("{name}{what}, {tokens} tokens");
            clock.time(&name(""), 4 * len, |client, i| {
                norm::forward::<bf16>(client, x.at(i), None, affine(), y.at(i), 1e-5, shape).expect("legal")
            });
            clock.time(&name(" with sum"), 8 * len, |client, i| {
                let adds = Some((other.at(i), sum.at(i)));
                norm::forward::<bf16>(client, x.at(i), adds, affine(), y.at(i), 1e-5, shape).expect("legal")
            });
            for (what, adds) in [(" gradient", false), (" gradient with sum", true)] {
                clock.time(&name(what), if adds { 8 } else { 6 } * len, |client, i| {
                    let adds = adds.then_some(other.at(i));
                    let targets = Gradients { x: y.at(i), affine: sums.at(0) };
                    norm::backward::<bf16>(client, x.at(i), affine(), dy.at(i), adds, targets, 1e-5, shape)
                        .expect("legal")
                });
            }
        }
        clock.time(&format!("column sum, {tokens} tokens"), 2 * len, |client, i| {
            column_sum::<bf16>(client, x.at(i), sums.at(0), tokens, HIDDEN).expect("legal")
        });
    }
    let packed = HeadsShape { tokens: TOKENS, heads: 32, kv_heads: 4, all_heads: 40, head_dim: 128 };
    let len = TOKENS * 40 * 128;
    let half = |len| clock.half(len);
    let (x, y, dy, w, sums) = (half(len), half(len), half(len), half(128), clock.empty(8 * 128));
    let weights = || [w.at(0), w.at(1)];
    clock.time("head norms, head_dim 128", 4 * len, |client, i| {
        head_norms::forward::<bf16>(client, x.at(i), weights(), y.at(i), (1e-5, false), packed).expect("legal")
    });
    clock.time("head norms, head_dim 128, gradients", 6 * len, |client, i| {
        let targets = [y.at(i), sums.at(0)];
        head_norms::backward::<bf16>(client, x.at(i), weights(), dy.at(i), targets, (1e-5, false), packed)
            .expect("legal")
    });
    let shape = RopeShape { rows: TOKENS, batch: 1, heads: 40, all_heads: 48, head_dim: 128, rotated: 128 };
    let latent = RopeShape { heads: 128, all_heads: 128, head_dim: 192, rotated: 64, ..shape };
    for (name, shape, back) in
        [("rope", shape, false), ("rope gradient", shape, true), ("rope of 64 of 192 features", latent, false)]
    {
        let len = TOKENS * shape.all_heads * shape.head_dim;
        let [x, out, angles] = [len, len, TOKENS * shape.rotated / 2].map(|len| clock.half(len));
        let angles = || (angles.at(0), angles.at(1));
        clock.time(name, 4 * len, |client, i| {
            rope::apply::<bf16>(client, x.at(i), angles(), Some(out.at(i)), shape, back).expect("legal")
        });
        let moved = 4 * TOKENS * shape.heads * shape.rotated;
        clock.time(&format!("{name} in place"), moved, |client, i| {
            rope::apply::<bf16>(client, x.at(i), angles(), None, shape, back).expect("legal")
        });
    }
}

/// Ids that are all different, in no order.
pub fn even_ids(tokens: usize) -> Vec<usize> {
    (0..tokens).map(|token| token * 7919 % 20_000).collect()
}

/// The logarithms of these ids are spread evenly, so that the frequency of an id falls as 1 / id.
pub fn zipf_ids(tokens: usize) -> Vec<usize> {
    let id = |token: usize| (VOCABULARY as f64).powf((token * 7919 % tokens) as f64 / tokens as f64) as usize - 1;
    (0..tokens).map(id).collect()
}

/// What the gradient of an embedding moves: rows in bf16 are read, those of the fp32 sum that have tokens read and
/// written.
pub fn gradient_bytes(ids: &[usize], hidden: usize) -> usize {
    2 * ids.len() * hidden + 8 * hidden * ids.iter().collect::<BTreeSet<_>>().len()
}

pub fn tokens(clock: &Bandwidths) {
    let len = TOKENS * VOCABULARY;
    let logits = clock.half(len);
    let shape = LogitsShape { rows: TOKENS, columns: VOCABULARY, valid: VOCABULARY, first_row: 0 };
    let (even, zipf) = (even_ids(TOKENS), zipf_ids(TOKENS));
    let labels = clock.integers(even.clone());
    let (top, sums) = (clock.integers([12f32.to_bits() as usize; TOKENS]), clock.empty(8 * TOKENS));
    clock.time("logits maximum", 2 * len, |client, i| {
        cross_entropy::maximum::<bf16>(client, logits.at(i), sums.at(0), shape).expect("legal")
    });
    for (name, find) in [("logits sums", false), ("logits maximum and sums at once", true)] {
        clock.time(name, 2 * len, |client, i| {
            let statistics = (top.at(0), sums.at(0));
            cross_entropy::sums::<bf16>(client, logits.at(i), labels.at(0), statistics, shape, find).expect("legal")
        });
    }
    clock.time("logits gradient", 4 * len, |client, i| {
        let statistics = (top.at(0), top.at(0));
        cross_entropy::logits_gradient::<bf16>(client, logits.at(i), statistics, labels.at(0), None, shape)
            .expect("legal")
    });

    let shape = TableShape { rows: VOCABULARY, hidden: HIDDEN, first_row: 0, ids: TOKENS };
    let table = clock.half(VOCABULARY * HIDDEN);
    let (out, sum) = (clock.half(TOKENS * HIDDEN), clock.wide(VOCABULARY * HIDDEN));
    clock.time("embedding", 4 * TOKENS * HIDDEN, |client, i| {
        embedding::forward(client, table.at(i), labels.at(0), out.at(i), shape, 2).expect("legal")
    });
    for (name, ids) in [("embedding gradient, equally frequent ids", even), ("embedding gradient, Zipf's ids", zipf)] {
        let (bytes, ids) = (gradient_bytes(&ids, HIDDEN), clock.integers(ids));
        clock.time(name, bytes, |client, i| {
            embedding::backward::<bf16, f32>(client, out.at(i), ids.at(0), sum.at(i), shape, true).expect("legal")
        });
    }
}

pub fn runs(clock: &Bandwidths) {
    let len = HIDDEN * FFN;
    let (narrow, wide) = (clock.half(len), clock.wide(len));
    clock.time("accumulate bf16 in fp32", 10 * len, |client, i| {
        accumulate::<bf16>(client, narrow.at(i), wide.at(i), len, true).expect("legal")
    });
    let small = |i| Run { handle: narrow.at(i), float: FloatType::Bf16, start: 0, len };
    let large = |i| Run { handle: wide.at(i), float: FloatType::F32, start: 0, len };
    clock
        .time("cast fp32 to bf16", 6 * len, |client, i| flat::write(client, large(i), small(i), false).expect("legal"));
    clock
        .time("cast bf16 to fp32", 6 * len, |client, i| flat::write(client, small(i), large(i), false).expect("legal"));
    let (own, slices) = (clock.half(len / 4), clock.half(len * 3 / 4));
    clock.time("sum of slices", 5 * len / 2, |client, i| {
        let buffers = [own.at(i), slices.at(i), narrow.at(i)];
        reduce_slices::sum::<bf16, f32>(client, buffers, 3, len / 4).expect("legal")
    });
    let (other, count) = (clock.wide(len), len / CHUNK);
    let starts = clock.integers((0..count).map(|chunk| chunk * CHUNK));
    let lens = clock.integers(std::iter::repeat_n(CHUNK, count));
    clock.time("copies of chunks", 8 * len, |client, i| {
        let copies = Copies { from: starts.at(0), to: starts.at(0), lens: lens.at(0), count, ends: [len; 2] };
        flat::copy(client, wide.at(i), other.at(i), copies).expect("legal")
    });
}
