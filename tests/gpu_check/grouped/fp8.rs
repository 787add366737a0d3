//! Experts in FP8: small sizes against the emulation on the CPU in f64, and times next to bf16.
use super::gemms::{matrix, random};
use super::reference::numbers;
use super::time::{counts, seconds};
use crate::numbers::{host, relative};
use crate::report::Report;
use backend_dist::comm::Group;
use backend_dist::ops::fp8::{self, ExpertRanks, ExpertSharding, Fp8Experts, Fp8Format, Fp8Layers, Fp8Recipe};
use backend_dist::ops::main_grads::{self, MainGrad};
use backend_dist::ops::{PassContext, moe, pull_back};
use burn::tensor::{DType, Device, Tensor};
use std::sync::Arc;

/// Bound of `‖found - expected‖ / ‖expected‖`: results rounded to 16 bits, and accumulators that keep about 14 bits.
const LIMIT: f64 = 1.5e-2;

fn layer(layers: &Fp8Layers, experts: usize, format: Fp8Format) -> Fp8Experts {
    let ranks = ExpertRanks { experts, local: 0..experts, shards: Group::single(), tokens: None, dp_ranks: 0..1 };
    Fp8Experts::new(layers, "layer", Fp8Recipe::tensorwise(format), ExpertSharding::Outputs, ranks)
}

pub fn check(device: &Device, report: &mut Report) {
    // Experts, rows of groups, output and input features; empty groups, empty experts, tiles that are not full.
    let sizes: [(usize, &[usize], [usize; 2]); 4] = [
        (1, &[128], [64, 64]),
        (3, &[256, 128, 0, 0, 0, 384], [192, 320]),
        (2, &[16, 0, 272, 48], [176, 80]),
        (4, &[1024, 128, 512, 256], [512, 1024]),
    ];
    for (experts, counts, [features, inner]) in sizes {
        for (dtype, format) in [(DType::BF16, Fp8Format::Hybrid), (DType::F16, Fp8Format::E4m3)] {
            let counts: Arc<[usize]> = counts.into();
            let run = |device: &Device, dtype, sums| {
                let layer = layer(&Fp8Layers::default(), experts, format);
                results(device, dtype, &layer, (&counts, experts), [features, inner], sums)
            };
            let expected = run(&Device::flex(), DType::F64, false);
            for sums in [false, true] {
                let found = run(device, dtype, sums);
                for ((found, expected), of) in found.iter().zip(&expected).zip(["output", "tokens", "matrices"]) {
                    let what = format!("FP8 {dtype:?} {format:?} sums {sums} {counts:?} · {features} · {inner} {of}");
                    report.error(what, relative(found, expected), LIMIT);
                }
            }
        }
    }
}

/// Output and gradients of the tokens and of the matrices; with `sums` the latter are accumulated in place.
fn results(
    device: &Device,
    dtype: DType,
    layer: &Fp8Experts,
    (counts, experts): (&Arc<[usize]>, usize),
    [features, inner]: [usize; 2],
    sums: bool,
) -> [Vec<f64>; 3] {
    let (rows, len) = (counts.iter().sum::<usize>(), experts * features * inner);
    let tensor = |shape: [usize; 2], seed, size: f64| {
        let numbers = numbers(shape[0] * shape[1], seed).into_iter().map(|x| x * size).collect();
        matrix(numbers, shape, &device.clone().autodiff(), dtype)
    };
    let x = tensor([rows, inner], 1, 1.0).detach().require_grad();
    let w = tensor([experts * features, inner], 2, 0.125).detach().require_grad();
    let place = sums.then(|| {
        let sum = Tensor::<1>::full([len], f32::NAN, (device, DType::F32));
        main_grads::attach(&w, MainGrad::new(sum.clone()));
        sum
    });
    let y = fp8::grouped_linear(x.clone(), w.clone(), counts, layer);
    let grads = pull_back(y.clone(), tensor([rows, features], 3, 1.0));
    let of_w = place.unwrap_or_else(|| w.grad(&grads).expect("a gradient of the matrices").reshape([len]));
    main_grads::detach_all();
    let of_x = x.grad(&grads).expect("a gradient of the rows").reshape([rows * inner]);
    [y.reshape([rows * features]), of_x, of_w].map(host)
}

/// Four experts of a Mixtral 8x7B, of one micro-batch and of two together, forward and with both gradients; casts
/// included, except those of the matrices, which are cached.
pub fn time(device: &Device) {
    let layers = Fp8Layers::default();
    layers.weights_changed();
    for (name, features, inner) in [("in", 28_672, 4096), ("out", 4096, 14_336)] {
        for each in [1, 2] {
            let counts: Arc<[usize]> = counts(4 * each, 16_384).into();
            let autodiff = device.clone().autodiff();
            let random = |shape| random(shape, &autodiff, DType::BF16).detach();
            let (x, w) = (random([16_384, inner]).require_grad(), random([4 * features, inner]).require_grad());
            let gradient = random([16_384, features]);
            let sum = Tensor::<1>::zeros([4 * features * inner], (device, DType::F32));
            main_grads::attach(&w, MainGrad::new(sum));
            let quantised = layer(&layers, 4, Fp8Format::Hybrid);
            let whole: Arc<[usize]> = counts.chunks(each).map(|counts| counts.iter().sum()).collect();
            let in_fp8 = || fp8::grouped_linear(x.clone(), w.clone(), &counts, &quantised);
            let in_bf16 = || moe::grouped_linear(x.clone(), w.clone(), &whole, &PassContext::default());
            let near = gradient.clone().inner();
            let flops = 2.0 * 16_384.0 * (features * inner) as f64 / 1e12;
            let rate = |gemms: f64, seconds: f64| gemms * flops / seconds;
            let methods: [(&str, &dyn Fn() -> Tensor<2>); 2] = [("bf16", &in_bf16), ("FP8", &in_fp8)];
            for (what, way) in methods {
                let forward = rate(1.0, seconds(|| drop(way()), &near));
                let all = rate(3.0, seconds(|| drop(pull_back(way(), gradient.clone())), &near));
                println!(
                    "{name:<4} {each} micro-batches {what:<5} forward {forward:7.1} with gradients {all:7.1} TFLOP/s"
                );
            }
            main_grads::detach_all();
        }
    }
}
