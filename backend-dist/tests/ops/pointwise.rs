//! Linear, norms, position embedding, activations, embedding.

use crate::compare::{distance, numbers, run, same, values};
use backend_dist::ops::{
    GeluKind, embedding, gelu, layer_norm, linear, rms_norm, rope, rope_packed, squared_relu, swiglu,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Large, so that a matrix row of one element has significant digits: its gradient is `w eps / (x² + eps)^1.5`.
const EPS: f64 = 0.1;

#[test]
fn linear_is_a_gemm_with_the_transpose() {
    for [s, b, input, output] in [[3, 2, 5, 7], [1, 1, 1, 1], [1, 4, 33, 2], [65, 3, 17, 130], [128, 12, 64, 96]] {
        let plain = |x: Vec<Tensor<1>>| {
            let x: [Tensor<1>; 2] = x.try_into().unwrap();
            let [x, w] = x;
            x.reshape([s * b, input]).matmul(w.reshape([output, input]).transpose()).reshape([s * b * output])
        };
        let fused = |x: Vec<Tensor<1>>| {
            linear(x[0].clone().reshape([s, b, input]), x[1].clone().reshape([output, input])).reshape([s * b * output])
        };
        same("linear", &[s * b * input, output * input], fused, plain);
        // Transposed leading dimensions do not collapse; a narrowed last dimension does, with a stride.
        let views = |x: Vec<Tensor<1>>| {
            let w: Tensor<2> = x[1].clone().reshape([input, output]).transpose();
            linear(x[0].clone().reshape([b, s, input]).swap_dims(0, 1), w).reshape([s * b * output])
        };
        let plain_views = |x: Vec<Tensor<1>>| {
            let w: Tensor<2> = x[1].clone().reshape([input, output]);
            let x: Tensor<3> = x[0].clone().reshape([b, s, input]).swap_dims(0, 1);
            x.reshape([s * b, input]).matmul(w).reshape([s * b * output])
        };
        same("linear of views", &[s * b * input, output * input], views, plain_views);
        let narrowed = |x: Vec<Tensor<1>>| {
            let x0: Tensor<3> = x[0].clone().reshape([s, b, 2 * input]).narrow(2, input, input);
            linear(x0, x[1].clone().reshape([output, input])).reshape([s * b * output])
        };
        let plain_narrowed = |x: Vec<Tensor<1>>| {
            let x0: Tensor<3> = x[0].clone().reshape([s, b, 2 * input]).narrow(2, input, input);
            let w: Tensor<2> = x[1].clone().reshape([output, input]);
            x0.reshape([s * b, input]).matmul(w.transpose()).reshape([s * b * output])
        };
        same("linear of a part", &[2 * s * b * input, output * input], narrowed, plain_narrowed);
    }
}

#[test]
fn norms() {
    for [s, b, h] in [[3, 2, 8], [1, 1, 1], [5, 1, 33], [2, 7, 130], [96, 12, 128]] {
        let n = s * b * h;
        let rms = |x: Vec<Tensor<1>>| {
            let y: Tensor<3> = x[0].clone().reshape([s, b, h]);
            let scale = (y.clone().powi_scalar(2).mean_dim(2) + EPS).sqrt();
            (y / scale * x[1].clone().reshape([1, 1, h])).reshape([n])
        };
        let fused = |x: Vec<Tensor<1>>| rms_norm(x[0].clone().reshape([s, b, h]), x[1].clone(), EPS).reshape([n]);
        same("rms_norm", &[n, h], fused, rms);

        let layer = |x: Vec<Tensor<1>>| {
            let y: Tensor<3> = x[0].clone().reshape([b, s, h]).swap_dims(0, 1);
            let y = y.clone() - y.mean_dim(2);
            let scale = (y.clone().powi_scalar(2).mean_dim(2) + EPS).sqrt();
            (y / scale * x[1].clone().reshape([1, 1, h]) + x[2].clone().reshape([1, 1, h])).reshape([n])
        };
        let fused = |x: Vec<Tensor<1>>| {
            let y: Tensor<3> = x[0].clone().reshape([b, s, h]).swap_dims(0, 1);
            layer_norm(y, x[1].clone(), x[2].clone(), EPS).reshape([n])
        };
        same("layer_norm of a transposed view", &[n, h, h], fused, layer);
    }
}

fn angles(s: usize, half: usize, x: &Tensor<1>) -> [Tensor<2>; 2] {
    let like = |seed| {
        let data = TensorData::new(numbers(s * half, seed), [s, half]);
        Tensor::<2>::from_data(data, (&Device::flex().autodiff(), x.dtype()))
    };
    [like(50).cos(), like(50).sin()]
}

#[test]
fn rope_turns_halves() {
    for ([s, b, h, d], half) in [([3, 2, 2, 8], 4), ([1, 1, 1, 2], 1), ([5, 1, 3, 10], 3), ([7, 3, 1, 6], 0)] {
        let n = s * b * h * d;
        let plain = |x: Vec<Tensor<1>>| {
            let [cos, sin] = angles(s, half.max(1), &x[0]).map(|t| t.reshape([s, 1, 1, half.max(1)]));
            let x: Tensor<4> = x[0].clone().reshape([s, b, h, d]);
            if half == 0 {
                return x.reshape([n]);
            }
            let (a, c) = (x.clone().narrow(3, 0, half), x.clone().narrow(3, half, half));
            let mut parts = vec![a.clone() * cos.clone() - c.clone() * sin.clone(), c * cos + a * sin];
            if 2 * half < d {
                parts.push(x.narrow(3, 2 * half, d - 2 * half));
            }
            Tensor::cat(parts, 3).reshape([n])
        };
        let fused = |x: Vec<Tensor<1>>| {
            let [cos, sin] = angles(s, half.max(1), &x[0]).map(|t| t.narrow(1, 0, half.max(1)));
            let cos_sin = if half == 0 { [cos, sin].map(|t| t.slice([0..s, 0..0])) } else { [cos, sin] };
            let [cos, sin] = cos_sin;
            rope(x[0].clone().reshape([s, b, h, d]), cos, sin).reshape([n])
        };
        same("rope", &[n], fused, plain);
    }
}

#[test]
fn packed_rope_turns_the_first_heads_of_a_view() {
    let ([s, b, h, d], half, turned) = ([5, 2, 4, 6], 3, 2);
    let n = s * b * h * d;
    let view = |x: &Tensor<1>| -> Tensor<4> { x.clone().reshape([b, s, h + 1, d]).swap_dims(0, 1).narrow(2, 1, h) };
    let plain = |x: Vec<Tensor<1>>| {
        let [cos, sin] = angles(s, half, &x[0]).map(|t| t.reshape([s, 1, 1, half]));
        let y = view(&x[0]);
        let turn = y.clone().narrow(2, 0, turned);
        let (a, c) = (turn.clone().narrow(3, 0, half), turn.narrow(3, half, half));
        let turn = Tensor::cat(vec![a.clone() * cos.clone() - c.clone() * sin.clone(), c * cos + a * sin], 3);
        Tensor::cat(vec![turn, y.narrow(2, turned, h - turned)], 2).reshape([n])
    };
    let fused = |x: Vec<Tensor<1>>| {
        let [cos, sin] = angles(s, half, &x[0]);
        rope_packed(view(&x[0]), cos, sin, turned).reshape([n])
    };
    same("rope_packed", &[s * b * (h + 1) * d], fused, plain);
}

#[test]
fn swiglu_gates() {
    for [s, b, f] in [[3, 2, 8], [1, 1, 1], [5, 1, 33], [64, 12, 130]] {
        let n = s * b * f;
        let plain = |x: Vec<Tensor<1>>| {
            let x: Tensor<3> = x[0].clone().reshape([s, b, 2 * f]) * 4.0;
            let gate = x.clone().narrow(2, 0, f);
            let silu = gate.clone() / ((-gate).exp() + 1.0);
            (silu * x.narrow(2, f, f)).reshape([n])
        };
        let fused = |x: Vec<Tensor<1>>| swiglu(x[0].clone().reshape([s, b, 2 * f]) * 4.0).reshape([n]);
        same("swiglu", &[2 * n], fused, plain);
    }
}

#[test]
fn gelu_tanh_is_the_formula() {
    for n in [1, 7, 64, 100_001] {
        let tanh = |x: Vec<Tensor<1>>| {
            let x = x[0].clone() * 3.0;
            let cube = x.clone() * x.clone() * x.clone() * 0.044715;
            let inner = (x.clone() + cube) * (2.0 / std::f64::consts::PI).sqrt();
            x * (inner.tanh() + 1.0) * 0.5
        };
        same("gelu tanh", &[n], |x| gelu(x[0].clone() * 3.0, GeluKind::Tanh), tanh);
    }
}

#[test]
fn squared_relu_is_the_formula() {
    for n in [1, 7, 64, 100_001] {
        let plain = |x: Vec<Tensor<1>>| {
            let positive = (x[0].clone() + x[0].clone().abs()) * 0.5;
            positive.clone() * positive
        };
        same("squared relu", &[n], |x| squared_relu(x[0].clone()), plain);
    }
}

/// Against libm: the gradient of Burn's own erf is off by 1e-9.
#[test]
fn gelu_erf_is_the_formula() {
    for n in [1, 7, 64, 100_001] {
        let inputs = vec![numbers(n, 0).into_iter().map(|x| 4.0 * x).collect::<Vec<f64>>()];
        let phi = |x: f64| 0.5 * (1.0 + libm::erf(x / 2f64.sqrt()));
        let bell = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let expected: Vec<f64> = inputs[0].iter().map(|&x| x * phi(x)).collect();
        let slopes: Vec<f64> = inputs[0].iter().map(|&x| phi(x) + x * bell(x)).collect();
        let weights = numbers(n, 99);
        let expected_grad: Vec<f64> = slopes.iter().zip(&weights).map(|(a, b)| a * b).collect();
        for (dtype, tolerance) in [(DType::F64, 1e-15), (DType::F32, 1e-6)] {
            let (out, grads) = run(&|x| gelu(x[0].clone(), GeluKind::Erf), &inputs, &[true], dtype);
            assert!(distance(&out, &expected) < tolerance);
            assert!(distance(grads[0].as_ref().unwrap(), &expected_grad) < tolerance);
        }
    }
}

#[test]
fn embedding_takes_rows_held_here() {
    let (rows, hidden) = (5, 3);
    for (ids, [a, b], first_row) in [(vec![0, 4, 2, 2, 1, 0], [2, 3], 0), (vec![5, 6, 12, 9, 7, 6], [3, 2], 5)] {
        let device = Device::flex().autodiff();
        let tensor = || -> Tensor<2, Int> { Tensor::from_data(TensorData::new(ids.clone(), [b, a]), &device) };
        // Row i of the selection matrix has a 1 at the matrix row of the i-th id of the transposed list, if it is
        // local.
        let choice: Vec<f64> = (0..a * b)
            .flat_map(|i| (0..rows).map(move |r| (i, r)))
            .map(|(i, r)| f64::from(ids[(i % b) * a + i / b] == (r + first_row) as i64))
            .collect();
        let plain = |w: Vec<Tensor<1>>| {
            let data = TensorData::new(choice.clone(), [a * b, rows]);
            let choice = Tensor::<2>::from_data(data, (&device, w[0].dtype()));
            let w: Tensor<2> = w[0].clone().reshape([rows, hidden]);
            choice.matmul(w).reshape([a * b * hidden])
        };
        // The ids are a transposed view.
        let fused = |w: Vec<Tensor<1>>| {
            let out = embedding(w[0].clone().reshape([rows, hidden]), tensor().transpose(), first_row);
            assert_eq!(out.dims(), [a, b, hidden]);
            out.reshape([a * b * hidden])
        };
        same("embedding", &[rows * hidden], fused, plain);
    }
}

#[test]
fn without_autodiff_the_values_are_the_same() {
    let x = TensorData::new(numbers(24, 1), [2, 3, 4]);
    let w = TensorData::new(numbers(4, 2), [4]);
    let out = |device: &Device| {
        let x = Tensor::<3>::from_data(x.clone(), (device, DType::F64));
        let w = Tensor::<1>::from_data(w.clone(), (device, DType::F64));
        values(gelu(rms_norm(x, w, EPS), GeluKind::Erf))
    };
    assert_eq!(out(&Device::flex()), out(&Device::flex().autodiff()));
}

#[test]
fn half_precision_is_computed_in_f32() {
    let device = Device::flex();
    let x = TensorData::new(numbers(96, 1), [4, 24]);
    let w = TensorData::new(numbers(24, 2), [24]);
    let out = |dtype| {
        let round = |t: TensorData| t.convert_dtype(DType::BF16);
        let x = Tensor::<2>::from_data(round(x.clone()), (&device, dtype));
        let w = Tensor::<1>::from_data(round(w.clone()), (&device, dtype));
        swiglu(rms_norm(x, w, EPS))
    };
    let (half, single) = (out(DType::BF16), out(DType::F32));
    assert_eq!(half.dtype(), DType::BF16);
    let (half, single) = (values(half), values(single));
    assert!(distance(&half, &single) < 1.0 / 100.0);
    assert!(half != single);
}
