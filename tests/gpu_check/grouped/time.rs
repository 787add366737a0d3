//! Times of grouped GEMMs at the sizes of models.
use super::gemms::{ALL, GroupedGemm, Layer, Method, multiply, random, shapes};
use crate::choice::Choice;
use crate::clock;
use crate::numbers::{greatest_on_device, most};
use crate::report::Report;
use burn::backend::Cube;
use burn::tensor::{DType, Device, Tensor};
use kernels_cubecl::grouped::Epilogue;

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
pub fn models() -> Vec<(&'static str, Layer)> {
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

pub fn names() -> Vec<String> {
    models().into_iter().map(|(name, _)| name.to_owned()).collect()
}

/// Prints a line for each model and GEMM.
pub fn time(device: &Device, choice: &Choice, report: &mut Report) {
    let mut lines = Vec::new();
    for (name, layer) in models().into_iter().filter(|(name, _)| choice.wants(name)) {
        for what in ALL.into_iter().filter(|what| what.1 != Epilogue::Fp32) {
            let line = line(device, name, &layer, what, report);
            println!("{line}");
            lines.push(line);
        }
    }
    println!(
        "\n{:<34} {:<24} {:>8} {:>8} {:>8} {:>8} {:>8}  error (TFLOP/s)",
        "layer", "GEMM", "loop", "wide", "narrow", "staging", "paired"
    );
    lines.iter().for_each(|line| println!("{line}"));
}

fn line(device: &Device, name: &str, layer: &Layer, what: GroupedGemm, report: &mut Report) -> String {
    let [left, right, shape] = shapes(layer, what.0);
    let [left, right] = [left, right].map(|shape| random(shape, device, DType::BF16));
    let is_narrow = what.1 == Epilogue::InputType;
    let dtype = if is_narrow { DType::BF16 } else { DType::F32 };
    let zeros = || Tensor::<1>::zeros([shape[0] * shape[1]], (device, dtype)).reshape(shape);
    let run = |method, out: &Tensor<2>| multiply(layer, what, method, [&left, &right, out]);
    let expected = run(Method::Loop, &zeros());
    let mut speeds = Vec::new();
    let mut worst = 0.0;
    for method in [Method::Loop, Method::Wide, Method::Narrow, Method::WideStaging, Method::Paired] {
        let out = zeros();
        let error = greatest_on_device(run(method, &out), expected.clone());
        // Both have rounded to bf16, or have added in fp32 in another order.
        let limit = if is_narrow { 1.0 / 64.0 } else { 1e-3 };
        report.quiet_error(format!("{name} {what:?} {method:?}"), error, limit);
        worst = most([worst, error]);
        let seconds = seconds(|| drop(run(method, &out)), &left);
        speeds.push(format!("{:8.1}", layer.flops() / seconds / 1e12));
    }
    format!("{name:<34} {:<24} {}  {worst:.1e}", format!("{:?} {:?}", what.0, what.1), speeds.join(" "))
}

/// Seconds of a call, which works on the device of `near`.
pub fn seconds(call: impl Fn(), near: &Tensor<2>) -> f64 {
    let client = near.clone().try_into_primitive::<Cube>().expect("a tensor on a GPU").client;
    clock::kernel(&client, |_| call())
}
