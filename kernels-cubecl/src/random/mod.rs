//! Random numbers that are functions of their index, with the same bits on every machine and every GPU.
//!
//! Only integers and operations that IEEE 754 rounds exactly are used: `+ − × ÷ √` and fused multiply-add, no library
//! function. GPU compilers contract `a b + c`, so every multiplication whose result is added to something is either a
//! fused multiply-add here or exact; nothing is left to contract.

#[cfg(feature = "cuda")]
pub mod kernel;
mod philox;

#[cfg(feature = "cuda")]
pub use kernel::{Normal, ShardPosition, normal};
pub use philox::philox4x32;

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_PI_2, LN_2};

/// `1 / (2 k + 1)` from `k = 9` down to 0: `ln((1 + s) / (1 − s)) = 2 s Σ s²ᵏ / (2 k + 1)`. For `s² < 0.0295` the
/// truncation error is below 2⁻⁵⁴ of the sum.
const LOGARITHM: [f64; 10] =
    [1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0];

/// `(−1)ᵏ / (2 k + 1)!` from `k = 11` down to 0. For an angle of up to π/2 the truncation error is below 2⁻⁵⁴ of the
/// sine.
const SINE: [f64; 12] = [
    -1.0 / 25_852_016_738_884_976_640_000.0,
    1.0 / 51_090_942_171_709_440_000.0,
    -1.0 / 121_645_100_408_832_000.0,
    1.0 / 355_687_428_096_000.0,
    -1.0 / 1_307_674_368_000.0,
    1.0 / 6_227_020_800.0,
    -1.0 / 39_916_800.0,
    1.0 / 362_880.0,
    -1.0 / 5040.0,
    1.0 / 120.0,
    -1.0 / 6.0,
    1.0,
];

/// Powers of two by which a small number is scaled towards one, the largest first.
const STEPS: [u32; 6] = [32, 16, 8, 4, 2, 1];

/// The two numbers of element `index` of stream `stream`: four words of [`philox4x32`].
pub fn words(seed: u64, stream: u64, index: u64) -> [u32; 4] {
    philox4x32(
        [index as u32, (index >> 32) as u32, stream as u32, (stream >> 32) as u32],
        [seed as u32, (seed >> 32) as u32],
    )
}

/// A number of the standard normal distribution by the Box-Muller transform, of which one half is used: the radius from
/// 52 bits, the angle within a quarter of the circle from 52 bits, the sign from one. The largest is 8.6.
pub fn standard_normal(words: [u32; 4]) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("fma") {
        /// The same with the processor's own instruction; without it a fused multiply-add is a function call.
        #[target_feature(enable = "fma")]
        fn fused(words: [u32; 4]) -> f64 {
            box_muller(words)
        }
        // SAFETY: the processor has the instruction.
        return unsafe { fused(words) };
    }
    box_muller(words)
}

#[inline(always)]
fn box_muller(words: [u32; 4]) -> f64 {
    let square = -2.0 * logarithm(fraction(words[0], 20, words[1] >> 12));
    let sine = sine(fraction(words[2] & 0x7fff_ffff, 21, words[3] >> 11));
    let value = square.sqrt() * sine;
    if words[2] >> 31 == 1 { -value } else { value }
}

/// `(high 2^shift + low + ½) / 2⁵²`, without rounding: in the open interval (0, 1).
#[inline(always)]
fn fraction(high: u32, shift: u32, low: u32) -> f64 {
    let whole = f64::from(high).mul_add(f64::from(1u32 << shift), f64::from(low));
    (whole + 0.5) * (1.0 / (1u64 << 52) as f64)
}

/// The natural logarithm of a number in `2⁻⁵³..1`.
#[inline(always)]
fn logarithm(x: f64) -> f64 {
    let (mut x, mut exponent) = (x, 0.0);
    for step in STEPS {
        let scale = (1u64 << step) as f64;
        if x * scale < 1.0 {
            x *= scale;
            exponent -= f64::from(step);
        }
    }
    if x < FRAC_1_SQRT_2 {
        x *= 2.0;
        exponent -= 1.0;
    }
    let s = (x - 1.0) / (x + 1.0);
    let z = s * s;
    let sum = LOGARITHM.into_iter().reduce(|sum, c| sum.mul_add(z, c)).unwrap_or_default();
    exponent.mul_add(LN_2, 2.0 * s * sum)
}

/// The sine of `x` quarters of a circle, `0 ≤ x ≤ 1`.
#[inline(always)]
fn sine(x: f64) -> f64 {
    let angle = x * FRAC_PI_2;
    let square = angle * angle;
    angle * SINE.into_iter().reduce(|sum, c| sum.mul_add(square, c)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(seed: u64, count: u64) -> Vec<f64> {
        (0..count).map(|index| standard_normal(words(seed, 1, index))).collect()
    }

    #[test]
    fn functions_are_those_of_the_library_but_for_a_rounding() {
        for index in 0..20_000u64 {
            let [a, b, ..] = words(3, 0, index);
            // Small numbers too, which samples hardly reach.
            let x = fraction(a >> (index % 32), 20, b >> 12);
            for (name, found, expected) in [("ln", logarithm(x), x.ln()), ("sin", sine(x), (x * FRAC_PI_2).sin())] {
                assert!(
                    (found - expected).abs() <= 4.0 * f64::EPSILON * expected.abs(),
                    "{name} {x}: {found} {expected}"
                );
            }
        }
        assert_eq!(sine(1.0), 1.0);
        assert!((logarithm(fraction(0, 20, 0)) + 53.0 * LN_2).abs() < 1e-14);
        assert!(logarithm(fraction(u32::MAX, 20, (1 << 20) - 1)) < 0.0);
    }

    /// Bounds are five standard errors of 400,000 draws of a normal distribution.
    #[test]
    fn moments_and_tails_are_normal() {
        let count = 400_000;
        let values = draw(11, count);
        let mean = |power: i32| values.iter().map(|value| value.powi(power)).sum::<f64>() / count as f64;
        let error = |variance: f64| 5.0 * (variance / count as f64).sqrt();
        for (power, expected, variance) in
            [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0), (6, 15.0, 10_170.0)]
        {
            assert!((mean(power) - expected).abs() < error(variance), "moment {power}: {}", mean(power));
        }
        for (above, share) in [(1.0, 0.317_310_5), (2.0, 0.045_500_3), (3.0, 0.002_699_8), (4.0, 6.334e-5)] {
            let found = values.iter().filter(|value| value.abs() > above).count() as f64 / count as f64;
            assert!((found - share).abs() < error(share * (1.0 - share)), "beyond {above}: {found}");
        }
        // Neighbours, and the same index with another seed, are independent.
        let product = |other: &[f64]| values.iter().zip(other).map(|(a, b)| a * b).sum::<f64>() / count as f64;
        assert!(product(&values[1..]).abs() < error(1.0) && product(&draw(12, count)).abs() < error(1.0));
    }

    /// No machine and no later version may change these bits: resumed runs depend on their seeds.
    #[test]
    fn bits_are_these_for_ever() {
        let bits: Vec<u64> = (0..4).map(|index| standard_normal(words(1, 2, index << 31)).to_bits()).collect();
        let known = [0x3fd4_2ecb_28bd_1d8b, 0x3fec_98c6_e150_489f, 0x3fcc_89e2_7bcc_6a75, 0x3ff1_63cb_211d_c139];
        assert_eq!(bits, known, "{bits:#018x?}");
    }
}
