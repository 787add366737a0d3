//! Runs two formulations on the same inputs and compares outputs and gradients.

use burn::tensor::{DType, Device, Tensor, TensorData};

/// Pseudo-random numbers in `-1.5..1.5`.
pub fn numbers(n: usize, seed: usize) -> Vec<f64> {
    (0..n).map(|i| (((i + 1) as f64 * 12.9898 + seed as f64 * 78.233).sin() * 43_758.545_3).fract() * 1.5).collect()
}

/// A flat leaf on the autodiff device.
pub fn leaf(values: &[f64], dtype: DType, tracked: bool) -> Tensor<1> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    let x = Tensor::<1>::from_data(data, (&Device::flex().autodiff(), dtype));
    if tracked { x.require_grad() } else { x }
}

pub fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}

/// The largest difference of two lists relative to the largest element.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let worst = a.iter().zip(b).fold(0.0f64, |m, (a, b)| {
        assert!(a.is_finite() && b.is_finite(), "{a} and {b}");
        m.max((a - b).abs())
    });
    if worst == 0.0 { 0.0 } else { worst / scale }
}

/// Output and gradients of `f`, one for each tracked input.
pub fn run(
    f: &dyn Fn(Vec<Tensor<1>>) -> Tensor<1>,
    inputs: &[Vec<f64>],
    tracked: &[bool],
    dtype: DType,
) -> (Vec<f64>, Vec<Option<Vec<f64>>>) {
    let leaves: Vec<Tensor<1>> = inputs.iter().zip(tracked).map(|(v, &t)| leaf(v, dtype, t)).collect();
    let out = f(leaves.clone());
    let result = values(out.clone());
    if !tracked.contains(&true) {
        return (result, vec![None; inputs.len()]);
    }
    // A weighted sum, so that every output element has a different gradient.
    let weights = leaf(&numbers(result.len(), 99), dtype, false);
    let grads = (out * weights).sum().backward();
    (result, leaves.iter().map(|x| x.grad(&grads).map(values)).collect())
}

/// Compares outputs and gradients for every choice of tracked inputs, in f64 to 1e-12 and in f32 to rounding.
pub fn same(
    name: &str,
    sizes: &[usize],
    fused: impl Fn(Vec<Tensor<1>>) -> Tensor<1>,
    plain: impl Fn(Vec<Tensor<1>>) -> Tensor<1>,
) {
    let inputs: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(i, &n)| numbers(n, i)).collect();
    for choice in 0..1 << sizes.len() {
        let tracked: Vec<bool> = (0..sizes.len()).map(|i| choice >> i & 1 == 1).collect();
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 3e-6)] {
            let (out, grads) = run(&fused, &inputs, &tracked, dtype);
            // The reference is always f64.
            let (expected, expected_grads) = run(&plain, &inputs, &tracked, DType::F64);
            let off = distance(&out, &expected);
            assert!(off < tolerance, "{name} {dtype:?}: output off by {off:e}");
            for (i, (grad, expected)) in grads.iter().zip(&expected_grads).enumerate() {
                assert_eq!(grad.is_some(), tracked[i], "{name}: gradient of input {i}");
                if let (Some(grad), Some(expected)) = (grad, expected) {
                    let off = distance(grad, expected);
                    assert!(off < tolerance, "{name} {dtype:?}: gradient {i} off by {off:e}, tracked {tracked:?}");
                }
            }
        }
    }
}
