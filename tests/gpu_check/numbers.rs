//! Random numbers, and how far results are from what is expected.

use burn::tensor::{DType, Tensor};

/// Numbers in `0..1`: Marsaglia's xorshift.
pub fn uniform(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }
}

/// Normal numbers.
pub fn normal(len: usize, seed: u64) -> impl Iterator<Item = f64> {
    let mut next = uniform(seed);
    (0..len).map(move |_| (-2.0 * next().ln()).sqrt() * (std::f64::consts::TAU * next()).cos())
}

/// A tensor's values.
pub fn host<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}

/// Norm of the difference over the norm of the expected numbers; infinite if there are not as many of them.
pub fn relative(found: &[f64], expected: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let is_whole = found.len() == expected.len();
    if is_whole { difference / norm(&mut expected.iter().copied()).max(1e-30) } else { f64::INFINITY }
}

/// The same of tensors that are too large for the host.
pub fn relative_on_device<const D: usize>(found: Tensor<D>, expected: Tensor<D>) -> f64 {
    let [found, expected] = [found, expected].map(|x| x.cast(DType::F32));
    let square = |x: Tensor<D>| f64::from((x.clone() * x).sum().into_scalar::<f32>());
    (square(found - expected.clone()) / square(expected)).sqrt()
}

/// The greatest difference over the number itself and the root mean square of all.
pub fn greatest(found: &[f64], expected: &[f64]) -> f64 {
    let mean = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt().max(1e-30);
    let worst = most(found.iter().zip(expected).map(|(a, b)| (a - b).abs() / (b.abs() + mean)));
    if found.len() == expected.len() { worst } else { f64::INFINITY }
}

/// The same of tensors that are too large for the host.
pub fn greatest_on_device<const D: usize>(found: Tensor<D>, expected: Tensor<D>) -> f64 {
    let [found, expected] = [found, expected].map(|x| x.cast(DType::F32));
    let mean = expected.clone().square().mean().sqrt().reshape([1; D]);
    let scale = expected.clone().abs().add(mean);
    host((found - expected).abs().div(scale).max())[0]
}

/// The largest of numbers that are not negative; a NaN if there is one.
pub fn most(numbers: impl IntoIterator<Item = f64>) -> f64 {
    numbers.into_iter().fold(0.0, |most, number| if number > most || number.is_nan() { number } else { most })
}
