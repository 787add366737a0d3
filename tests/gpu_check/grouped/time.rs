//! Times of grouped GEMMs at the sizes of models.
use crate::gemms::{ALL, GroupedGemm, Layer, Method, multiply, result};
use burn::backend::Cube;
use burn::tensor::{DType, Device, Distribution, Tensor};
use kernels_cubecl::grouped::{Epilogue, Gemm};
use std::time::Instant;

/// Batches, whose median counts, and seconds of a batch.
const BATCHES: usize = 5;
const SECONDS: f64 = 0.03;

/// `rows` over `groups`, unevenly, in multiples of 128.
pub fn counts(groups: usize, rows: usize) -> Vec<usize> {
    let mean = rows / groups / 128;
    let at = |group: usize| {
        let away = (mean / 2).min(3 + mean / 4) as isize;
        let step = [0, 1, -1, 0, 1, -1, -1, 1][group % 8];
        ((mean as isize + step * away) * 128) as usize
    };
    let mut counts: Vec<usize> = (0..groups).map(at).collect();
    let found: usize = counts.iter().sum();
    counts[0] += rows - found.min(rows);
    counts
}

/// First and second linear layer of experts: hidden to twice the intermediate size, and back.
fn models() -> Vec<(&'static str, Layer)> {
    let mut all = Vec::new();
    for (names, groups, rows, hidden, intermediate) in [
        (["Mixtral 8x7B, 4 experts, in", "Mixtral 8x7B, 4 experts, out"], 4, 16_384, 4096, 14_336),
        (["Qwen3 30B-A3B, 128 experts, in", "Qwen3 30B-A3B, 128 experts, out"], 128, 65_536, 2048, 768),
        (["Qwen3 30B-A3B, 64 experts, in", "Qwen3 30B-A3B, 64 experts, out"], 64, 65_536, 2048, 768),
        (["Llama 3 8B, a dense layer, in", "Llama 3 8B, a dense layer, out"], 1, 8192, 4096, 14_336),
        (["gpt-oss-20b, 32 experts, in", "gpt-oss-20b, 32 experts, out"], 32, 32_768, 2880, 2880),
        (["DeepSeek-V3, 32 experts, in", "DeepSeek-V3, 32 experts, out"], 32, 32_768, 7168, 2048),
    ] {
        let counts = counts(groups, rows);
        all.push((names[0], Layer { counts: counts.clone(), features: 2 * intermediate, inner: hidden }));
        all.push((names[1], Layer { counts, features: hidden, inner: intermediate }));
    }
    all
}

/// Prints a line for each model and GEMM; returns the number of wrong results.
pub fn time(device: &Device, words: &[String]) -> usize {
    let mut bad = 0;
    let mut lines = Vec::new();
    for (name, layer) in models() {
        if !words.is_empty() && !words.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        for what in ALL.into_iter().filter(|what| what.1 != Epilogue::Fp32) {
            let line = line(device, name, &layer, what, &mut bad);
            println!("{line}");
            lines.push(line);
        }
    }
    println!(
        "\n{:<34} {:<24} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  error (TFLOP/s)",
        "layer", "GEMM", "loop", "wide", "narrow", "staging", "paired", "prefetch"
    );
    lines.iter().for_each(|line| println!("{line}"));
    bad
}

fn line(device: &Device, name: &str, layer: &Layer, what: GroupedGemm, bad: &mut usize) -> String {
    let rows = layer.rows();
    // A tensor that is created as a matrix may have gaps between its rows.
    let random = |[rows, columns]: [usize; 2]| {
        let numbers = Tensor::<1>::random([rows * columns], Distribution::Normal(0.0, 1.0), (device, DType::BF16));
        numbers.reshape([rows, columns])
    };
    let (x, y) = ([rows, layer.inner], [rows, layer.features]);
    let shapes = match what.0 {
        Gemm::Forward => [x, layer.matrices()],
        Gemm::InputGradient => [y, layer.matrices()],
        Gemm::WeightGradient => [y, x],
    };
    let operands = shapes.map(random);
    let dtype = if what.1 == Epilogue::InputType { DType::BF16 } else { DType::F32 };
    let shape = result(layer, what.0);
    let zeros = || Tensor::<1>::zeros([shape[0] * shape[1]], (device, dtype)).reshape(shape);
    let expected = run(layer, what, Method::Loop, &operands, &zeros());
    let mut speeds = Vec::new();
    let mut worst = 0.0;
    for method in [Method::Loop, Method::Wide, Method::Narrow, Method::WideStaging, Method::Paired, Method::Prefetch] {
        let out = zeros();
        let found = run(layer, what, method, &operands, &out);
        let error = difference(found, expected.clone());
        // Both have rounded to bf16, or have added in fp32 in another order.
        let limit = if what.1 == Epilogue::InputType { 1.0 / 64.0 } else { 1e-3 };
        *bad += usize::from(error.is_nan() || error > limit);
        worst = if error.is_nan() { error } else { error.max(worst) };
        let seconds = median(|| drop(run(layer, what, method, &operands, &out)), &operands[0]);
        speeds.push(format!("{:8.1}", layer.flops() / seconds / 1e12));
    }
    format!("{name:<34} {:<24} {}  {worst:.1e}", format!("{:?} {:?}", what.0, what.1), speeds.join(" "))
}

fn run(layer: &Layer, what: GroupedGemm, method: Method, [left, right]: &[Tensor<2>; 2], out: &Tensor<2>) -> Tensor<2> {
    multiply(layer, what, method, [left, right, out])
}

/// The greatest difference over the number itself and the root mean square.
fn difference(found: Tensor<2>, expected: Tensor<2>) -> f64 {
    let (found, expected) = (found.cast(DType::F32), expected.cast(DType::F32));
    let mean = expected.clone().square().mean().sqrt().reshape([1, 1]);
    let scale = expected.clone().abs().add(mean);
    let worst = (found - expected).abs().div(scale).max();
    worst.into_data().convert::<f64>().try_to_vec::<f64>().expect("converted to f64")[0]
}

/// Seconds of a call, which works on the device of `near`.
pub fn median(call: impl Fn(), near: &Tensor<2>) -> f64 {
    let client = near.clone().try_into_primitive::<Cube>().expect("a tensor on a GPU").client;
    // Reading a finished tensor would not wait for work that was issued after it.
    let sync = || cubecl::future::block_on(client.sync()).expect("the GEMMs ran");
    let batch = |calls: usize| {
        sync();
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        sync();
        start.elapsed().as_secs_f64() / calls as f64
    };
    batch(1);
    let calls = (SECONDS / batch(2)).clamp(3.0, 100.0) as usize;
    let mut seconds = [0; BATCHES].map(|_| batch(calls));
    seconds.sort_by(f64::total_cmp);
    seconds[BATCHES / 2]
}
