//! Attention with masks for single scores and dropout of weights: the kernels against the formulas in f64 on the host.

use crate::choice::Choice;
use crate::clock;
use crate::numbers::{host, normal, relative};
use crate::report::Report;
use backend_dist::launch::BoxError;
use backend_dist::ops::{AttentionMasks, Kept, MaskedAttentionKernels};
use burn::backend::{Backend, Cube, Flex, tensor::FloatTensor};
use burn::tensor::{DType, Device, Tensor, TensorData};
use kernels_cubecl::fused::Draw;

/// Rounding of bf16: what the formulas in bf16 differ by.
const BOUND: f64 = 8e-3;

struct Case {
    /// `[b, h, s, keys, d]`.
    sizes: [usize; 5],
    /// The mask's `[b, h, s]`.
    mask: Option<[usize; 3]>,
    dropout: bool,
}

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let cases = if choice.does("check") { cases() } else { Vec::new() };
    for case in cases {
        let name = name(&case);
        let (found, expected) = (results(&case, &GPU), results(&case, &CPU));
        for (what, (found, expected)) in ["out", "dq", "dk", "dv"].iter().zip(found.iter().zip(&expected)) {
            report.quiet_error(format!("{name} {what}"), relative(found, expected), BOUND);
        }
    }
    if choice.does("time") {
        time();
    }
    Ok(())
}

/// Lengths that fill blocks and that do not.
fn cases() -> Vec<Case> {
    let sizes = [[2, 3, 200, 136, 64], [2, 3, 136, 300, 128], [3, 2, 512, 512, 64], [1, 2, 33, 20, 128]];
    let cases = sizes.into_iter().flat_map(|sizes| {
        let [b, h, s, ..] = sizes;
        let masks = [None, Some([b, 1, 1]), Some([b, 1, s]), Some([1, h, s])];
        masks.into_iter().flat_map(move |mask| [false, true].map(|dropout| Case { sizes, mask, dropout }))
    });
    cases.filter(|case| case.mask.is_some() || case.dropout).collect()
}

fn name(Case { sizes, mask, dropout }: &Case) -> String {
    let mask = mask.map_or("no mask".into(), |mask| format!("mask {mask:?}"));
    format!("{sizes:?}, {mask}{}", if *dropout { ", dropout" } else { "" })
}

/// A backend's tensors from and to the host.
struct Host<B: Backend> {
    tensor: fn(TensorData) -> FloatTensor<B>,
    values: fn(FloatTensor<B>) -> Vec<f64>,
}

const GPU: Host<Cube> = Host {
    tensor: |data| primitive(data, &Device::cuda(0), DType::BF16).try_into_primitive::<Cube>().expect("on the GPU"),
    values: |x| host(Tensor::<4>::from_primitive::<Cube>(x)),
};

const CPU: Host<Flex> = Host {
    tensor: |data| primitive(data, &Device::flex(), DType::F64).try_into_primitive::<Flex>().expect("on the host"),
    values: |x| host(Tensor::<4>::from_primitive::<Flex>(x)),
};

fn primitive(data: TensorData, device: &Device, dtype: DType) -> Tensor<4> {
    // The host computes with the numbers that the GPU has.
    Tensor::from_data(data.convert_dtype(DType::BF16), (device, dtype))
}

/// Queries, keys, values, the gradient of the output, and masks.
fn inputs<B: Backend>(case: &Case, backend: &Host<B>) -> ([FloatTensor<B>; 4], AttentionMasks<B>) {
    let Case { sizes: [b, h, s, keys, d], mask, dropout } = *case;
    let shapes = [[s, b, h, d], [keys, b, h, d], [keys, b, h, d], [s, b, h, d]];
    let tensor = |i: usize| {
        let values: Vec<f64> = normal(shapes[i].iter().product(), 1 + i as u64).collect();
        (backend.tensor)(TensorData::new(values, shapes[i]))
    };
    let hidden = mask.map(|[b, h, s]| {
        // Two of five keys, and all keys of some queries.
        let bit = |row: usize, key: usize| f64::from(row % 7 == 3 || (row * 31 + key * key) % 5 < 2);
        let bits: Vec<f64> = (0..b * h * s).flat_map(|row| (0..keys).map(move |key| bit(row, key))).collect();
        (backend.tensor)(TensorData::new(bits, [b, h, s, keys]))
    });
    let kept = dropout.then_some(Kept { draw: Draw::new(5, 9, 0.8), factor: 1.25 });
    (std::array::from_fn(tensor), AttentionMasks::new(hidden, kept))
}

/// Output and gradients.
fn results<B: MaskedAttentionKernels>(case: &Case, backend: &Host<B>) -> [Vec<f64>; 4] {
    let ([q, k, v, grad], masks) = inputs(case, backend);
    let scale = scale(case);
    let result = B::masked_attention([q.clone(), k.clone(), v.clone()], &masks, scale);
    let [dq, dk, dv] = B::masked_attention_grads([q, k, v], result.clone(), grad, &masks, scale);
    let [out, _] = result;
    [out, dq, dk, dv].map(backend.values)
}

fn scale(case: &Case) -> f64 {
    1.0 / (case.sizes[4] as f64).sqrt()
}

/// Milliseconds of both passes of the encoder's attention.
fn time() {
    let sizes = [16, 16, 512, 512, 64];
    println!("{:<24} {:>8} {:>8} {:>8}", format!("{sizes:?}"), "masks", "forward", "backward");
    for (name, mask, dropout) in [
        ("none", None, false),
        ("padding", Some([16, 1, 1]), false),
        ("dropout", None, true),
        ("both", Some([16, 1, 1]), true),
    ] {
        let case = Case { sizes, mask, dropout };
        let ([q, k, v, grad], masks) = inputs(&case, &GPU);
        let (client, scale) = (q.client.clone(), scale(&case));
        let qkv = [q, k, v];
        let first = clock::kernel(&client, |_| {
            let masks = AttentionMasks::new(masks.hidden.clone(), masks.kept);
            Cube::masked_attention(qkv.clone(), &masks, scale);
        });
        let forward = clock::kernel(&client, |_| drop(Cube::masked_attention(qkv.clone(), &masks, scale)));
        let result = Cube::masked_attention(qkv.clone(), &masks, scale);
        let backward = clock::kernel(&client, |_| {
            drop(Cube::masked_attention_grads(qkv.clone(), result.clone(), grad.clone(), &masks, scale));
        });
        println!("{name:<24} {:>8.3} {:>8.3} {:>8.3}", 1e3 * (first - forward), 1e3 * forward, 1e3 * backward);
    }
}
