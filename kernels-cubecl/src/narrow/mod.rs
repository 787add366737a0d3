//! Optimizer states in 16 bits, and in 8 ([`dynamic`]). An fp32 number as a bf16 number and a remainder of 16 bits, which together are the fp32
//! number bit for bit (as TransformerEngine's `store_param_remainders`); and stochastic rounding to bf16, with random
//! bits that are a function of the element's place in the global tensor and of the step, so that they depend on no
//! layout.
//!
//! ```
//! use kernels_cubecl::narrow::{join, split};
//!
//! let (weight, remainder) = split(0.1);
//! assert_eq!(join(weight, remainder), 0.1);
//! assert_eq!(f32::from_bits(u32::from(weight) << 16), 0.100_097_656_25, "0.1 rounded to bf16");
//! ```

pub mod dynamic;
#[cfg(feature = "cuda")]
pub(crate) mod kernel;

/// Multipliers of [`mix`]: Wellons' `lowbias32` (<https://nullprogram.com/blog/2018/07/31/>).
pub(crate) const MULTIPLIERS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

/// The bits of infinity without the sign; larger ones are not a number.
pub(crate) const INFINITY: u32 = 0x7f80_0000;

/// A number as the bits of a bf16 weight and a remainder: the weight is the number rounded to nearest, ties away from
/// zero; the remainder is the number's lower half, which says by its own highest bit whether the weight was rounded up.
/// Ties to even would need one bit more. Every finite number and both infinities are found again by [`join`], bit for
/// bit; of what is not a number the payload is lost.
pub fn split(number: f32) -> (u16, u16) {
    let bits = number.to_bits();
    if bits & 0x7fff_ffff > INFINITY {
        return ((bits >> 16) as u16 | 0x40, 0);
    }
    (((bits + 0x8000) >> 16) as u16, bits as u16)
}

/// The number that [`split`] has split.
pub fn join(weight: u16, remainder: u16) -> f32 {
    let rounded_up = u32::from(remainder >> 15);
    f32::from_bits((u32::from(weight).wrapping_sub(rounded_up) << 16) | u32::from(remainder))
}

/// Rounds to a bf16 number below or above, given 16 random bits: to each with the probability that makes the mean equal
/// `number`. What is not a number stays so.
pub fn round(number: f32, random: u16) -> u16 {
    let bits = number.to_bits();
    if bits & 0x7fff_ffff > INFINITY {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + u32::from(random)) >> 16) as u16
}

/// Random bits from bits that are not: a bijection of 32 bits in which every input bit changes every output bit with a
/// probability near one half.
pub fn mix(bits: u32) -> u32 {
    let bits = (bits ^ (bits >> 16)).wrapping_mul(MULTIPLIERS[0]);
    let bits = (bits ^ (bits >> 15)).wrapping_mul(MULTIPLIERS[1]);
    bits ^ (bits >> 16)
}

/// Where the elements of a local array lie in their global tensor: element `i` has the global index
/// `(first + i) / block * stride + offset + (first + i) % block`, all modulo 2³².
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// A hash of the tensor's name.
    pub key: u32,
    /// Number of the array's first element in the rank's slice.
    pub first: u32,
    /// Neighbouring elements of the slice; at least one.
    pub block: u32,
    /// Elements from a block of the slice to the next, in the global tensor.
    pub stride: u32,
    /// Global index of the first block.
    pub offset: u32,
}

impl Place {
    /// The random bits of element `i` in a step: the lower half is for the first moment, the upper for the second.
    pub fn random(&self, i: u32, step: u32) -> u32 {
        let local = self.first.wrapping_add(i);
        let block = (local / self.block).wrapping_mul(self.stride);
        let index = block.wrapping_add(self.offset).wrapping_add(local % self.block);
        mix(mix(index ^ self.key) ^ step)
    }

    /// The five numbers, as kernels read them.
    pub fn words(&self) -> [u32; 5] {
        [self.key, self.first, self.block, self.stride, self.offset]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bit pattern of a finite number, and rounding to nearest.
    #[test]
    fn every_finite_number_is_found_again() {
        // All upper halves, with the lower halves near every decision and some in between.
        let lower = [0u32, 1, 2, 0x1234, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x9abc, 0xfffe, 0xffff];
        for upper in 0..=0xffffu32 {
            for bits in lower.map(|lower| upper << 16 | lower) {
                let number = f32::from_bits(bits);
                let (weight, remainder) = split(number);
                if number.is_nan() {
                    assert!(join(weight, remainder).is_nan(), "{bits:x}");
                    continue;
                }
                assert_eq!(join(weight, remainder).to_bits(), bits, "{bits:x}");
                let rounded = if bits & 0xffff >= 0x8000 { upper + 1 } else { upper };
                assert_eq!(u32::from(weight), rounded, "{bits:x}");
            }
        }
        // The whole of one binade, both signs.
        for bits in (0x3f80_0000..0x3f81_0000u32).chain(0xbf7f_0000..0xbf80_0000) {
            let (weight, remainder) = split(f32::from_bits(bits));
            assert_eq!(join(weight, remainder).to_bits(), bits);
        }
    }

    #[test]
    fn rounding_is_unbiased_and_keeps_what_is_exact() {
        for number in [1.0f32, -0.0, 0.0, -3.5, f32::INFINITY] {
            assert_eq!(f32::from_bits(u32::from(round(number, 0xffff)) << 16).to_bits(), number.to_bits());
        }
        assert!(f32::from_bits(u32::from(round(f32::from_bits(0x7fff_ffff), 0xffff)) << 16).is_nan());
        // Over all random bits the mean is the number itself.
        for number in [1.001f32, -0.3, 7.77e-12] {
            let mean: f64 =
                (0..=u16::MAX).map(|random| f64::from(f32::from_bits(u32::from(round(number, random)) << 16))).sum();
            assert!((mean / 65536.0 / f64::from(number) - 1.0).abs() < 1e-12);
        }
    }

    /// Means and correlations within five standard errors.
    #[test]
    fn random_bits_are_fair_and_independent() {
        let count = 1 << 17;
        let place = Place { key: 0x1234_5678, first: 0, block: u32::MAX, stride: 0, offset: 0 };
        let other = Place { key: 0x1234_5679, ..place };
        let half = |word: u32, upper: bool| f64::from(if upper { word >> 16 } else { word & 0xffff }) / 65536.0 - 0.5;
        let bound = 5.0 / 12.0 / f64::from(count).sqrt();
        for step in [1, 2, 1000] {
            for upper in [false, true] {
                let mean = (0..count).map(|i| half(place.random(i, step), upper)).sum::<f64>() / f64::from(count);
                assert!(mean.abs() < 5.0 / (12.0 * f64::from(count)).sqrt(), "{mean}");
                let with = |pair: &dyn Fn(u32) -> u32| {
                    let products = (0..count).map(|i| half(place.random(i, step), upper) * half(pair(i), upper));
                    (products.sum::<f64>() / f64::from(count)).abs()
                };
                assert!(with(&|i| place.random(i + 1, step)) < bound, "neighbours");
                assert!(with(&|i| place.random(i, step + 1)) < bound, "the next step");
                assert!(with(&|i| other.random(i, step)) < bound, "another tensor");
            }
        }
    }

    /// Columns 2 and 3 of a tensor of 3 rows and 4 columns have the bits that they have in the whole tensor, from any
    /// element on.
    #[test]
    fn slices_have_the_bits_of_the_whole() {
        let whole = Place { key: 7, first: 0, block: 12, stride: 12, offset: 0 };
        let columns = Place { key: 7, first: 0, block: 2, stride: 4, offset: 2 };
        let expected: Vec<u32> = [2, 3, 6, 7, 10, 11].map(|i| whole.random(i, 9)).to_vec();
        assert_eq!((0..6).map(|i| columns.random(i, 9)).collect::<Vec<_>>(), expected);
        let rest = Place { first: 3, ..columns };
        assert_eq!((0..3).map(|i| rest.random(i, 9)).collect::<Vec<_>>(), expected[3..]);
    }

    /// Resumed runs depend on these.
    #[test]
    fn bits_are_these_for_ever() {
        let place = Place { key: 1, first: 2, block: 3, stride: 5, offset: 7 };
        assert_eq!([0, 1, 1 << 31].map(|i| place.random(i, 11)), [3_246_454_481, 1_002_864_398, 2_195_395_744]);
    }
}
