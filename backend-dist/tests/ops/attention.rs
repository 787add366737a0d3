//! Attention against the whole score matrix.

use crate::compare::{same, values};
use backend_dist::ops::context::{attention_packed_with_sinks, attention_with_sinks};
use backend_dist::ops::{AttentionDropout, AttentionOptions, PackedHeads, PassContext, attention, attention_packed};
use burn::tensor::{Bool, DType, Device, Distribution, Tensor, TensorData, activation::softmax};

/// `[s, b, h, d]` to `[b, h, s, d]`, every head repeated `times` times.
fn heads(x: Tensor<4>, times: usize) -> Tensor<4> {
    let [s, b, h, d] = x.dims();
    let x: Tensor<5> = x.permute([1, 2, 0, 3]).reshape([b, h, 1, s, d]);
    x.repeat_dim(2, times).reshape([b, h * times, s, d])
}

fn plain(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<4> {
    plain_times(q, k, v, options, None)
}

/// `keep [b, hq, s, t]` multiplies the weights.
fn plain_times(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
    keep: Option<Tensor<4>>,
) -> Tensor<4> {
    let ([s, b, hq, _], d) = (q.dims(), v.dims()[3]);
    let [t, _, hkv, _] = k.dims();
    let group = hq / hkv;
    let scores = heads(q, 1).matmul(heads(k, group).swap_dims(2, 3)) * options.scale;
    let scores = match options.softcap {
        Some(cap) => (scores * cap.recip()).tanh() * cap,
        None => scores,
    };
    let hidden: Vec<bool> = (0..s * t)
        .map(|i| (t - s + i / t, i % t))
        .map(|(i, j)| options.causal && j > i || options.window.is_some_and(|w| i.abs_diff(j) >= w))
        .collect();
    let hidden = Tensor::<4, Bool>::from_data(TensorData::new(hidden, [1, 1, s, t]), &Device::flex().autodiff());
    let scores = scores.mask_fill(hidden.expand([b, hq, s, t]), -1e30);
    let weights = softmax(scores, 3);
    let weights = match keep {
        Some(keep) => weights * keep,
        None => weights,
    };
    let out: Tensor<4> = weights.matmul(heads(v, group));
    assert_eq!(out.dims(), [b, hq, s, d]);
    out.permute([2, 0, 1, 3])
}

#[test]
fn all_masks_and_groupings() {
    let shapes = [
        // s, t, b, hq, hkv, d
        [1, 1, 1, 1, 1, 1],
        [5, 5, 2, 2, 2, 3],
        [7, 7, 1, 4, 2, 8],
        [9, 9, 2, 6, 1, 5],
        [130, 130, 1, 2, 1, 4],
        [261, 261, 1, 2, 2, 3],
        [1, 6, 2, 4, 2, 3],
        [3, 150, 1, 2, 2, 4],
        [131, 140, 1, 2, 1, 3],
    ];
    for [s, t, b, hq, hkv, d] in shapes {
        for (causal, window, softcap) in [
            (true, None, None),
            (false, None, None),
            (true, Some(3), None),
            (false, Some(2), None),
            (true, Some(140), None),
            (true, Some(3), Some(0.3)),
            (false, None, Some(2.0)),
        ] {
            let options = AttentionOptions { scale: 0.7, causal, window, softcap, dropout: None, deterministic: false };
            let (nq, nkv) = (s * b * hq * d, t * b * hkv * d);
            let parts = |x: &[Tensor<1>]| -> [Tensor<4>; 3] {
                [
                    x[0].clone().reshape([s, b, hq, d]),
                    x[1].clone().reshape([t, b, hkv, d]),
                    x[2].clone().reshape([t, b, hkv, d]),
                ]
            };
            same(
                &format!("attention {s} {t} {b} {hq} {hkv} {d} {options:?}"),
                &[nq, nkv, nkv],
                |x| {
                    let [q, k, v] = parts(&x);
                    attention(q, k, v, options).reshape([nq])
                },
                |x| {
                    let [q, k, v] = parts(&x);
                    plain(q, k, v, options).reshape([nq])
                },
            );
        }
    }
}

#[test]
fn strided_and_packed_inputs() {
    for [s, b, hq, hkv, d] in [[6, 2, 4, 2, 4], [140, 1, 2, 2, 3]] {
        let heads = PackedHeads { heads: hq, kv_heads: hkv };
        let (all, n) = (s * b * heads.total() * d, s * b * hq * d);
        let options = AttentionOptions::causal(d);
        let split =
            |x: Tensor<4>| [x.clone().narrow(2, 0, hq), x.clone().narrow(2, hq, hkv), x.narrow(2, hq + hkv, hkv)];
        let packed = |x: &[Tensor<1>]| -> Tensor<4> { x[0].clone().reshape([s, b, heads.total(), d]) };
        let expected = |x: Vec<Tensor<1>>| {
            let [q, k, v] = split(packed(&x));
            plain(q, k, v, options).reshape([n])
        };
        same("attention_packed", &[all], |x| attention_packed(packed(&x), heads, options).reshape([n]), expected);
        let narrowed = |x: Vec<Tensor<1>>| {
            let [q, k, v] = split(packed(&x));
            attention(q, k, v, options).reshape([n])
        };
        same("attention of narrowed views", &[all], narrowed, expected);
        // The last dimension strided, batch before sequence.
        let turned =
            |x: &[Tensor<1>]| -> Tensor<4> { x[0].clone().reshape([b, s, d, heads.total()]).permute([1, 0, 3, 2]) };
        same(
            "attention of permuted views",
            &[all],
            |x| {
                let [q, k, v] = split(turned(&x));
                attention(q, k, v, options).reshape([n])
            },
            |x| {
                let [q, k, v] = split(turned(&x));
                plain(q, k, v, options).reshape([n])
            },
        );
    }
}

/// The factor of dropout on every weight, `[b, h, s, s]`: attention with equal weights over values that are the unit
/// matrix gives the weights.
fn mask(s: usize, b: usize, h: usize, dropout: AttentionDropout) -> Tensor<4> {
    let device = Device::flex().autodiff();
    let zeros = Tensor::<4>::zeros([s, b, h, 1], (&device, DType::F64));
    let unit: Vec<f64> = (0..s * b * h * s).map(|i| f64::from(i / (b * h * s) == i % s)).collect();
    let unit = Tensor::<4>::from_data(TensorData::new(unit, [s, b, h, s]), (&device, DType::F64));
    let options = AttentionOptions { causal: false, dropout: Some(dropout), ..AttentionOptions::causal(1) };
    (attention(zeros.clone(), zeros, unit, options) * s as f64).permute([1, 2, 0, 3])
}

fn dropout(p: f64) -> AttentionDropout {
    AttentionDropout { p, seed: 11, first_sample: 0, first_head: 0, heads: 4 }
}

#[test]
fn dropped_weights_and_values_of_another_length() {
    for [s, b, hq, hkv, d, dv] in [[9, 2, 4, 2, 3, 3], [140, 1, 2, 2, 4, 6], [5, 2, 4, 1, 6, 2]] {
        for window in [None, Some(4)] {
            let drop = dropout(0.4);
            let options = AttentionOptions { window, dropout: Some(drop), ..AttentionOptions::causal(d) };
            let keep = mask(s, b, hq, drop);
            let parts = |x: &[Tensor<1>]| -> [Tensor<4>; 3] {
                [
                    x[0].clone().reshape([s, b, hq, d]),
                    x[1].clone().reshape([s, b, hkv, d]),
                    x[2].clone().reshape([s, b, hkv, dv]),
                ]
            };
            let n = s * b * hq * dv;
            same(
                &format!("attention with dropout {s} {b} {hq} {hkv} {d} {dv} {window:?}"),
                &[s * b * hq * d, s * b * hkv * d, s * b * hkv * dv],
                |x| {
                    let [q, k, v] = parts(&x);
                    attention(q, k, v, options).reshape([n])
                },
                |x| {
                    let [q, k, v] = parts(&x);
                    plain_times(q, k, v, options, Some(keep.clone())).reshape([n])
                },
            );
        }
    }
}

#[test]
fn dropout_has_its_share_and_its_scale() {
    for p in [0.0, 0.1, 0.5] {
        let found = values(mask(96, 2, 4, dropout(p)));
        let (kept, n) = (found.iter().filter(|x| **x > 0.0).count() as f64, found.len() as f64);
        // Four standard deviations.
        assert!((kept / n - (1.0 - p)).abs() <= 4.0 * (p * (1.0 - p) / n).sqrt(), "{p}: {kept} of {n}");
        let scale = 1.0 / (1.0 - f64::from(p as f32));
        assert!(found.iter().all(|x| *x == 0.0 || (x - scale).abs() < 1e-12), "{p}");
    }
}

/// Ranks with some of the samples and heads have the dropout mask of one rank with all of them.
#[test]
fn a_mask_does_not_depend_on_who_draws_it() {
    let whole = mask(6, 3, 4, dropout(0.5));
    let part = mask(6, 2, 2, AttentionDropout { first_sample: 1, first_head: 2, ..dropout(0.5) });
    let expected = whole.clone().narrow(0, 1, 2).narrow(1, 2, 2);
    assert_eq!(values(part), values(expected));
    let other = mask(6, 3, 4, AttentionDropout { seed: 12, ..dropout(0.5) });
    assert_ne!(values(other), values(whole));
}

#[test]
#[should_panic(expected = "attention: heads 3..5 of 4 to drop from")]
fn heads_outside_the_layer_are_refused() {
    mask(2, 1, 2, AttentionDropout { first_head: 3, ..dropout(0.5) });
}

#[test]
#[should_panic(expected = "3 query heads are not a multiple of 2")]
fn heads_must_divide() {
    let x = |h| Tensor::<4>::zeros([2, 1, h, 2], &Device::flex());
    attention(x(3), x(2), x(2), AttentionOptions::causal(2));
}

/// With sinks, values and gradients of a packed projection are those of separate queries, keys and values.
#[test]
fn sinks_of_a_packed_projection_are_those_of_separate_heads() {
    let device = Device::flex().autodiff();
    let heads = PackedHeads { heads: 4, kv_heads: 2 };
    let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, (&device, DType::F64));
    let (qkv, slope) = (random([9, 2, 8, 6]).require_grad(), random([9, 2, 4, 6]));
    let sinks = random([1, 1, 1, 4]).reshape([4]).require_grad();
    let pass = PassContext::default();
    for window in [None, Some(3)] {
        let options = AttentionOptions { window, ..AttentionOptions::causal(6) };
        let parts = [(0, 4), (4, 2), (6, 2)].map(|(first, count)| qkv.clone().narrow(2, first, count));
        let apart = attention_with_sinks(parts, sinks.clone(), options, None, None, &pass);
        let whole = attention_packed_with_sinks(qkv.clone(), heads, sinks.clone(), options, None, None, &pass);
        let distance = |a: Tensor<1>, b: Tensor<1>| (a - b).abs().max().into_scalar::<f64>();
        let flat = |x: Tensor<4>| x.inner().flatten::<1>(0, 3);
        assert!(distance(flat(whole.clone()), flat(apart.clone())) < 1e-12);
        let [found, expected] = [whole, apart].map(|y| (y * slope.clone()).sum().backward());
        let of_qkv = |from| qkv.grad(from).expect("it takes part").flatten::<1>(0, 3);
        assert!(distance(of_qkv(&found), of_qkv(&expected)) < 1e-12);
        let of_sinks = |from| sinks.grad(from).expect("it takes part");
        assert!(distance(of_sinks(&found), of_sinks(&expected)) < 1e-12);
    }
}
