//! Small sizes against fp64.
use crate::gemms::{ALL, GroupedGemm, Layer, Method, multiply, result};
use crate::reference;
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

pub fn check(device: &Device) -> usize {
    let mut bad = 0;
    for dtype in [DType::BF16, DType::F16] {
        for layer in layers() {
            let methods =
                [Method::Wide, Method::Narrow, Method::WideStaging, Method::Paired, Method::Default, Method::Loop];
            bad += checked(|| check_layer(device, &layer, dtype, &methods));
        }
        for layer in others() {
            bad += checked(|| check_layer(device, &layer, dtype, &[Method::Default]));
        }
    }
    bad
}

/// A refused call counts as a wrong result; the other sizes are still checked.
fn checked(check: impl FnOnce() -> usize) -> usize {
    catch_unwind(AssertUnwindSafe(check)).unwrap_or(1)
}

fn check_layer(device: &Device, layer: &Layer, dtype: DType, methods: &[Method]) -> usize {
    let rows = layer.rows();
    let x = reference::numbers(rows * layer.inner, 1);
    let y = reference::numbers(rows * layer.features, 2);
    let w = reference::numbers(layer.matrices().iter().product(), 3);
    let mut bad = 0;
    for (gemm, epilogue) in ALL {
        let (left, right, shapes) = match gemm {
            Gemm::Forward => (&x, &w, [[rows, layer.inner], layer.matrices()]),
            Gemm::InputGradient => (&y, &w, [[rows, layer.features], layer.matrices()]),
            Gemm::WeightGradient => (&y, &x, [[rows, layer.features], [rows, layer.inner]]),
        };
        let shape = result(layer, gemm);
        let len = shape.iter().product();
        let there = if epilogue == Epilogue::AddFp32 { reference::numbers(len, 4) } else { vec![0.0; len] };
        let expected = reference::multiply(layer, gemm, left, right, &there);
        for &method in methods {
            let wide = epilogue != Epilogue::InputType;
            // A tensor that is created as a matrix may have gaps between its rows.
            let tensor = |values: &[f64], shape: [usize; 2], dtype| {
                let data = TensorData::new(values.to_vec(), [values.len()]);
                Tensor::<1>::from_data(data, (device, dtype)).reshape(shape)
            };
            // Numbers that nothing writes must not look like a result.
            let before = if epilogue == Epilogue::AddFp32 { there.clone() } else { vec![f64::NAN; len] };
            let out = tensor(&before, shape, if wide { DType::F32 } else { dtype });
            let operands = [tensor(left, shapes[0], dtype), tensor(right, shapes[1], dtype)];
            let found = multiply(layer, (gemm, epilogue), method, [&operands[0], &operands[1], &out]);
            let found: Vec<f64> = found.into_data().convert::<f64>().try_to_vec().expect("converted to f64");
            let worst = error(&found, &expected);
            let good = worst <= limit((gemm, epilogue), dtype);
            if !good || method == Method::Wide {
                let counts = &layer.counts;
                let sizes = format!("{counts:?} · {} · {}", layer.features, layer.inner);
                let verdict = if good { "ok" } else { "BAD" };
                println!("{dtype:?} {gemm:?} {epilogue:?} {method:?} {sizes:<44} {worst:.1e} {verdict}");
            }
            bad += usize::from(!good);
        }
    }
    bad
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

/// The greatest difference over the number itself and the root mean square of all. A NaN is an infinite one.
fn error(found: &[f64], expected: &[f64]) -> f64 {
    let mean = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt().max(1e-30);
    let each = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / (b.abs() + mean));
    let worst = each.fold(0.0, |worst: f64, x| if x.is_nan() { f64::INFINITY } else { worst.max(x) });
    if found.len() == expected.len() { worst } else { f64::INFINITY }
}
