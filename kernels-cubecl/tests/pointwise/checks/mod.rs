//! The pointwise kernels against their formulas in fp64: the same checks for the cpu runtime and for a GPU.
//!
//! A check uploads random numbers, calls the kernels on poisoned outputs and returns the number of results that are
//! further from the formula than their bounds.
pub mod activation;
pub mod blockwise;
pub mod decode;
pub mod draw;
pub mod fused;
pub mod gated_delta;
pub mod latent;
pub mod low_rank;
pub mod moe;
pub mod norm;
pub mod optimizer;
pub mod recurrent;
pub mod routing;
pub mod rows;
pub mod sinks;
pub mod ssd;
pub mod tokens;

use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

pub const EPS: f64 = 1e-5;

/// An element type of buffers.
pub trait Element: Float {
    const NAME: &'static str;
    /// Greatest error of a result that is rounded to this type once: half of its last digit; for fp32, the rounding of
    /// sums.
    const LIMIT: f64;
    fn write(value: f64, to: &mut Vec<u8>);
    fn read(bytes: &[u8]) -> f64;
}

macro_rules! element {
    ($type:ident, $limit:literal, $value:ident => $rounded:expr) => {
        impl Element for $type {
            const NAME: &'static str = stringify!($type);
            const LIMIT: f64 = $limit;
            fn write($value: f64, to: &mut Vec<u8>) {
                to.extend($rounded.to_le_bytes());
            }
            fn read(bytes: &[u8]) -> f64 {
                <$type>::from_le_bytes(bytes.try_into().expect("the bytes of a number")).into()
            }
        }
    };
}

element!(f32, 1e-5, value => (value as f32));
element!(bf16, 4e-3, value => bf16::from_f64(value));
element!(f16, 6e-4, value => f16::from_f64(value));

/// Numbers with mean 0 and variance 1 (uniform), rounded to bf16.
pub fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let unit = (state >> 11) as f64 / (1u64 << 53) as f64;
            bf16::from_f64((unit - 0.5) * 12f64.sqrt()).to_f64()
        })
        .collect()
}

pub fn upload<E: Element>(client: &Client, values: &[f64]) -> Handle {
    let mut bytes = vec![];
    values.iter().for_each(|value| E::write(*value, &mut bytes));
    client.create_from_slice(&bytes)
}

pub fn upload_u32(client: &Client, values: &[u32]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

pub fn download<E: Element>(client: &Client, handle: &Handle) -> Vec<f64> {
    client.read_one_unchecked(handle.clone()).chunks_exact(size_of::<E>()).map(E::read).collect()
}

pub fn upload_i32(client: &Client, values: &[i32]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

pub fn download_i32(client: &Client, handle: &Handle) -> Vec<i32> {
    let read = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("four bytes"));
    client.read_one_unchecked(handle.clone()).chunks_exact(4).map(read).collect()
}

/// A buffer for `len` numbers, all of them NaN.
pub fn poisoned<E: Element>(client: &Client, len: usize) -> Handle {
    client.create_from_slice(&vec![0xff; len * size_of::<E>()])
}

/// Prints the greatest error, in units of the expected number or of the root mean square, whichever is more. 1 if it is
/// over `limit` or not a number, else 0.
pub fn report(name: &str, found: &[f64], expected: &[f64], limit: f64) -> usize {
    assert_eq!(found.len(), expected.len(), "{name}");
    let mean = (expected.iter().map(|b| b * b).sum::<f64>() / expected.len() as f64).sqrt();
    let error = |(a, b): (&f64, &f64)| match (a - b).abs() {
        0.0 => 0.0,
        far if far.is_nan() => f64::INFINITY,
        far => far / b.abs().max(mean),
    };
    let error = found.iter().zip(expected).map(error).fold(0.0, f64::max);
    let good = error <= limit;
    println!("{name:<44} error {error:.2e} {}", if good { "ok" } else { "BAD" });
    !good as usize
}

/// `value` rounded to `E`.
pub fn round<E: Element>(value: f64) -> f64 {
    let mut bytes = vec![];
    E::write(value, &mut bytes);
    E::read(&bytes)
}

/// Compares fp32 results that were rounded to `E`. `rounded` is an ascending function of a result's index and its fp32
/// value. As fp32 values are close to `exact`, a result must lie between the images of the ends of that interval.
/// Prints the greatest distance to the nearer end, in units of the expected number or of the root mean square. 1 if any
/// lies outside or is not a number, else 0.
pub fn report_rounded<E: Element>(
    name: &str,
    found: &[f64],
    exact: &[f64],
    rounded: impl Fn(usize, f64) -> f64,
) -> usize {
    assert_eq!(found.len(), exact.len(), "{name}");
    let mean = (exact.iter().map(|b| b * b).sum::<f64>() / exact.len() as f64).sqrt();
    let mut greatest: f64 = 0.0;
    for (i, (found, exact)) in found.iter().zip(exact).enumerate() {
        let scale = exact.abs().max(mean);
        let (low, high) = (rounded(i, exact - f32::LIMIT * scale), rounded(i, exact + f32::LIMIT * scale));
        if !(low..=high).contains(found) {
            let far = (low - found).max(found - high) / scale;
            greatest = greatest.max(if far.is_nan() { f64::INFINITY } else { far });
        }
    }
    let good = greatest == 0.0;
    println!("{name:<44} outside by {greatest:.2e} {}", if good { "ok" } else { "BAD" });
    !good as usize
}
