//! Experts in FP8: small sizes against the emulation on the CPU in f64, and times next to bf16.
use super::gemms::{Layer, matrix, random};
use super::reference::numbers;
use super::time::{counts, models, seconds};
use crate::choice::Choice;
use crate::numbers::{host, relative};
use crate::report::Report;
use backend_dist::comm::Group;
use backend_dist::ops::fp8::{
    self, ExpertRanks, ExpertSharding, Fp8Experts, Fp8Format, Fp8Layers, Fp8Recipe, Fp8Scaling,
};
use backend_dist::ops::main_grads::{self, MainGrad};
use backend_dist::ops::{PassContext, moe, pull_back};
use burn::tensor::{DType, Device, Tensor};
use std::sync::Arc;

/// Bound of `‖found - expected‖ / ‖expected‖`: results rounded to 16 bits, and accumulators that keep about 14 bits.
const LIMIT: f64 = 1.5e-2;

fn layer(layers: &Fp8Layers, experts: usize, format: Fp8Format, scaling: Fp8Scaling) -> Fp8Experts {
    let ranks = ExpertRanks { experts, local: 0..experts, shards: Group::single(), tokens: None, dp_ranks: 0..1 };
    let recipe = Fp8Recipe { scaling, ..Fp8Recipe::tensorwise(format) };
    Fp8Experts::new(layers, "layer", recipe, ExpertSharding::Outputs, ranks)
}

pub fn check(device: &Device, report: &mut Report) {
    // Experts, rows of groups, output and input features; empty groups, empty experts, tiles that are not full.
    let sizes: [(usize, &[usize], [usize; 2]); 6] = [
        (1, &[128], [64, 64]),
        (3, &[256, 128, 0, 0, 0, 384], [192, 320]),
        (2, &[16, 0, 272, 48], [176, 80]),
        (4, &[1024, 128, 512, 256], [512, 1024]),
        (4, &[256, 128, 0, 128, 0, 0, 384, 0], [384, 208]),
        (2, &[256, 128, 0, 384], [640, 256]),
    ];
    let ways =
        [(DType::BF16, Fp8Format::Hybrid), (DType::F16, Fp8Format::E4m3)].into_iter().flat_map(|(dtype, format)| {
            [Fp8Scaling::Tensorwise, Fp8Scaling::Blockwise].map(|scaling| (dtype, format, scaling))
        });
    for ((experts, counts, [features, inner]), (dtype, format, scaling)) in
        sizes.into_iter().flat_map(|sizes| ways.clone().map(move |way| (sizes, way)))
    {
        let multiple = Fp8Recipe { scaling, ..Fp8Recipe::tensorwise(format) }.multiple();
        if [features, inner].iter().chain(counts).all(|size| size.is_multiple_of(multiple)) {
            let counts: Arc<[usize]> = counts.into();
            let run = |device: &Device, dtype, sums| {
                let layer = layer(&Fp8Layers::default(), experts, format, scaling);
                results(device, dtype, &layer, (&counts, experts), [features, inner], sums)
            };
            let expected = run(&Device::flex(), DType::F64, false);
            for sums in [false, true] {
                let found = run(device, dtype, sums);
                for ((found, expected), of) in found.iter().zip(&expected).zip(["output", "tokens", "matrices"]) {
                    let what = format!(
                        "FP8 {dtype:?} {format:?} {scaling:?} sums {sums} {counts:?} · {features} · {inner} {of}"
                    );
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

/// Layers of models, of one micro-batch and of two together, forward and with both gradients; casts included, except those
/// of the matrices, which are cached.
pub fn time(device: &Device, choice: &Choice) {
    let layers = Fp8Layers::default();
    layers.weights_changed();
    let models = models().into_iter().filter(|(name, layer)| choice.wants(name) && layer.counts.len() > 1);
    for (name, Layer { counts: whole, features, inner }) in models {
        let (experts, rows) = (whole.len(), whole.iter().sum());
        for each in [1, 2] {
            let counts: Arc<[usize]> = counts(experts * each, rows).into();
            let autodiff = device.clone().autodiff();
            let random = |shape| random(shape, &autodiff, DType::BF16).detach();
            let (x, w) = (random([rows, inner]).require_grad(), random([experts * features, inner]).require_grad());
            let gradient = random([rows, features]);
            let sum = Tensor::<1>::zeros([experts * features * inner], (device, DType::F32));
            main_grads::attach(&w, MainGrad::new(sum));
            let [tensors, blocks] = [Fp8Scaling::Tensorwise, Fp8Scaling::Blockwise]
                .map(|scaling| layer(&layers, experts, Fp8Format::Hybrid, scaling));
            let whole: Arc<[usize]> = counts.chunks(each).map(|counts| counts.iter().sum()).collect();
            let in_fp8 = || fp8::grouped_linear(x.clone(), w.clone(), &counts, &tensors);
            let in_blocks = || fp8::grouped_linear(x.clone(), w.clone(), &counts, &blocks);
            let in_bf16 = || moe::grouped_linear(x.clone(), w.clone(), &whole, &PassContext::default());
            let near = gradient.clone().inner();
            let flops = 2.0 * rows as f64 * (features * inner) as f64 / 1e12;
            let rate = |gemms: f64, seconds: f64| gemms * flops / seconds;
            let methods: [(&str, &dyn Fn() -> Tensor<2>); 3] =
                [("bf16", &in_bf16), ("FP8", &in_fp8), ("blocks", &in_blocks)];
            let fits = [features, inner].iter().all(|size| size.is_multiple_of(fp8::BLOCK));
            let timed = methods.into_iter().filter(|(what, _)| *what != "blocks" || fits).map(|(what, way)| {
                let forward = rate(1.0, seconds(|| drop(way()), &near));
                let all = rate(3.0, seconds(|| drop(pull_back(way(), gradient.clone())), &near));
                format!("{what} {forward:7.1} {all:7.1}")
            });
            let line = timed.collect::<Vec<_>>().join("  ");
            println!("{name:<34} {each} micro-batches: forward, with gradients (TFLOP/s): {line}");
            main_grads::detach_all();
        }
    }
}
