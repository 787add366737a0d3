//! The operations and the sizes they are checked in.

mod attention;
mod sums;

use std::sync::Arc;

use backend_dist::comm::Group;
use backend_dist::ops::moe::grouped_linear;
use backend_dist::ops::{
    AttentionOptions, DropoutMask, GeluKind, LinearOptions, PackedHeads, PassContext, Prologue, Residual, Rms,
    add_bias, dropout, embedding, geglu, gelu, layer_norm, linear, linear_with, rms_norm, rope_packed, squared_relu,
    swiglu, vocab_parallel_cross_entropy,
};
use burn::tensor::{Int, Tensor};

pub use attention::attention_forms;
use attention::attentions;

use super::{Side, numbers};

/// Large enough that a norm's gradient keeps digits in 16 bits.
const EPS: f64 = 1e-5;

/// Sizes of a model's layer on one rank.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub seq: usize,
    pub batch: usize,
    pub hidden: usize,
    pub heads: PackedHeads,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
}

impl Scale {
    /// Nothing divides anything.
    pub const ODD: Self = Self {
        seq: 13,
        batch: 3,
        hidden: 37,
        heads: PackedHeads { heads: 6, kv_heads: 2 },
        head_dim: 10,
        ffn: 23,
        vocab: 101,
    };
    /// Sizes of the fast kernels, with ends that do not fill their tiles.
    pub const SMALL: Self = Self {
        seq: 200,
        batch: 2,
        hidden: 512,
        heads: PackedHeads { heads: 4, kv_heads: 2 },
        head_dim: 64,
        ffn: 320,
        vocab: 1000,
    };
    /// Llama-3-8B, split over 8 ranks; a part of the sequence and of the vocabulary.
    pub const LLAMA_8B: Self = Self {
        seq: 512,
        batch: 1,
        hidden: 4096,
        heads: PackedHeads { heads: 4, kv_heads: 1 },
        head_dim: 128,
        ffn: 1792,
        vocab: 4008,
    };

    /// Positions of a micro-batch.
    pub fn tokens(&self) -> usize {
        self.seq * self.batch
    }

    /// Ids of which some are not in `first_row..first_row + vocab`.
    pub fn ids(&self, first_row: usize) -> Vec<i64> {
        let ids = numbers(self.tokens(), 77).into_iter();
        ids.map(|x| first_row as i64 - 2 + ((x + 1.0) * 0.5 * (self.vocab + 4) as f64) as i64).collect()
    }
}

type Run = Box<dyn Fn(&Side, &[Tensor<1>]) -> Tensor<1>>;

/// An operation on flat inputs, with a flat output.
pub struct Case {
    pub name: &'static str,
    pub shape: String,
    /// Name and number of elements of each input that has a gradient.
    pub inputs: Vec<(&'static str, usize)>,
    /// Number of consecutive roundings of a result to the type of the inputs.
    pub roundings: u32,
    /// Error of a function that is itself an approximation.
    pub floor: f64,
    pub run: Run,
}

fn case(
    name: &'static str,
    shape: String,
    roundings: u32,
    inputs: &[(&'static str, usize)],
    run: impl Fn(&Side, &[Tensor<1>]) -> Tensor<1> + 'static,
) -> Case {
    Case { name, shape, inputs: inputs.to_vec(), roundings, floor: 0.0, run: Box::new(run) }
}

fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.flatten(0, D - 1)
}

/// Cosines and sines of some angles.
fn angles(side: &Side, shape: [usize; 2]) -> [Tensor<2>; 2] {
    let angles = numbers(shape[0] * shape[1], 50).into_iter().map(|x| 3.0 * x);
    let side = |f: fn(f64) -> f64| side.tensor(angles.clone().map(f).collect(), shape);
    [side(f64::cos), side(f64::sin)]
}

/// Every operation once.
pub fn cases(scale: &Scale) -> Vec<Case> {
    let mut all = gemms(scale);
    all.extend(rows(scale));
    all.extend(residual_streams(scale));
    all.extend(attentions(scale));
    all.extend(vocabulary(scale));
    all.extend(sums::sums(scale));
    all
}

/// Linear layers, with everything that may stand in front of them.
fn gemms(scale: &Scale) -> Vec<Case> {
    let Scale { seq, batch, hidden, heads, head_dim, ffn, .. } = *scale;
    let tokens = scale.tokens();
    let shape = |width: usize, inner: usize| format!("[{seq}, {batch}, {width}] · [{ffn}, {inner}]ᵀ");
    let with = |name, width: usize, inner: usize, prologue: fn() -> Prologue| {
        let inputs = [("x", tokens * width), ("w", ffn * inner)];
        case(name, shape(width, inner), 3, &inputs, move |_, x| {
            let (input, w) = (x[0].clone().reshape([seq, batch, width]), x[1].clone().reshape([ffn, inner]));
            flat(linear_with(input, prologue(), w, None, LinearOptions { recompute: true, ..Default::default() }))
        })
    };
    let mut found = vec![
        with("linear_with swiglu", 2 * hidden, hidden, || Prologue::SwiGlu),
        with("linear_with gelu", hidden, hidden, || Prologue::Gelu(GeluKind::Tanh)),
        with("linear_with nothing", hidden, hidden, || Prologue::None),
    ];
    let inputs = [("x", tokens * hidden), ("w", ffn * hidden)];
    found.push(case("linear", shape(hidden, hidden), 1, &inputs, move |_, x| {
        flat(linear(x[0].clone().reshape([seq, batch, hidden]), x[1].clone().reshape([ffn, hidden])))
    }));
    // A slice of each matrix row, and permuted dimensions: neither is contiguous.
    let inputs = [("x", tokens * (hidden + 8)), ("w", ffn * hidden)];
    found.push(case("linear of views", shape(hidden, hidden), 1, &inputs, move |_, x| {
        let input: Tensor<3> = x[0].clone().reshape([batch, seq, hidden + 8]).swap_dims(0, 1);
        let w: Tensor<2> = x[1].clone().reshape([hidden, ffn]).transpose();
        flat(linear(input.narrow(2, 8, hidden), w))
    }));
    for recompute in [false, true] {
        let inputs = [("x", tokens * hidden), ("w", ffn * hidden), ("weight", hidden)];
        let name = if recompute { "linear_with rms_norm, recomputed" } else { "linear_with rms_norm" };
        found.push(case(name, shape(hidden, hidden), 3, &inputs, move |_, x| {
            let (input, w) = (x[0].clone().reshape([seq, batch, hidden]), x[1].clone().reshape([ffn, hidden]));
            let prologue = Prologue::RmsNorm { weight: x[2].clone(), rms: EPS.into() };
            flat(linear_with(input, prologue, w, None, LinearOptions { recompute, ..Default::default() }))
        }));
        let width = heads.total() * head_dim;
        let inner = heads.heads * head_dim;
        let inputs = [("qkv", tokens * width), ("w", ffn * inner)];
        let name = if recompute { "linear_with attention, recomputed" } else { "linear_with attention" };
        found.push(case(name, shape(width, inner), 4, &inputs, move |_, x| {
            let input: Tensor<4> = x[0].clone().reshape([seq, batch, heads.total(), head_dim]);
            let prologue = Prologue::Attention(heads, AttentionOptions::causal(head_dim));
            flat(linear_with(
                input,
                prologue,
                x[1].clone().reshape([ffn, inner]),
                None,
                LinearOptions { recompute, ..Default::default() },
            ))
        }));
    }
    let inputs = [("x", tokens * hidden), ("w", ffn * hidden), ("weight", hidden), ("bias", hidden)];
    found.push(case("linear_with layer_norm", shape(hidden, hidden), 3, &inputs, move |_, x| {
        let (input, w) = (x[0].clone().reshape([seq, batch, hidden]), x[1].clone().reshape([ffn, hidden]));
        let prologue = Prologue::LayerNorm { weight: x[2].clone(), bias: x[3].clone(), eps: EPS };
        flat(linear_with(input, prologue, w, None, LinearOptions::default()))
    }));
    let inputs = [("x", tokens * hidden), ("w", ffn * hidden), ("bias", ffn)];
    found.push(case("linear_with a bias", shape(hidden, hidden), 3, &inputs, move |_, x| {
        let (input, w) = (x[0].clone().reshape([seq, batch, hidden]), x[1].clone().reshape([ffn, hidden]));
        flat(linear_with(input, Prologue::None, w, Some(x[2].clone()), LinearOptions::default()))
    }));
    // Groups that fill tiles of a GPU, and groups that do not; one of each is empty.
    for (name, counts) in [("grouped_linear", [128, 0, 256, 128]), ("grouped_linear, odd groups", [13, 0, 1, 40])] {
        let (rows, counts): (usize, Arc<[usize]>) = (counts.iter().sum(), Arc::from(counts));
        let inputs = [("x", rows * hidden), ("w", 4 * ffn * hidden)];
        let shape = format!("{counts:?} tokens of {hidden} · 4 [{ffn}, {hidden}]ᵀ");
        found.push(case(name, shape, 1, &inputs, move |_, x| {
            let (input, w) = (x[0].clone().reshape([rows, hidden]), x[1].clone().reshape([4 * ffn, hidden]));
            flat(grouped_linear(input, w, &counts, &PassContext::default()))
        }));
    }
    found
}

/// Operations on one matrix row, or one element, at a time.
fn rows(scale: &Scale) -> Vec<Case> {
    let Scale { seq, batch, hidden, heads, head_dim, .. } = *scale;
    let tokens = scale.tokens();
    let shape = |width: usize| format!("[{seq}, {batch}, {width}]");
    let norm = [("x", tokens * hidden), ("weight", hidden), ("bias", hidden)];
    let turned = heads.heads + heads.kv_heads;
    let packed = [("x", tokens * heads.total() * head_dim)];
    let packed_shape = format!("[{seq}, {batch}, {}, {head_dim}], {turned} heads", heads.total());
    vec![
        case("rms_norm", shape(hidden), 1, &norm[..2], move |_, x| {
            flat(rms_norm(x[0].clone().reshape([seq, batch, hidden]), x[1].clone(), EPS))
        }),
        case("rms_norm of 1 + weight", shape(hidden), 1, &norm[..2], move |_, x| {
            flat(rms_norm(x[0].clone().reshape([seq, batch, hidden]), x[1].clone(), Rms { eps: EPS, plus_one: true }))
        }),
        case("layer_norm", shape(hidden), 1, &norm, move |_, x| {
            flat(layer_norm(x[0].clone().reshape([seq, batch, hidden]), x[1].clone(), x[2].clone(), EPS))
        }),
        case("add_bias", shape(hidden), 2, &[("x", tokens * hidden), ("bias", hidden)], move |_, x| {
            flat(add_bias(x[0].clone().reshape([seq, batch, hidden]), x[1].clone()))
        }),
        case("swiglu", shape(2 * hidden), 1, &[("x", 2 * tokens * hidden)], move |_, x| {
            flat(swiglu(x[0].clone().reshape([seq, batch, 2 * hidden])))
        }),
        case("geglu tanh", shape(2 * hidden), 1, &[("x", 2 * tokens * hidden)], move |_, x| {
            flat(geglu(x[0].clone().reshape([seq, batch, 2 * hidden]), GeluKind::Tanh))
        }),
        case("gelu tanh", shape(hidden), 1, &[("x", tokens * hidden)], |_, x| gelu(x[0].clone(), GeluKind::Tanh)),
        case("squared relu", shape(hidden), 1, &[("x", tokens * hidden)], |_, x| squared_relu(x[0].clone())),
        // CubeCL's erf is a polynomial of seven digits.
        Case {
            floor: 1e-6,
            ..case("gelu erf", shape(hidden), 1, &[("x", tokens * hidden)], |_, x| gelu(x[0].clone(), GeluKind::Erf))
        },
        case("rope_packed", packed_shape, 1, &packed, move |side, x| {
            let [cos, sin] = angles(side, [seq, head_dim / 2]);
            let input: Tensor<4> = x[0].clone().reshape([seq, batch, heads.total(), head_dim]);
            flat(rope_packed(input, cos, sin, turned))
        }),
        case("dropout", shape(hidden), 1, &[("x", tokens * hidden)], move |_, x| {
            flat(dropout(x[0].clone().reshape([seq, batch, hidden]), 0.1, DropoutMask::new(7)))
        }),
    ]
}

/// Sums together with norms of them, and the gradients that meet there: `s + norm(s)` and `s + norm(s) · wᵀ` of `s =
/// x + a`.
fn residual_streams(scale: &Scale) -> Vec<Case> {
    let Scale { seq, batch, hidden, .. } = *scale;
    let tokens = scale.tokens();
    let shape = format!("[{seq}, {batch}, {hidden}]");
    let inputs = [("x", tokens * hidden), ("a", tokens * hidden), ("weight", hidden), ("bias", hidden)];
    let stream = move |x: &[Tensor<1>], norm: Prologue| {
        let [x, a] = [0, 1].map(|i: usize| x[i].clone().reshape([seq, batch, hidden]));
        Residual::enter(x, &PassContext::default()).plus(a, norm)
    };
    let rms = |x: &[Tensor<1>]| Prologue::RmsNorm { weight: x[2].clone(), rms: EPS.into() };
    let layer = |x: &[Tensor<1>]| Prologue::LayerNorm { weight: x[2].clone(), bias: x[3].clone(), eps: EPS };
    let mut found = vec![
        case("residual rms_norm", shape.clone(), 4, &inputs[..3], move |_, x| {
            let stream = stream(x, rms(x));
            flat(stream.clone().leave(stream.norm(rms(x))))
        }),
        case("residual layer_norm", shape.clone(), 4, &inputs, move |_, x| {
            let stream = stream(x, layer(x));
            flat(stream.clone().leave(stream.norm(layer(x))))
        }),
    ];
    let inputs = [inputs[0], inputs[1], inputs[2], ("w", hidden * hidden)];
    found.push(case("residual linear rms_norm", shape, 4, &inputs, move |_, x| {
        let (stream, w) = (stream(x, rms(x)), x[3].clone().reshape([hidden, hidden]));
        flat(stream.clone().leave(stream.linear(rms(x), w, None, LinearOptions::default())))
    }));
    found
}

/// What knows the vocabulary: columns from 7 on, the last two padding.
fn vocabulary(scale: &Scale) -> Vec<Case> {
    let scale @ Scale { seq, batch, hidden, vocab, .. } = *scale;
    let (tokens, first_row) = (scale.tokens(), 7);
    let ids = move |side: &Side| -> Tensor<2, Int> { side.ids(scale.ids(first_row), [seq, batch]) };
    let table = format!("[{vocab}, {hidden}], ids [{seq}, {batch}]");
    vec![
        case("embedding", table, 1, &[("w", vocab * hidden)], move |side, x| {
            flat(embedding(x[0].clone().reshape([vocab, hidden]), ids(side), first_row))
        }),
        case(
            "vocab_parallel_cross_entropy",
            format!("[{seq}, {batch}, {vocab}]"),
            1,
            &[("logits", tokens * vocab)],
            move |side, x| {
                let logits = x[0].clone().reshape([seq, batch, vocab]);
                let end = first_row + vocab - 2;
                flat(vocab_parallel_cross_entropy(logits, ids(side), first_row, end, &Group::single()))
            },
        ),
    ]
}
