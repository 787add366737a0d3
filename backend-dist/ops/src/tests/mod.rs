//! The tight loops of the CPU against the plain formulas, kernel by kernel.

pub mod recurrences;

use burn::backend::{DType, Flex, Shape, Slice, TensorData, flex::FlexTensor, ops::FloatTensorOps};

use super::{
    AttentionDropout, AttentionOptions, DropoutMask, GeluKind, LocalKernels, NormNeeds, PackedHeads, Rms, Rotation,
    plain::{activation, attention, cross_entropy, dropout, embedding, linear, norm, rope},
};

fn tensor(shape: &[usize], seed: usize) -> FlexTensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| ((i * 37 + seed * 11) as f64 * 0.61).sin() * 2.0).collect();
    FlexTensor::from_data(TensorData::new(values, Shape::from(shape.to_vec())))
}

fn ids(values: &[i64], shape: &[usize]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values.to_vec(), Shape::from(shape.to_vec())))
}

fn same(name: &str, fast: FlexTensor, plain: FlexTensor) {
    assert_eq!(fast.layout().shape(), plain.layout().shape(), "{name}");
    assert_eq!(fast.dtype(), DType::F64, "{name}");
    let [fast, plain] = [fast, plain].map(|x| x.into_data().iter::<f64>().collect::<Vec<f64>>());
    for (i, (a, b)) in fast.iter().zip(&plain).enumerate() {
        assert!((a - b).abs() <= 1e-13 * (1.0 + b.abs()), "{name}, element {i}: {a} but plain {b}");
    }
}

#[test]
fn linear_kernels() {
    let (x, w, g) = (tensor(&[3, 2, 5], 1), tensor(&[7, 5], 2), tensor(&[3, 2, 7], 3));
    same("forward", Flex::linear_forward(x.clone(), w.clone()), linear::forward::<Flex>(x.clone(), w.clone()));
    same("input", Flex::linear_input_grad(g.clone(), w.clone()), linear::input_grad::<Flex>(g.clone(), w));
    same("weight", Flex::linear_weight_grad(g.clone(), x.clone()), linear::weight_grad::<Flex>(g, x));
}

#[test]
fn norm_kernels() {
    let (x, w, b, g) = (tensor(&[3, 2, 37], 1), tensor(&[37], 2), tensor(&[37], 3), tensor(&[3, 2, 37], 4));
    let (rms, layer) = (Flex::rms_norm_forward, Flex::layer_norm_forward);
    let of_rms = [false, true].map(|plus_one| Rms { eps: 1e-3, plus_one });
    for of in of_rms {
        same("rms", rms(x.clone(), w.clone(), of), norm::rms_norm::<Flex>(x.clone(), w.clone(), of));
    }
    let plain = norm::layer_norm::<Flex>(x.clone(), w.clone(), b.clone(), 1e-3);
    same("layer", layer(x.clone(), w.clone(), b, 1e-3), plain);
    for bits in 0..8 {
        let needs = NormNeeds { x: bits & 1 > 0, w: bits & 2 > 0, b: bits & 4 > 0 };
        let args = || (x.clone(), w.clone(), g.clone());
        let ((a, b, c), (d, e, f)) = (args(), args());
        let fast = Flex::layer_norm_grads(a, b, c, 1e-3, needs);
        let plain = norm::layer_norm_grads::<Flex>(d, e, f, 1e-3, needs);
        for (wanted, fast, plain) in
            [(needs.x, fast.x, plain.x), (needs.w, fast.w, plain.w), (needs.b, fast.b, plain.b)]
        {
            assert_eq!([fast.is_some(), plain.is_some()], [wanted; 2], "{needs:?}");
            fast.zip(plain).into_iter().for_each(|(fast, plain)| same("layer gradient", fast, plain));
        }
        for of in of_rms {
            let ((a, b, c), (d, e, f)) = (args(), args());
            let fast = Flex::rms_norm_grads(a, b, c, of, needs);
            let plain = norm::rms_norm_grads::<Flex>(d, e, f, of, needs);
            for (fast, plain) in [(fast.x, plain.x), (fast.w, plain.w)] {
                fast.zip(plain).into_iter().for_each(|(fast, plain)| same("rms gradient", fast, plain));
            }
        }
    }
}

#[test]
fn rope_kernels() {
    let (x, cos, sin) = (tensor(&[4, 2, 3, 8], 1), tensor(&[4, 3], 2), tensor(&[4, 3], 3));
    for rotation in [Rotation::Forward, Rotation::Back] {
        for heads in [0, 2, 3] {
            let fast = Flex::rope_apply(x.clone(), cos.clone(), sin.clone(), heads, rotation);
            let plain = rope::apply::<Flex>(x.clone(), cos.clone(), sin.clone(), heads, rotation);
            same(&format!("{heads} heads {rotation:?}"), fast, plain);
        }
    }
}

#[test]
fn activation_kernels() {
    let (x, g) = (tensor(&[5, 38], 1), tensor(&[5, 19], 2));
    same("swiglu", Flex::swiglu_forward(x.clone()), activation::swiglu::<Flex>(x.clone()));
    same("swiglu gradient", Flex::swiglu_grad(x.clone(), g.clone()), activation::swiglu_grad::<Flex>(x.clone(), g));
    let g = tensor(&[5, 38], 2);
    for kind in [GeluKind::Erf, GeluKind::Tanh] {
        same("gelu", Flex::gelu_forward(x.clone(), kind), activation::gelu::<Flex>(x.clone(), kind));
        let fast = Flex::gelu_grad(x.clone(), g.clone(), kind);
        same("gelu gradient", fast, activation::gelu_grad::<Flex>(x.clone(), g.clone(), kind));
    }
}

/// Compares forward and backward of attention with the plain formulas, and returns the plain results: output and
/// log-sum-exp, and the gradients.
fn same_attention(
    parts: [FlexTensor; 3],
    grad: FlexTensor,
    options: AttentionOptions,
) -> ([FlexTensor; 2], [FlexTensor; 3]) {
    let [q, k, v] = parts.clone();
    let (out, lse) = attention::forward::<Flex>(q.clone(), k.clone(), v.clone(), options);
    let fast = Flex::attention_forward(q, k, v, options);
    same("output", fast.0, out.clone());
    same("log-sum-exp", fast.1, lse.clone());
    let result = [out, lse];
    let plain = attention::grads::<Flex>(parts.clone(), result.clone(), grad.clone(), options);
    for (fast, plain) in Flex::attention_grads(parts, result.clone(), grad, options).into_iter().zip(plain.clone()) {
        same("gradient", fast, plain);
    }
    (result, plain)
}

#[test]
fn attention_kernels() {
    let heads = PackedHeads { heads: 4, kv_heads: 2 };
    let (qkv, grad) = (tensor(&[9, 2, 8, 3], 1), tensor(&[9, 2, 4, 3], 2));
    let drop = Some(AttentionDropout { p: 0.3, seed: 5, first_sample: 2, first_head: 4, heads: 8 });
    let cases = [(true, None, None), (false, None, drop), (true, Some(3), drop), (false, Some(4), None)];
    for (causal, window, dropout) in cases {
        let options = AttentionOptions { scale: 0.6, causal, window, softcap: None, dropout, deterministic: false };
        // All queries, and the last two of them.
        for queries in [9, 2] {
            let last = |x: FlexTensor| Flex::float_slice(x, &[Slice::from(9 - queries..9)]);
            let [q, k, v] = attention::unpack::<Flex>(qkv.clone(), heads);
            let parts = [last(q), k, v];
            let grad = last(grad.clone());
            let (result, plain) = same_attention(parts, grad.clone(), options);
            if queries == 9 {
                let packed = Flex::attention_packed_grad(qkv.clone(), result, grad, heads, options);
                same("packed gradient", packed, Flex::float_cat(plain.into(), 2));
            }
        }
    }
}

#[test]
fn attention_with_values_of_another_length() {
    let dropout = Some(AttentionDropout { p: 0.3, seed: 5, first_sample: 0, first_head: 0, heads: 4 });
    let options = AttentionOptions { dropout, ..AttentionOptions::causal(3) };
    let parts = [tensor(&[150, 2, 4, 3], 1), tensor(&[160, 2, 2, 3], 2), tensor(&[160, 2, 2, 5], 3)];
    let grad = tensor(&[150, 2, 4, 5], 4);
    same_attention(parts, grad, options);
}

#[test]
fn embedding_kernels() {
    let (w, ids, g) = (tensor(&[5, 3], 1), ids(&[7, 3, 9, 4, 7, 8], &[3, 2]), tensor(&[3, 2, 3], 2));
    let fast = Flex::embedding_forward(w.clone(), ids.clone(), 4);
    same("rows", fast, embedding::forward::<Flex>(w, ids.clone(), 4));
    let fast = Flex::embedding_weight_grad(g.clone(), ids.clone(), 4, 5);
    same("gradient", fast, embedding::weight_grad::<Flex>(g, ids, 4, 5));
}

#[test]
fn cross_entropy_kernels() {
    let (logits, labels) = (tensor(&[3, 2, 6], 1), ids(&[10, 11, 4, 13, 15, 12], &[3, 2]));
    let (lse, grad) = (tensor(&[3, 2], 2), tensor(&[3, 2], 3));
    for valid in [6, 4, 0] {
        let max = cross_entropy::maximum::<Flex>(logits.clone(), valid);
        if valid > 0 {
            same("maximum", Flex::vocab_maximum(logits.clone(), valid), max.clone());
        }
        let fast = Flex::vocab_sums(logits.clone(), max.clone(), labels.clone(), 10, valid);
        same("sums", fast, cross_entropy::sums::<Flex>(logits.clone(), max, labels.clone(), 10, valid));
        let args = || (logits.clone(), lse.clone(), labels.clone(), grad.clone());
        let ((a, b, c, d), (e, f, g, h)) = (args(), args());
        let plain = cross_entropy::logits_grad::<Flex>(e, f, g, h, 10, valid);
        // In the padding a label has no meaning; neither version gives it a gradient.
        same("gradient", Flex::vocab_logits_grad(a, b, c, d, 10, valid), plain);
    }
}

#[test]
fn dropout_kernels() {
    let x = tensor(&[4, 3, 7], 1);
    let key = DropoutMask::of_shard(9, &[1, 0, 2], &[6, 3, 12]);
    same("dropout", Flex::dropout_apply(x.clone(), 0.4, &key), dropout::apply::<Flex>(x, 0.4, &key));
}
