//! Attention against the whole score matrix.

use crate::compare::same;
use backend_dist::ops::{AttentionOptions, PackedHeads, attention, attention_packed};
use burn::tensor::{Bool, Device, Tensor, TensorData, activation::softmax};

/// `[s, b, h, d]` to `[b, h, s, d]`, every head `times` times.
fn heads(x: Tensor<4>, times: usize) -> Tensor<4> {
    let [s, b, h, d] = x.dims();
    let x: Tensor<5> = x.permute([1, 2, 0, 3]).reshape([b, h, 1, s, d]);
    x.repeat_dim(2, times).reshape([b, h * times, s, d])
}

fn plain(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<4> {
    let [s, b, hq, d] = q.dims();
    let [t, _, hkv, _] = k.dims();
    let group = hq / hkv;
    let scores = heads(q, 1).matmul(heads(k, group).swap_dims(2, 3)) * options.scale;
    let hidden: Vec<bool> = (0..s * t)
        .map(|i| (t - s + i / t, i % t))
        .map(|(i, j)| options.causal && j > i || options.window.is_some_and(|w| i.abs_diff(j) >= w))
        .collect();
    let hidden = Tensor::<4, Bool>::from_data(TensorData::new(hidden, [1, 1, s, t]), &Device::flex().autodiff());
    let scores = scores.mask_fill(hidden.expand([b, hq, s, t]), -1e30);
    let out: Tensor<4> = softmax(scores, 3).matmul(heads(v, group));
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
        for (causal, window) in [(true, None), (false, None), (true, Some(3)), (false, Some(2)), (true, Some(140))] {
            let options = AttentionOptions { scale: 0.7, causal, window };
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

#[test]
#[should_panic(expected = "3 query heads are not a multiple of 2")]
fn heads_must_divide() {
    let x = |h| Tensor::<4>::zeros([2, 1, h, 2], &Device::flex());
    attention(x(3), x(2), x(2), AttentionOptions::causal(2));
}
