//! Small sizes against fp64.
use super::gemms::{ALL, GroupedGemm, Layer, Method, matrix, multiply, shapes};
use super::reference;
use crate::numbers::{greatest, host};
use crate::report::Report;
use backend_dist::ops::grouped;
use burn::tensor::{DType, Device, Tensor, TensorData};
use kernels_cubecl::grouped::{Epilogue, Gemm};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Groups of many sizes, some of them empty, results that do not fill tiles, and inner dimensions that are no multiple
/// of a step.
fn layers() -> Vec<Layer> {
    let layer = |counts: &[usize], features, inner| Layer { counts: counts.to_vec(), features, inner };
    vec![
        layer(&[128], 64, 64),
        layer(&[256, 0, 128], 192, 72),
        layer(&[0, 384, 128, 0, 256], 320, 264),
        layer(&[128; 7], 576, 520),
        layer(&[2304, 128], 256, 256),
        layer(&[128, 256], 1024, 2048),
    ]
}

/// Sizes for which there is no kernel.
fn others() -> Vec<Layer> {
    vec![
        Layer { counts: vec![128, 100], features: 64, inner: 64 },
        Layer { counts: vec![128, 0, 128], features: 104, inner: 60 },
    ]
}

pub fn check(device: &Device, report: &mut Report) {
    let all = [Method::Wide, Method::Narrow, Method::WideStaging, Method::Paired, Method::Default, Method::Loop];
    for dtype in [DType::BF16, DType::F16] {
        let known = layers().into_iter().map(|layer| (layer, &all[..]));
        for (layer, methods) in known.chain(others().into_iter().map(|layer| (layer, &[Method::Default][..]))) {
            // A refused call is a wrong result; the other sizes are still checked.
            let done = catch_unwind(AssertUnwindSafe(|| check_layer(device, &layer, dtype, methods, report)));
            report.attempt(format!("{layer:?} in {dtype:?}"), done.map_err(|_| "a call panics"));
        }
    }
}

fn check_layer(device: &Device, layer: &Layer, dtype: DType, methods: &[Method], report: &mut Report) {
    check_biased(device, layer, dtype, report);
    for (gemm, epilogue) in ALL {
        let [left_shape, right_shape, shape] = shapes(layer, gemm);
        let numbers = |shape: [usize; 2], seed| reference::numbers(shape[0] * shape[1], seed);
        let (left, right) = (numbers(left_shape, 1), numbers(right_shape, 2));
        let len = shape[0] * shape[1];
        let there = if epilogue == Epilogue::AddFp32 { numbers(shape, 3) } else { vec![0.0; len] };
        let expected = reference::multiply(layer, gemm, &left, &right, &there);
        for &method in methods {
            // Numbers that nothing writes must not look like a result.
            let before = if epilogue == Epilogue::AddFp32 { there.clone() } else { vec![f64::NAN; len] };
            let out = matrix(before, shape, device, if epilogue == Epilogue::InputType { dtype } else { DType::F32 });
            let operands = [(&left, left_shape), (&right, right_shape)];
            let [left, right] = operands.map(|(values, shape)| matrix(values.clone(), shape, device, dtype));
            let found = host(multiply(layer, (gemm, epilogue), method, [&left, &right, &out]));
            let sizes = format!("{:?} · {} · {}", layer.counts, layer.features, layer.inner);
            let what = format!("{dtype:?} {gemm:?} {epilogue:?} {method:?} {sizes}");
            let (error, bound) = (greatest(&found, &expected), limit((gemm, epilogue), dtype));
            match method {
                Method::Wide => report.error(what, error, bound),
                _ => report.quiet_error(what, error, bound),
            }
        }
    }
}

/// The forward GEMM with biases, as the library chooses and as a GEMM for each group.
fn check_biased(device: &Device, layer: &Layer, dtype: DType, report: &mut Report) {
    let [left_shape, right_shape, shape] = shapes(layer, Gemm::Forward);
    let numbers = |len: usize, seed| reference::numbers(len, seed);
    let (left, right) = (numbers(left_shape[0] * left_shape[1], 1), numbers(right_shape[0] * right_shape[1], 2));
    let (bias, factors) = (numbers(right_shape[0], 4), numbers(shape[0], 5));
    let groups = layer.counts.iter().enumerate().flat_map(|(group, count)| std::iter::repeat_n(group, *count));
    let features = layer.features;
    let there: Vec<f64> = groups
        .zip(&factors)
        .flat_map(|(group, factor)| bias[group * features..][..features].iter().map(move |bias| bias * factor))
        .collect();
    let expected = reference::multiply(layer, Gemm::Forward, &left, &right, &there);
    for method in [None, Some(grouped::Method::Loop)] {
        let operands = [(&left, left_shape), (&right, right_shape)];
        let [left, right] = operands.map(|(values, shape)| matrix(values.clone(), shape, device, dtype));
        let vector = |values: &[f64], dtype| Tensor::<1>::from_data(TensorData::from(values), (device, dtype));
        let bias = [vector(&bias, dtype), vector(&factors, DType::F32)];
        let found = host(grouped::biased_forward(left, right, bias, &layer.counts, method));
        let what =
            format!("{dtype:?} forward with biases, {method:?}, {:?} · {features} · {}", layer.counts, layer.inner);
        // A GEMM for each group rounds twice.
        let limit = 2.0 * limit((Gemm::Forward, Epilogue::InputType), dtype);
        report.error(what, greatest(&found, &expected), limit);
    }
}

/// Half a unit in the last place of the result, plus the rounding errors of fp32 sums.
fn limit((_, epilogue): GroupedGemm, dtype: DType) -> f64 {
    let rounding = match (epilogue, dtype) {
        (Epilogue::InputType, DType::F16) => 1.0 / 2048.0,
        (Epilogue::InputType, _) => 1.0 / 256.0,
        _ => 0.0,
    };
    rounding + 1e-5
}
